"""The output of `generate(..., return_dict_in_generate=True)`, from containers or the model's own `generate()`."""

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from hybrid_engine.generation.batching.processors import num_before_stop
from hybrid_engine.generation.request.core import Sequence
from hybrid_engine.generation.request.options import GenerationOptions
from hybrid_engine.ops import token_logprobs


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
    return GenerateOutput(
        sequences=torch.cat([prompts, tokens.to(device, prompts.dtype)], dim=1),
        logprobs=logprobs.to(device),
        lengths=torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64, device=device),
        finish_reason=[str(row.finish_reason) for row in rows],
        **_tops(rows, width, options.pad_token_id, device),
    )


def _cut(row: Sequence, length: int) -> None:
    del row.tokens[length:], row.logprobs[length:], row.tops[length:]


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
