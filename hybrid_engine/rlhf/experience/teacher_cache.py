"""A teacher's stored pass: its likeliest tokens at each place of a data set's answers, in a folder.

A run that learns from the answers of its data set writes the folder, and later runs read it in place of the teacher.
`pass.json` says which teacher read which tokens; each process wrote a file of the answers that it had scored. An answer
is found by a digest of the ids of its prompt and of its own, so the order of the data set does not matter.

R: answers of a file, T: tokens of an answer, N: tokens of all answers of a file, K: likeliest tokens of each.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from hybrid_engine.ops.linear_divergence import TopTokens
from hybrid_engine.rlhf.runs.stages import load_config

IDENTITY_FILE = "pass.json"
TENSORS = ("ids", "logprobs", "log_rest")
"""`[N, K]` int32, `[N, K]` fp32 and `[N]` fp32: as in `TopTokens`."""
DIGESTED_AT_ONCE = 2**24  # bytes


@dataclass(frozen=True, kw_only=True)
class PassIdentity:
    """The facts on which a pass depends, in the order in which their differences are reported."""

    teacher: str
    """Name, folder or address."""
    weights: str
    """Digest of its weights, or its commit on the hub; empty for an address."""
    vocabulary: str
    """Digest of the tokens and their ids."""
    template: str
    """Digest of the chat template."""
    temperature: float
    num_likeliest: int
    """K."""

    @classmethod
    def of(
        cls, teacher: str, tokenizer: PreTrainedTokenizerBase, temperature: float, num_likeliest: int, weights: str
    ) -> "PassIdentity":
        """The identity of a pass of `teacher` over tokens of `tokenizer`."""
        vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
        return cls(
            teacher=teacher,
            weights=weights,
            vocabulary=_digest_of(json.dumps(vocabulary)),
            template=_digest_of(json.dumps(tokenizer.chat_template)),
            temperature=temperature,
            num_likeliest=num_likeliest,
        )


DIFFERENCES = {
    "teacher": "is of the teacher {found!r}, not {expected!r}",
    "weights": "is of other weights than {teacher!r} has now",
    "vocabulary": "is of other tokens than the tokenizer of the actor has",
    "template": "is of another chat template than the tokenizer of the actor has",
    "temperature": "is of --teacher-temperature={found}, not {expected}",
    "num_likeliest": "is of --teacher-top-k={found}, not {expected}",
}
"""The report of each field of `PassIdentity` that differs."""


class StoredPass:
    """A complete pass on disk, whose files are read where they are needed."""

    def __init__(self, folder: Path, expected: PassIdentity):
        """Opens the pass of `folder`.

        Raises:
            ValueError: it is damaged, or not the pass that is expected.
        """
        self.folder = folder
        found, wanted = _read_identity(folder), asdict(expected)
        for name in DIFFERENCES:
            is_same_model = name == "teacher" and found["weights"] == wanted["weights"] != ""
            if found[name] != wanted[name] and not is_same_model:
                difference = DIFFERENCES[name].format(
                    found=found[name], expected=wanted[name], teacher=expected.teacher
                )
                raise ValueError(f"{_shown(folder)} {difference}; give another folder, or delete this one")
        self.num_likeliest = expected.num_likeliest
        self._places: dict[bytes, tuple[Path, int, int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._places |= {digest: (path, first, last) for digest, first, last in _places_in(path)}

    def check(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Raises ValueError unless the pass has each answer after its prompt."""
        for prompt, answer in zip(prompts, answers, strict=True):
            self._place(prompt, answer)

    def score(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[TopTokens]:
        """The likeliest tokens at each place of each answer; ValueError for an answer that was not scored."""
        return [self._read(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _place(self, prompt: list[int], answer: list[int]) -> tuple[Path, int, int]:
        """File, first and last place of an answer."""
        place = self._places.get(row_digest(prompt, answer))
        if place is None:
            raise ValueError(
                f"{_shown(self.folder)} has no answer of the tokens {answer[:8]}... after the prompt {prompt[:8]}...; "
                "it belongs to other data: give another folder, or delete it to make the pass again"
            )
        return place

    def _read(self, prompt: list[int], answer: list[int]) -> TopTokens:
        path, first, last = self._place(prompt, answer)
        with _opened(path) as file:
            ids, logprobs, log_rest = (file.get_slice(name)[first:last] for name in TENSORS)
        if ids.shape != (len(answer), self.num_likeliest) or logprobs.shape != ids.shape:
            raise ValueError(f"{_shown(self.folder)} is damaged: {path.name} has other sizes than its index")
        return TopTokens(ids.long(), logprobs, log_rest)


def write_rows(
    path: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]], scored: Sequence[TopTokens]
) -> None:
    """Writes a process's part of a pass: the answers after their prompts with their likeliest tokens."""
    digests = [row_digest(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    tensors = {
        "digests": torch.from_numpy(np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1).copy()),
        "ends": torch.tensor([len(answer) for answer in answers]).cumsum(0),
        "ids": torch.cat([part.ids for part in scored]).to(torch.int32),
        "logprobs": torch.cat([part.logprobs for part in scored]).float(),
        "log_rest": torch.cat([part.all_but_listed() for part in scored]).float(),
    }
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path)


def begin_pass(unfinished: Path) -> None:
    """Makes an empty folder for the files of `write_rows`, in place of those of a run that was interrupted."""
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def publish_pass(unfinished: Path, folder: Path, identity: PassIdentity) -> None:
    """Completes a pass whose files of rows are written, and gives its folder the name `folder`."""
    (unfinished / IDENTITY_FILE).write_text(json.dumps(asdict(identity), indent=1) + "\n", encoding="utf-8")
    unfinished.rename(folder)


def row_digest(prompt: list[int], answer: list[int]) -> bytes:
    """16 bytes that stand for the tokens of an answer and of its prompt."""
    numbers = np.array([len(prompt), *prompt, *answer], dtype="<i8")
    return hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()


def weights_digest(source: str) -> str:
    """Stands for the weights of a model: its commit on the hub, or a digest of its files, a second for a gigabyte."""
    if commit := getattr(load_config(source, "teacher"), "_commit_hash", None):
        return str(commit)
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for kind in ("*.safetensors", "*.bin") for path in Path(source).glob(kind)):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while part := file.read(DIGESTED_AT_ONCE):
                digest.update(part)
    return digest.hexdigest()


def _digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _shown(folder: Path) -> str:
    return f"--teacher-cache={str(folder)!r}"


def _read_identity(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / IDENTITY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{_shown(folder)} has no complete pass of a teacher ({error}); give another folder, or delete this one"
        ) from error
    if not isinstance(found, dict) or found.keys() != DIFFERENCES.keys():
        raise ValueError(f"{_shown(folder)} is damaged: {IDENTITY_FILE} names other facts; delete it")
    return {name: found[name] for name in DIFFERENCES}


def _opened(path: Path) -> Any:
    return safe_open(path, "pt")


def _places_in(path: Path) -> Iterator[tuple[bytes, int, int]]:
    """Digest, first and last place of each answer of a file."""
    try:
        with _opened(path) as file:
            digests, ends = file.get_tensor("digests"), file.get_tensor("ends").tolist()
            num_tokens = file.get_slice("ids").get_shape()[0]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{_shown(path.parent)} is damaged: {path.name} ({error}); delete it") from error
    if len(digests) != len(ends) or (ends and ends[-1] != num_tokens):
        raise ValueError(f"{_shown(path.parent)} is damaged: {path.name} has other sizes than its index; delete it")
    return zip((row.tobytes() for row in digests.numpy()), [0, *ends], ends, strict=False)
