"""What a pass over given items looks like, by their lengths alone: as many rows, as long, sharing the same prompts.

Dealing items out, measuring a run and planning it go by the same shapes.
"""

from collections.abc import Sequence

from hybrid_engine.recipes.data.packing import Layout, Prompt, fit_rows, lay_out_spans
from hybrid_engine.recipes.data.spans import Span, num_copied
from hybrid_engine.training.pass_memory import PassShape

Items = Sequence[tuple[int, ...]]
"""Lengths in tokens of the sequences of each item, which stay together in a pass: a sequence, or the two of a pair."""
NO_PROMPT = Prompt(None, 0)


def shape_of(items: Items, prompts: Sequence[Prompt] | None, layout: Layout) -> PassShape:
    """The pass over `items`; where rows hold several sequences, with the responses' share of all tokens in each.

    Args:
        items: of the pass.
        prompts: with which all sequences of each item begin, of length 0 where theirs differ; None: without prompts.
            What stands behind them is a response.
        layout: of the pass.
    """
    lengths = [length for item in items for length in item]
    each = prompts if prompts is not None else [NO_PROMPT] * len(items)
    own = [prompt for prompt, item in zip(each, items, strict=True) for _ in item]
    responses = [length - prompt.length for length, prompt in zip(lengths, own, strict=True)]
    if layout is Layout.PADDED:  # prompts to the left, the rest to the right of one column
        longest = max((prompt.length for prompt in own), default=0)
        return PassShape(len(lengths), longest, max(responses, default=0))
    if layout is Layout.ROWS:
        width = max(lengths, default=0)
        response = -(-width * sum(responses) // max(1, sum(lengths)))
        return PassShape(len(fit_rows(lengths)), width - response, response)
    spans = tuple(lay_out_spans(lengths, own)) if layout is Layout.SPANS else ()
    num_cells = sum(span.length for span in spans) if spans else sum(lengths)
    return PassShape(1, num_cells - sum(responses), sum(responses), spans)


def size_of(shape: PassShape) -> float:
    """By which passes are compared; the bytes of some 30 numbers of a layer's width are one.

    A response's token, which the head reads, and a copied key and value of a shared prompt are a tenth more.
    """
    copied = num_copied([Span(*span) for span in shape.spans])
    return shape.num_cells + (shape.rows * shape.response + copied) / 10
