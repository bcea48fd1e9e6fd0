"""What is learned at once, by its lengths and prompts alone, and what a pass over it looks like.

Dealing items out, measuring a run and planning it go by the same shapes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from hybrid_engine.rlhf.data.packing import Layout, Prompt, fit_rows, lay_out_spans
from hybrid_engine.rlhf.data.spans import Span, count_copied
from hybrid_engine.rlhf.passes.pass_memory import PassShape


class Item(Protocol):
    """What stays together in a pass: a sequence, or the two of a pair."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """What each begins with."""


@dataclass(frozen=True)
class Items:
    """Items that are learned from at once."""

    lengths: Sequence[tuple[int, ...]]
    """Tokens of each item's sequences."""
    prompts: Sequence[tuple[Prompt, ...]]
    """What each of them begins with; the rest is a response."""

    @classmethod
    def of(cls, items: Iterable[Item]) -> "Items":
        """Answers behind their prompts, or pairs of them, as they are encoded."""
        given = list(items)
        return cls([item.lengths for item in given], [item.prompts for item in given])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Of all sequences, whatever they share."""
        return sum(map(sum, self.lengths))

    def take(self, indices: Iterable[int]) -> "Items":
        """The items at `indices`."""
        chosen = list(indices)
        return Items([self.lengths[index] for index in chosen], [self.prompts[index] for index in chosen])

    def shape(self, layout: Layout) -> PassShape:
        """Of a pass over all of them; where rows hold several sequences, with the responses' share of all tokens."""
        lengths = [length for item in self.lengths for length in item]
        prompts = [prompt for item in self.prompts for prompt in item]
        responses = [length - prompt.length for length, prompt in zip(lengths, prompts, strict=True)]
        if layout is Layout.PADDED:  # prompts to the left, the rest to the right of one column
            prompt, response = max((prompt.length for prompt in prompts), default=0), max(responses, default=0)
            padding = len(lengths) * response - sum(responses)
            return PassShape(len(lengths), prompt, response, padding=padding)
        if layout is Layout.ROWS:
            width = max(lengths, default=0)
            response = -(-width * sum(responses) // max(1, sum(lengths)))
            num_rows = len(fit_rows(lengths))
            return PassShape(num_rows, width - response, response, padding=num_rows * response - sum(responses))
        spans = tuple(lay_out_spans(lengths, prompts)) if layout is Layout.SPANS else ()
        num_cells = sum(span.length for span in spans) if spans else sum(lengths)
        return PassShape(1, num_cells - sum(responses), sum(responses), spans)


class Extent(NamedTuple):
    """How much there is in a pass of all that takes memory; a pass with less of each is smaller."""

    cells: int
    """Tokens that the model reads, padding included."""
    responses: int
    """Those of them that the head reads."""
    copied: int
    """Tokens of prompts whose keys and values are copied."""
    pairs: int
    """Pairs of tokens in masks of attention, or in its scores."""


def extent_of(shape: PassShape) -> Extent:
    """The extent of a pass."""
    width = shape.prompt + shape.response
    copied, pairs = count_copied([Span(*span) for span in shape.spans]) if shape.spans else (0, shape.rows * width**2)
    return Extent(shape.num_cells, shape.num_asked, copied, pairs)
