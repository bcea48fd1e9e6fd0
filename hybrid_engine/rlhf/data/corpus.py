"""What supervised training learns: the rows of a data set or of a small task, as tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.rlhf.data.bad_rows import encode_each, told_together
from hybrid_engine.rlhf.data.encoding import Encoded, encode_completion, read_template
from hybrid_engine.rlhf.data.lengths import keep_fitting, limit_of
from hybrid_engine.rlhf.data.parts import check_parts, load_parts
from hybrid_engine.rlhf.data.reading import read_learned_rows
from hybrid_engine.rlhf.data.rows import LearnedRow, texts_of
from hybrid_engine.rlhf.runs.stages import load_config, load_tokenizer, num_positions
from hybrid_engine.rlhf.tasks import arithmetic, calculator
from hybrid_engine.rlhf.tasks.small_llama import MAX_POSITIONS, train_tokenizer
from hybrid_engine.rlhf.tasks.stdlib_docs import stdlib_rows

Rows = tuple[list[LearnedRow], list[LearnedRow]]
TASKS: dict[str, Callable[[int], Rows]] = {
    "docs": lambda seed: stdlib_rows(),
    "sums": lambda seed: (arithmetic.training_rows(seed), arithmetic.held_out_work()),
    "calculator": lambda seed: (calculator.training_rows(seed), calculator.held_out_work()),
}
"""Training and held-out rows of the tasks that need no data set, by a seed."""
TOKENIZERS = {"sums": arithmetic.build_tokenizer, "calculator": calculator.build_tokenizer}
"""Of those whose tokens are characters."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The rows as tokens."""

    train: list[Encoded]
    held_out: list[Encoded]
    pad_token: int


@told_together()
def load_corpus(config: Any) -> tuple[PreTrainedTokenizerBase, Corpus]:
    """The tokenizer, loaded or made for the training rows, and all rows as tokens, as a `sft.Config` says.

    Raises:
        ValueError: an option names what cannot be read, a row cannot be learned or is too long.
    """
    train: list[LearnedRow]
    held_out: list[LearnedRow]
    if config.dataset is None:
        train, held_out = TASKS[config.task](config.seed)
    else:
        train, held_out = load_parts(config.source, read_learned_rows)
    train = train[: config.max_examples or None]
    if config.model:
        tokenizer, positions = load_tokenizer(config.model), num_positions(load_config(config.model))
    elif config.task in TOKENIZERS and config.dataset is None:
        tokenizer, positions = TOKENIZERS[config.task](), MAX_POSITIONS
    else:
        texts = (text for row in train for text in texts_of(row))
        tokenizer, positions = train_tokenizer(texts, config.vocab_size), MAX_POSITIONS
    if config.chat_template:
        tokenizer.chat_template = read_template(config.chat_template)
    model = f"--model={config.model!r}" if config.model else "what is made without --model"
    limit, encoded = limit_of(config.max_tokens, positions, model), []
    for part in (train, held_out):
        rows, tokens = encode_each(config, part, partial(encode_completion, tokenizer))
        encoded.append(keep_fitting(config, rows, tokens, limit)[1])
    if config.dataset is not None:
        check_parts(config.source, encoded[0], encoded[1])
    return tokenizer, Corpus(train=encoded[0], held_out=encoded[1], pad_token=tokenizer.pad_token_id)
