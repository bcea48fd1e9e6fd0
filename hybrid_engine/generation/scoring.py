"""Log-probabilities of tokens that are given, by one pass of the containers over whole sequences.

N packed tokens, V vocabulary.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from hybrid_engine.containers import InferenceModel
from hybrid_engine.generation.batching.sequence import Prompt
from hybrid_engine.ops import PrefillBatch

MAX_LOGITS = 2**27
"""Of one pass; more are made in several."""


class TokenScores(NamedTuple):
    """Of the tokens of one prompt, the first left out, which nothing comes before."""

    logprobs: list[float]
    """Under softmax(logits), unfiltered and at temperature 1."""
    tops: list[list[tuple[int, float]]]
    """The likeliest tokens at each position, the likeliest first."""


def score_packed(
    model: InferenceModel, tokens: torch.Tensor, lengths: list[int], wanted: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits `[N, V]` fp32 after every one of the packed `tokens [N]` of sequences of `lengths`, or after `wanted`."""
    device, longest = model.device, max(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    sizes = torch.tensor(lengths)
    blocks = torch.arange(len(lengths)).repeat_interleave(sizes).to(device)
    model.prepare_positions(longest)
    batch = PrefillBatch(
        tokens=tokens,
        positions=positions,
        write_blocks=blocks,
        write_offsets=positions,
        lengths=tuple(lengths),
        starts=nn.functional.pad(sizes.cumsum(0), (1, 0)).int().to(device),
        wanted=torch.arange(len(tokens), device=device) if wanted is None else wanted,
        row_lengths=sizes.repeat_interleave(sizes).to(device),
    )
    kv = torch.zeros(model.kv_shape(len(lengths), longest), dtype=model.dtype, device=device)
    return model.forward(batch, kv, model.layers)


def score_prompts(model: InferenceModel, prompts: Iterable[Prompt]) -> None:
    """Notes the scores of the tokens of those `prompts` that want them and have none. The weights must be bound."""
    for prompt in dict.fromkeys(prompts):
        if prompt.num_tops is not None and prompt.scores is None:
            prompt.scores = score_tokens(model, prompt.tokens, prompt.num_tops)


def score_tokens(model: InferenceModel, tokens: list[int], num_tops: int) -> TokenScores:
    """The log-probability of each of `tokens` but the first, after those before it. The weights must be bound."""
    given = torch.tensor(tokens, device=model.device)
    logprobs: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    for places in torch.arange(len(tokens) - 1, device=model.device).split(max(1, MAX_LOGITS // model.vocab_size)):
        found = score_packed(model, given, [len(tokens)], places).float().log_softmax(-1)
        logprobs += found.gather(1, given[places + 1, None]).squeeze(1).tolist()
        likeliest = found.topk(min(num_tops, model.vocab_size), dim=-1)
        pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        tops += [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return TokenScores(logprobs, tops)
