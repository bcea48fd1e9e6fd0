"""What an attached `generate(..., return_dict_in_generate=True)` returns: transformers' class, with more in it."""

from dataclasses import dataclass

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from hybrid_engine.generation.output import GenerateOutput


@dataclass
class AttachedOutput(GenerateDecoderOnlyOutput):
    """`sequences`, and of the fields below those that transformers has not; their meaning is `GenerateOutput`'s."""

    logprobs: torch.Tensor | None = None
    """`[B*G, T]` fp32 of the sampled tokens under softmax(logits / temperature); 0 after the response."""
    lengths: torch.Tensor | None = None
    """`[B*G]` int64: tokens of the response, the end-of-sequence token included."""
    finish_reason: list[str] | None = None
    """"stop" or "length"."""
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    prompt_logprobs: torch.Tensor | None = None
    prompt_top_tokens: torch.Tensor | None = None
    prompt_top_logprobs: torch.Tensor | None = None


def as_transformers(output: torch.Tensor | GenerateOutput) -> torch.Tensor | AttachedOutput:
    """Tokens as they are, and a dict of results as transformers' class."""
    return output if isinstance(output, torch.Tensor) else AttachedOutput(**output)
