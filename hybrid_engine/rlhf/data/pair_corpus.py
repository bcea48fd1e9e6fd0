"""What a reward model learns: the preference pairs of a data set or of the small task, as tokens, in batches."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.rlhf.data.bad_rows import encode_each, told_together
from hybrid_engine.rlhf.data.encoding import encode_completion
from hybrid_engine.rlhf.data.lengths import keep_fitting, limit_of
from hybrid_engine.rlhf.data.pairs import Pair, build_pair, num_characters
from hybrid_engine.rlhf.data.parts import check_parts, load_parts
from hybrid_engine.rlhf.data.reading import read_preference_rows
from hybrid_engine.rlhf.data.sequences import epochs_of_similar_length
from hybrid_engine.rlhf.runs.stages import load_config, num_positions
from hybrid_engine.rlhf.tasks.stdlib_docs import split, stdlib_examples, stdlib_row
from hybrid_engine.rlhf.tasks.stdlib_pairs import build_preferences

NUM_REFERENCES = 512
"""Good answers whose scores say where 0 is and what 1."""


@dataclass(frozen=True, kw_only=True)
class PairCorpus:
    """The pairs of a run."""

    train: list[Pair]
    held_out: list[Pair]
    references: list[list[int]]
    """Good answers behind their prompts, by which scores are normalised."""
    batches: list[list[int]]
    """Indices of `train`, by optimizer step."""


@told_together()
def load_pair_corpus(config: Any, tokenizer: PreTrainedTokenizerBase, source: str) -> PairCorpus:
    """All pairs as tokens, as a `reward.Config` says; `source` is the model whose body is trained.

    Raises:
        ValueError: `--dataset` cannot be read, a row is no pair, or is too long.
    """
    if config.dataset is None:
        train_examples, held_out_examples = split(stdlib_examples())
        train_examples = train_examples[: config.max_examples or None]
        train, held_out = (build_preferences(part, config.seed) for part in (train_examples, held_out_examples))
        good = [encode_completion(tokenizer, stdlib_row(example)) for example in train_examples[:NUM_REFERENCES]]
        references = [answer.prompt_ids + answer.response_ids for answer in good]
    else:
        train, held_out = load_parts(config.source, read_preference_rows)
    random.Random(config.seed).shuffle(train)
    train = train[: config.num_pairs or None]
    limit = limit_of(config.max_tokens, num_positions(load_config(source)), f"--model={source!r}")
    encoded = []
    for part in (train, held_out):
        encode = partial(build_pair, tokenizer, kind_column=None if config.dataset else "kind")
        encoded.append(keep_fitting(config, *encode_each(config, part, encode), limit))
    (train, pairs), (_, held_out_pairs) = encoded
    if config.dataset is not None:
        check_parts(config.source, pairs, held_out_pairs)
        references = [pair.chosen for pair in pairs[:NUM_REFERENCES]]
    lengths = [num_characters(row) for row in train]
    batches = epochs_of_similar_length(lengths, config.batch_size, config.epochs, config.seed)
    return PairCorpus(train=pairs, held_out=held_out_pairs, references=references, batches=batches)
