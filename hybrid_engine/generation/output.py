"""The output of `generate(..., return_dict_in_generate=True)`, from containers or the model's own `generate()`.

Scores of prompts are part of it: log-probabilities of existing tokens, by passes over whole sequences. N packed tokens,
V vocabulary.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers.utils import ModelOutput

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.sampling import num_before_stop
from hybrid_engine.ops import Context, PrefillBatch, token_logprobs
from hybrid_engine.ops.support_log_prob import Supports

MAX_LOGITS = 2**27
"""Maximum number of logits of one pass; more are computed in several passes."""
MOST_TOKENS = {"cpu": 512, "cuda": 2048}
"""Tokens of one pass of containers, by device type: others decode between two passes, as between chunks of a prompt."""


@dataclass
class GenerateOutput(ModelOutput):
    """Output for B prompts of padded width P with G samples each; T is the longest response. On the prompts' device."""

    sequences: torch.Tensor | None = None
    """`[B*G, P+T]` int64: the padded prompt, the response, then `pad_token_id`."""
    logprobs: torch.Tensor | None = None
    """`[B*G, T]` fp32 of the sampled tokens; 0 after the response.

    By default under softmax(logits / temperature) of the model's logits, whatever filters, penalties or rules chose the
    token: the values that a trainer recomputes. With `logprobs="raw"` the logits are not divided by the temperature;
    `"processed"` is the distribution that the token was drawn from, with all rules and filters.
    """
    lengths: torch.Tensor | None = None
    """`[B*G]` int64: number of tokens of the response, end-of-sequence token included."""
    finish_reason: list[str] | None = None
    """Why each row ended: "stop" or "length".

    "stop" is an end-of-sequence token, a stop sequence or string, or a complete guide; "length" is `max_new_tokens`.
    """
    top_tokens: torch.Tensor | None = None
    """`[B*G, T, n]` int64 with `top_logprobs=n`: the likeliest tokens at each position, the likeliest first."""
    top_logprobs: torch.Tensor | None = None
    """`[B*G, T, n]` fp32: their log-probabilities, of the same distribution as `logprobs`; 0 after the response."""
    supports: Supports | None = None
    """`[B*G, T]` with `record_supports=True`: the tokens that each token was drawn from, on the host."""
    routing: list[torch.Tensor] | None = None
    """With `record_routing=True`, for each of the B*G rows `[n, L, k]` uint8 or int16 on the host: the experts that its
    tokens took, from the first token of its prompt on, in each of the model's L mixtures.

    n is one less than the tokens of prompt and response: the last token drawn is never fed. A token that was computed
    again after a preemption keeps its first experts.
    """
    prompt_logprobs: torch.Tensor | None = None
    """`[B, P]` fp32 with `prompt_logprobs=n`: log-probabilities of the prompts' own tokens under softmax(logits).

    0 at padding and at the first token of each prompt.
    """
    prompt_top_tokens: torch.Tensor | None = None
    """`[B, P, n]` int64: the likeliest tokens at each position, the likeliest first."""
    prompt_top_logprobs: torch.Tensor | None = None
    """`[B, P, n]` fp32: their log-probabilities."""


