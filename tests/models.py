"""Small random models of every family with a policy, and what tests of rollouts share."""

from collections.abc import Callable

import torch
from model_families import BUILDERS, VOCAB
from transformers import PreTrainedModel

PAD = 0


def build_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A family's model."""
    return randomised(BUILDERS[family], seed)


def randomised(build: Callable[[], PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """A model whose next-token distributions are peaked enough for greedy ties not to occur."""
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.pad_token_id = PAD
    return model.eval()


def padded_prompts(seed: int = 1, num_prompts: int = 6, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded random prompts of mixed lengths and their mask."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (num_prompts, width), generator=generator)
    mask = torch.ones_like(input_ids)
    for row, padding in enumerate([0, 3, width - 1, 1, 0, 5][:num_prompts]):
        mask[row, :padding] = 0
        input_ids[row, :padding] = PAD
    return input_ids, mask


def module_logprobs(model, sequences: torch.Tensor, mask: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the responses by one forward pass of the model itself, `[B, T]`."""
    width = mask.shape[1]
    full = torch.cat([mask, torch.ones_like(sequences[:, width:])], dim=1)
    positions = (full.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(sequences, attention_mask=full, position_ids=positions).logits[:, width - 1 : -1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return logprobs.gather(-1, sequences[:, width:, None]).squeeze(-1)
