"""Tiny random actors and value models, and prompts for them: what step3_like.py and plain_ppo.py both start from.

Plain PyTorch and transformers; nothing here knows of an engine. B: prompts; P: prompt length; T: whole length.
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

PAD = 0  # and the end of an answer: scripts pad with the end token
PROMPT_WIDTH, MIN_ANSWER = 6, 2


def llama_config() -> LlamaConfig:
    """Two layers and grouped queries; odd sizes, so that shards are uneven on two processes."""
    return LlamaConfig(
        vocab_size=33,
        hidden_size=32,
        intermediate_size=63,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        eos_token_id=PAD,
        bos_token_id=None,
        tie_word_embeddings=False,
    )


def build_actor(seed: int) -> LlamaForCausalLM:
    """The same weights for the same seed, peaked enough that greedy ties do not occur."""
    return _peaked(LlamaForCausalLM, seed)


def _peaked(model_class, seed):
    torch.manual_seed(seed)
    model = model_class(llama_config())
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2).add_(torch.randn_like(param) * 0.05)
    return model


class ValueModel(nn.Module):
    """A transformer with a number per token: the critic, and the reward model by the number at the answer's end."""

    def __init__(self, seed: int):
        super().__init__()
        self.rwtransformer = _peaked(LlamaModel, seed)
        self.config = self.rwtransformer.config
        self.v_head = nn.Linear(self.config.hidden_size, 1, bias=False)

    def gradient_checkpointing_enable(self):
        self.rwtransformer.gradient_checkpointing_enable()

    def forward_value(self, input_ids, attention_mask=None, return_value_only=False, prompt_length=0, use_cache=False):
        """Values `[B, T]`; unless `return_value_only` in a dict with those at the answers' last tokens, `[B]`."""
        hidden = self.rwtransformer(input_ids, attention_mask=attention_mask, use_cache=use_cache)[0]
        values = self.v_head(hidden).squeeze(-1)
        if return_value_only:
            return values
        is_answer = input_ids[:, prompt_length:] != PAD
        last = prompt_length + is_answer.sum(dim=1) - 1
        return {"values": values, "chosen_end_scores": values.gather(1, last[:, None]).squeeze(1)}


def prompt_batch(step: int, rank: int, num_prompts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts `[B, P]` of one process in one iteration, and their mask."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    prompts = torch.randint(1, llama_config().vocab_size, (num_prompts, PROMPT_WIDTH), generator=generator)
    lengths = torch.randint(2, PROMPT_WIDTH + 1, (num_prompts, 1), generator=generator)
    mask = (torch.arange(PROMPT_WIDTH) >= PROMPT_WIDTH - lengths).long()
    return prompts * mask, mask
