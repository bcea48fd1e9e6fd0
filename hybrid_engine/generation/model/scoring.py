"""Log-probabilities of existing tokens, such as a prompt's, by passes over whole sequences.

N packed tokens, V vocabulary.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.generation.request.core import Prompt
from hybrid_engine.ops import Context, PrefillBatch

MAX_LOGITS = 2**27
"""Maximum number of logits of one pass; more are computed in several passes."""
MOST_TOKENS = {"cpu": 512, "cuda": 2048}
"""Tokens of one pass of containers, by device type: others decode between two passes, as between chunks of a prompt."""


class TokenScores(NamedTuple):
    """Scores of the tokens of one prompt except the first, which no token precedes."""

    logprobs: list[float]
    """Log-probabilities under softmax(logits), unfiltered and at temperature 1."""
    tops: list[list[tuple[int, float]]]
    """The likeliest tokens at each position, the likeliest first."""


def score_packed(
    model: InferenceModel,
    tokens: torch.Tensor,
    lengths: list[int],
    wanted: torch.Tensor | None = None,
    layers: Iterable[InferenceLayer] | None = None,
) -> torch.Tensor:
    """Returns logits `[N, V]` fp32 after each of the packed `tokens [N]` of sequences of `lengths`, or after `wanted`.

    `layers`: one pass over the model's layers, if they are gathered one by one.
    """
    longest = max(lengths)
    model.prepare_positions(longest)
    kv = torch.zeros(model.kv_shape(len(lengths), longest), dtype=model.dtype, device=model.device)
    return model.forward(pack(tokens, lengths, wanted), kv, model.layers if layers is None else layers)


def pack(
    tokens: torch.Tensor, lengths: list[int], wanted: torch.Tensor | None = None, num_before: int = 0
) -> PrefillBatch:
    """Packs the `tokens [N]` of sequences of `lengths`, each in a block of its own; logits after all or `wanted`.

    `num_before` tokens of each sequence have been fed before.
    """
    device = tokens.device
    positions = torch.cat([torch.arange(num_before, num_before + length) for length in lengths]).to(device)
    sizes = torch.tensor(lengths)
    blocks = torch.arange(len(lengths)).repeat_interleave(sizes).to(device)
    return PrefillBatch(
        tokens=tokens,
        positions=positions,
        write_blocks=blocks,
        write_offsets=positions,
        lengths=tuple(lengths),
        starts=nn.functional.pad(sizes.cumsum(0), (1, 0)).int().to(device),
        wanted=torch.arange(len(tokens), device=device) if wanted is None else wanted,
        row_lengths=(sizes + num_before).repeat_interleave(sizes).to(device),
        context=None if num_before == 0 else _whole_blocks([num_before + length for length in lengths], device),
    )


def _whole_blocks(lengths: list[int], device: torch.device) -> Context:
    sizes = torch.tensor(lengths)
    return Context(
        blocks=torch.arange(len(lengths)).repeat_interleave(sizes).to(device),
        offsets=torch.cat([torch.arange(length) for length in lengths]).to(device),
        lengths=tuple(lengths),
        starts=nn.functional.pad(sizes.cumsum(0), (1, 0)).int().to(device),
    )


def score_prompts(model: InferenceModel, prompts: Iterable[Prompt]) -> None:
    """Scores those of `prompts` that request scores and do not have them. The weights must be bound."""
    for prompt in dict.fromkeys(prompts):
        for _ in score_in_passes(model, prompt, lambda: model.layers) if is_unscored(prompt) else ():
            pass


def is_unscored(prompt: Prompt) -> bool:
    """Whether `prompt` requests scores of its tokens and does not have them."""
    return prompt.num_tops is not None and prompt.scores is None


def score_in_passes(
    model: InferenceModel, prompt: Prompt, layers: Callable[[], Iterable[InferenceLayer]]
) -> Iterator[None]:
    """Scores each token of `prompt` but the first, given the tokens before it. The weights must be bound.

    Each step is one pass over `layers()`; the scores are set after the last one.
    """

    longest, kv = len(prompt.tokens), None

    def logits_after(given: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        nonlocal kv
        if model.angles.trained_length is not None:  # keys of a part have other frequencies than those of the whole
            return score_packed(model, given, [longest], places, layers())
        if kv is None:
            model.prepare_positions(longest)
            kv = torch.zeros(model.kv_shape(1, longest), dtype=model.dtype, device=model.device)
        return model.forward(pack(given[places], [len(places)], num_before=int(places[0])), kv, layers())

    return _score(prompt, logits_after, model.vocab_size, model.device, MOST_TOKENS.get(model.device.type, 2048))


def score_by_module(module: nn.Module, prompts: Iterable[Prompt], vocab_size: int, device: torch.device) -> None:
    """`score_prompts` by the forward of `module`, which must be whole and on `device`."""
    forward = getattr(module, "get_base_model", lambda: module)().forward
    keeps_places = "logits_to_keep" in inspect.signature(forward).parameters

    def logits_after(given: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        options = {"logits_to_keep": places} if keeps_places else {}
        logits = module(input_ids=given[None], attention_mask=torch.ones_like(given[None]), **options).logits[0]
        return logits if keeps_places else logits[places]

    for prompt in filter(is_unscored, dict.fromkeys(prompts)):
        for _ in _score(prompt, logits_after, vocab_size, device):
            pass


def _score(
    prompt: Prompt,
    logits_after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    vocab_size: int,
    device: torch.device,
    most_tokens: int = MAX_LOGITS,
) -> Iterator[None]:
    """Scores `prompt` in steps of one call of `logits_after`: tokens `[N]` and n places -> logits `[n, V]`."""
    tokens, num_tops = prompt.tokens, prompt.num_tops or 0
    given = torch.tensor(tokens, device=device)
    scores = TokenScores([], [])
    at_once = min(most_tokens, max(1, MAX_LOGITS // vocab_size))
    for places in torch.arange(len(tokens) - 1, device=device).split(at_once):
        if len(places):
            found = logits_after(given, places).float().log_softmax(-1)
            scores.logprobs.extend(found.gather(1, given[places + 1, None]).squeeze(1).tolist())
            likeliest = found.topk(min(num_tops, found.shape[1]), dim=-1)
            pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
            scores.tops.extend(list(zip(ids, values, strict=True)) for ids, values in pairs)
            yield
    prompt.scores = scores


class ScoringTurns:
    """Scores prompts in addition to the turns of sequences, one pass per turn.

    Args:
        layers: one pass over the layers of `model`.
    """

    def __init__(self, model: InferenceModel, layers: Callable[[], Iterable[InferenceLayer]]):
        self._model, self._layers = model, layers
        self._passes: deque[tuple[Prompt, Iterator[None]]] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a pass is left."""
        return bool(self._passes)

    def add(self, prompts: Iterable[Prompt]) -> None:
        """Queues those of `prompts` that request scores and do not have them."""
        known = {prompt for prompt, _ in self._passes}
        new = [prompt for prompt in dict.fromkeys(prompts) if is_unscored(prompt) and prompt not in known]
        self._passes += [(prompt, score_in_passes(self._model, prompt, self._layers)) for prompt in new]

    def keep(self, wanted: set[Prompt]) -> None:
        """Drops the passes of all prompts but `wanted`."""
        self._passes = deque((prompt, passes) for prompt, passes in self._passes if prompt in wanted)

    def turn(self) -> bool:
        """Makes the next pass; returns False if none is left."""
        while self._passes:
            if next(self._passes[0][1], self) is not self:
                return True
            self._passes.popleft()  # its last pass was the previous one
        return False