def add_prompt_scores(output: GenerateOutput, sequences: list[Sequence], mask: torch.Tensor) -> None:
    """Adds the scores of prompts to `output`, if any are requested; `mask [B, P]` is True for their tokens."""
    prompts = [row.prompt for row in sequences[:: max(1, len(sequences) // max(1, len(mask)))]]
    num_tops = max((prompt.num_tops for prompt in prompts if prompt.num_tops is not None), default=None)
    if num_tops is None:
        return
    logprobs = torch.zeros(mask.shape)
    tops = torch.zeros(*mask.shape, num_tops, 2, dtype=torch.float64)
    for row, prompt in enumerate(prompts):
        if prompt.num_tops is None or len(prompt.tokens) == 1:
            continue
        places = mask[row].nonzero().flatten()[1:].cpu()
        logprobs[row, places] = torch.tensor(prompt.scores.logprobs)
        if prompt.num_tops:
            found = torch.tensor(prompt.scores.tops, dtype=torch.float64)
            tops[row, places, : found.shape[1]] = found
    device = mask.device
    output.prompt_logprobs = logprobs.to(device)
    output.prompt_top_tokens = tops[..., 0].long().to(device)
    output.prompt_top_logprobs = tops[..., 1].float().to(device)


def collect_output(input_ids: torch.Tensor, sequences: list[Sequence], options: GenerationOptions) -> GenerateOutput:
    """Collects the finished `sequences`, in the order of their rows, with their prompts `input_ids [B, P]`."""
    rows = sorted(sequences, key=lambda sequence: sequence.row)
    for row in rows:
        if row.options.rules.trim_stop:
            _cut(row, num_before_stop(row))
    width = max((len(row.tokens) for row in rows), default=0)
    tokens = torch.tensor([row.tokens + [options.pad_token_id] * (width - len(row.tokens)) for row in rows])
    logprobs = torch.tensor([row.logprobs + [0.0] * (width - len(row.logprobs)) for row in rows], dtype=torch.float32)
    tokens, logprobs = tokens.view(len(rows), width), logprobs.view(len(rows), width)  # also without rows
    device = input_ids.device
    prompts = input_ids.repeat_interleave(options.num_return_sequences, 0)
    has_supports = options.rules.record_supports or any(row.options.rules.record_supports for row in rows)
    return GenerateOutput(
        sequences=torch.cat([prompts, tokens.to(device, prompts.dtype)], dim=1),
        logprobs=logprobs.to(device),
        lengths=torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64, device=device),
        finish_reason=[str(row.finish_reason) for row in rows],
        **_tops(rows, width, options.pad_token_id, device),
        supports=Supports.of([row.supports for row in rows]) if has_supports else None,
        routing=[_routing(row) for row in rows] if options.rules.record_routing else None,
    )


def _routing(row: Sequence) -> torch.Tensor:
    """The experts `[n, L, k]` of the tokens that were fed."""
    return torch.cat([*row.prompt.routes.parts, *row.routes.parts])[: row.num_fed]


def _cut(row: Sequence, length: int) -> None:
    del row.tokens[length:], row.logprobs[length:], row.tops[length:], row.supports[length:]


def _tops(rows: list[Sequence], width: int, pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    num_tops = max((row.options.rules.top_logprobs for row in rows), default=0)
    if num_tops == 0:
        return {}
    values = torch.zeros(len(rows), width, num_tops, 2, dtype=torch.float64)
    values[..., 0] = pad
    for index, row in enumerate(rows):
        wanted = row.options.rules.top_logprobs
        if wanted and row.tops:
            found = torch.tensor(row.tops, dtype=torch.float64)
            values[index, : len(row.tops), : found.shape[1]] = found
    return {"top_tokens": values[..., 0].long().to(device), "top_logprobs": values[..., 1].float().to(device)}


def response_lengths(responses: torch.Tensor, eos_token_ids: tuple[int, ...]) -> torch.Tensor:
    """Number of tokens `[N]` of each row of `responses [N, T]` up to and including its first end-of-sequence token."""
    if responses.shape[1] == 0:  # argmax() takes no dimension without elements
        return responses.new_zeros(len(responses))
    ends = torch.isin(responses, torch.tensor(eos_token_ids, dtype=responses.dtype, device=responses.device))
    return torch.where(ends.any(1), ends.int().argmax(1) + 1, responses.shape[1])


def measure_module_output(
    sequences: torch.Tensor, logits: tuple[torch.Tensor, ...], prompt_width: int, options: GenerationOptions
) -> GenerateOutput:
    """Builds a GenerateOutput from a model's own `generate()`: its `sequences` and T raw logits `[B*G, V]`."""
    responses = sequences[:, prompt_width:]
    lengths = response_lengths(responses, options.eos_token_ids)
    last = responses.gather(1, lengths[:, None] - 1).flatten().tolist()
    logprobs = token_logprobs(torch.stack(logits, dim=1), responses, options.temperature if options.do_sample else 1.0)
    is_padding = torch.arange(responses.shape[1], device=responses.device) >= lengths[:, None]
    return GenerateOutput(
        sequences=sequences,
        logprobs=logprobs.masked_fill(is_padding, 0.0),
        lengths=lengths,
        finish_reason=["stop" if token in options.eos_token_ids else "length" for token in last],
    )


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
    cache = model.new_cache(len(lengths), longest, len(lengths))
    return model.forward(pack(tokens, lengths, wanted), cache, model.layers if layers is None else layers)


def pack(
    tokens: torch.Tensor, lengths: list[int], wanted: torch.Tensor | None = None, num_before: int = 0
) -> PrefillBatch:
    """Packs the `tokens [N]` of sequences of `lengths`, each in its own block and slot; logits after all or `wanted`.

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
        state_slots=torch.arange(len(lengths), device=device),
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
        for _ in score_in_passes(model, prompt, lambda: model.layers) if prompt.is_unscored else ():
            pass


def score_in_passes(
    model: InferenceModel, prompt: Prompt, layers: Callable[[], Iterable[InferenceLayer]]
) -> Iterator[None]:
    """Scores each token of `prompt` but the first, given the tokens before it. The weights must be bound.

    Each step is one pass over `layers()`; the scores are set after the last one.
    """

    longest, cache = len(prompt.tokens), None

    def logits_after(given: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        nonlocal cache
        if model.angles.trained_length is not None:  # keys of a part have other frequencies than those of the whole
            return score_packed(model, given, [longest], places, layers())
        if cache is None:
            model.prepare_positions(longest)
            cache = model.new_cache(1, longest, 1)
        return model.forward(pack(given[places], [len(places)], num_before=int(places[0])), cache, layers())

    return _score(prompt, logits_after, model.vocab_size, model.device, MOST_TOKENS.get(model.device.type, 2048))


def score_by_module(module: nn.Module, prompts: Iterable[Prompt], vocab_size: int, device: torch.device) -> None:
    """`score_prompts` by the forward of `module`, which must be whole and on `device`."""
    forward = getattr(module, "get_base_model", lambda: module)().forward
    keeps_places = "logits_to_keep" in inspect.signature(forward).parameters

    def logits_after(given: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        options = {"logits_to_keep": places} if keeps_places else {}
        logits = module(input_ids=given[None], attention_mask=torch.ones_like(given[None]), **options).logits[0]
        return logits if keeps_places else logits[places]

    for prompt in [prompt for prompt in dict.fromkeys(prompts) if prompt.is_unscored]:
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
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt.is_unscored and prompt not in known]
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
