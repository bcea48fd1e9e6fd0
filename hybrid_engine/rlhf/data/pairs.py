"""Preference pairs as tokens, for a model that scores prompt and answer together."""

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hybrid_engine.rlhf.data.encoding import encode_pair
from hybrid_engine.rlhf.data.held_out import prompt_text
from hybrid_engine.rlhf.data.packing import Prompt
from hybrid_engine.rlhf.data.rows import PreferenceRow


class Pair(NamedTuple):
    """Two answers, each behind its prompt."""

    chosen: list[int]
    rejected: list[int]
    margin: float
    """By how much the scores are to differ; 0 where the data set does not say."""
    kind: str | None
    """What is wrong with the rejected answer; None where that is not known."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each answer, with its prompt."""
        return len(self.chosen), len(self.rejected)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Nothing that is known to be shared: a score is read of the whole."""
        return (Prompt(None, 0),) * 2

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer of both answers, with its prompt."""
        return max(self.lengths)


def build_pair(tokenizer: PreTrainedTokenizerBase, row: PreferenceRow, kind_column: str | None = None) -> Pair:
    """The row as tokens; the column `kind_column` tells what is wrong with the rejected answer."""
    chosen, rejected = (answer.prompt_ids + answer.response_ids for answer in encode_pair(tokenizer, row))
    return Pair(chosen, rejected, row.margin or 0.0, row.columns[kind_column] if kind_column else None)


def num_characters(row: PreferenceRow) -> int:
    """Characters of the prompt with the longer answer: what batches are sorted by."""
    return len(prompt_text(row.prompt)) + max(len(prompt_text(row.chosen)), len(prompt_text(row.rejected)))
