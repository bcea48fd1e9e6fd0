"""Questions of the library reasoning-gym as a dataset: `reasoning_gym:chain_sum:max_terms=2,size=4000`.

The name is followed by options, which are the dataset's own (its difficulty) or those of `QuestionOptions`. A row has
the columns `prompt`, `answer` (None if there are several) and `metadata`, which the reward `reasoning_gym` reads.

Question i is generated from the seed `seed + i` alone, in a separate process with a fixed hash seed: some datasets of
the library take their questions from the order of a set, or from Python's global random numbers.
"""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from hybrid_engine.config.checks import flag

SCHEME, LIBRARY = "reasoning_gym", "reasoning_gym"
TRAIN, HELD_OUT = "train", "held_out"
LARGEST_SEED = 2**32 - 1
Entry = dict[str, Any]
"""A question of the library: `question`, `answer` and `metadata`."""


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """The options in a dataset's name, after its colons."""

    name: str
    """The library's name of the dataset."""
    size: int = 2000
    """Number of questions to train on; those that equal a held-out one are left out."""
    seed: int = 0
    """Seed of the first training question."""
    held_out: int = 256
    """Number of held-out questions; of equal ones only the first is kept."""
    held_out_seed: int = 1_000_000_000
    """Seed of the first held-out question: they stay the same for any training questions."""
    shots: int = 0
    """Number of solved examples before each question, from seeds of their own."""
    chat: bool = True
    """Whether a prompt is a conversation; otherwise it is text."""
    config: dict[str, Any] = field(default_factory=dict)
    """The dataset's own options."""

    @classmethod
    def read(cls, dataset: str) -> "QuestionOptions":
        """The options in `reasoning_gym:NAME:option=value,option=value`; a value is JSON, or otherwise text.

        Raises:
            ValueError: an entry is not an option, or its value has the wrong type.
        """
        _, _, rest = dataset.partition(":")
        name, _, given = rest.partition(":")
        pairs = dict(_read_pair(dataset, pair) for pair in _split_options(given))
        kinds = {one.name: type(one.default) for one in fields(cls) if one.name not in ("name", "config")}
        own = {key: value for key, value in pairs.items() if key in kinds}
        for key, value in own.items():
            if type(value) is not kinds[key]:
                kind = "true or false" if kinds[key] is bool else "a whole number"
                raise ValueError(f"--dataset={dataset!r}: {key}={value!r} must be {kind}; change it")
        options = cls(name=name, config={key: value for key, value in pairs.items() if key not in kinds}, **own)
        options.check(dataset)
        return options

    def check(self, dataset: str) -> None:
        """Raises ValueError for numbers out of range, or for seeds shared by training and held-out questions."""
        for key, least in (("size", 1), ("held_out", 1), ("seed", 0), ("held_out_seed", 0), ("shots", 0)):
            if getattr(self, key) < least:
                raise ValueError(
                    f"--dataset={dataset!r}: {key}={getattr(self, key)} must be at least {least}; raise it"
                )
        end = self.held_out_seed + self.held_out + self.shots
        if max(end, self.seed + self.size) > LARGEST_SEED:
            raise ValueError(f"--dataset={dataset!r}: seeds must stay below 2**32; lower seed or held_out_seed")
        if self.seed < end and self.held_out_seed < self.seed + self.size:
            raise ValueError(
                f"--dataset={dataset!r}: the seeds {self.seed} to {self.seed + self.size - 1} are trained on and those "
                f"from {self.held_out_seed} to {end - 1} held out; they must be disjoint: change seed or held_out_seed"
            )


def read_questions(
    dataset: str, split: str | None = None, configuration: str | None = None, split_option: str = "split"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one split, `train` (default) or `held_out`, each with its place.

    Raises:
        ValueError: a split or dataset does not exist, the library refuses an option or is not installed, or nothing is
            left to train on.
    """
    if configuration is not None:
        raise ValueError(
            f"--dataset-config={configuration!r}: the options of {dataset!r} are part of its name; leave it out"
        )
    if split not in (None, TRAIN, HELD_OUT):
        raise ValueError(
            f"{flag(split_option)}={split!r}: {dataset!r} has the splits 'train' and 'held_out'; choose one"
        )
    options = QuestionOptions.read(dataset)
    shots, held_out, train = _parts(dataset)
    if not train:
        raise ValueError(
            f"--dataset={dataset!r}: each of its {options.size} questions equals a held-out one, of which there are "
            f"{len(held_out)}; lower held_out or make the questions harder"
        )
    for entry in held_out if split == HELD_OUT else train:
        metadata = entry["metadata"] | {"source_dataset": options.name, "source_config": options.config}
        prompt = _build_prompt(entry["question"], shots, options.chat)
        yield f"question {entry['seed']}", {"prompt": prompt, "answer": entry["answer"], "metadata": metadata}


@lru_cache(maxsize=8)
def _parts(dataset: str) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """The solved examples, the held-out questions and those to train on; no question is in two of them."""
    options = QuestionOptions.read(dataset)
    first = options.held_out_seed
    ranges = [
        (first + options.held_out, options.shots),
        (first, options.held_out),
        (options.seed, options.size),
    ]
    shots, held_out, train = make_entries(dataset, options, ranges)
    if any(entry["answer"] is None for entry in shots):
        raise ValueError(f"--dataset={dataset!r}: its questions have no single right answer to show; leave shots out")
    seen = {entry["question"] for entry in shots}
    distinct = {entry["question"]: entry for entry in reversed(held_out) if entry["question"] not in seen}
    seen |= distinct.keys()
    return shots, list(distinct.values())[::-1], [entry for entry in train if entry["question"] not in seen]


def _build_prompt(question: str, shots: list[Entry], is_chat: bool) -> str | list[dict[str, str]]:
    if not is_chat:
        return "".join(f"{shot['question']}\n{shot['answer']}\n\n" for shot in shots) + f"{question}\n"
    turns = [text for shot in shots for text in (shot["question"], shot["answer"])] + [question]
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]


def require_library(option: str) -> None:
    """Raises ValueError if reasoning-gym is not installed; `option` is the option that needs it, as it is typed."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise ValueError(
            f"{option} needs the library reasoning-gym, which is not installed; install it with "
            "pip install 'hybrid-engine[real]'"
        )


MAKE_ENTRIES = """
import contextlib, difflib, os, pickle, random, sys
import numpy, reasoning_gym
from reasoning_gym.factory import DATASETS

def make(name, config, ranges):
    if name == "composite":
        return "'composite' has no questions of its own; give several --dataset, with --dataset-weights"
    if name not in DATASETS:
        names = sorted(DATASETS.keys() - {"composite"})
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.6) or names
        return "there is no dataset %r in reasoning-gym; there are %s" % (name, ", ".join(near))
    try:
        parts = []
        for first, count in ranges:
            questions = reasoning_gym.create_dataset(name, **(config | {"seed": first, "size": max(count, 1)}))
            parts.append([])
            for index in range(count):
                random.seed(first + index)
                numpy.random.seed(first + index)
                parts[-1].append(dict(questions[index]) | {"seed": first + index})
        return parts
    except (AssertionError, TypeError, ValueError, KeyError, IndexError) as error:
        options = ", ".join(DATASETS[name][1].__dataclass_fields__)
        return "reasoning-gym refuses the options (%s: %s); they are %s" % (type(error).__name__, error, options)

answer = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # some datasets print while they work
pickle.dump(make(*pickle.load(sys.stdin.buffer)), answer)
"""


def make_entries(dataset: str, options: QuestionOptions, ranges: list[tuple[int, int]]) -> list[list[Entry]]:
    """The library's questions for each range of seeds (first seed, count), with their seeds.

    Raises:
        ValueError: the library is not installed, or refuses the name or the options.
    """
    require_library(f"--dataset={dataset!r}")
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MAKE_ENTRIES],
        input=pickle.dumps((options.name, options.config, ranges)),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},
        check=False,
    )
    if made.returncode:
        reason = made.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"--dataset={dataset!r}: reasoning-gym failed ({' '.join(reason)}); choose other options")
    entries = pickle.loads(made.stdout)
    if isinstance(entries, str):
        raise ValueError(f"--dataset={dataset!r}: {entries}")
    return entries


def _split_options(given: str) -> list[str]:
    """Splits `given` at its commas, except those inside brackets."""
    parts, depth = [""], 0
    for character in given:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part]


def _read_pair(dataset: str, pair: str) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise ValueError(
            f"--dataset={dataset!r}: {pair!r} is not an option; write name=value pairs, separated by commas"
        )
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
