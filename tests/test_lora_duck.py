"""LoRA as scripts for DeepSpeed write it themselves: linears with right and left weights of their own."""

import math

import pytest
import torch
from models import BUILDERS, PAD, build_model, padded_prompts
from torch import nn

import hybrid_engine


class LinearLoRA(nn.Module):
    """What such scripts put in a linear's place with DeepSpeed-Chat's attributes."""

    def __init__(self, linear, rank=3, scaling=2.0, dropout=0.2):
        super().__init__()
        is_transposed = type(linear).__name__ == "Conv1D"
        assert not is_transposed
        self.weight, self.bias = linear.weight, linear.bias
        rows, columns = self.weight.shape
        self.lora_right_weight = nn.Parameter(torch.zeros(columns, rank))
        self.lora_left_weight = nn.Parameter(torch.zeros(rank, rows))
        self.lora_scaling = scaling / rank
        self.lora_dropout = nn.Dropout(dropout)
        nn.init.kaiming_uniform_(self.lora_right_weight, a=math.sqrt(5))
        nn.init.normal_(self.lora_left_weight, std=0.5)
        self.weight.requires_grad = False
        self.fuse_lora = False

    def forward(self, input):
        plain = nn.functional.linear(input, self.weight, self.bias)
        update = self.lora_dropout(input) @ self.lora_right_weight @ self.lora_left_weight
        return plain + update * self.lora_scaling


def adapted(family):
    model = build_model(family)
    torch.manual_seed(4)
    for parent in [m for m in model.modules() if any(isinstance(c, nn.Linear) for c in m.children())]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name not in ("lm_head", "embed_out"):
                setattr(parent, name, LinearLoRA(child))
    return model.eval()


FAMILIES = [name for name in BUILDERS if name != "gpt2"]  # its linears are Conv1D, which such scripts do not replace


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_see_the_adapters_and_leave_the_weights_as_they_were(family):
    model = adapted(family)
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(input_ids, attention_mask=mask, **greedy)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "hybrid_engine": {"enabled": True}}
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    assert engine.generator.fallback_reason is None
    before = {name: p.clone() for name, p in engine.module.named_parameters()}
    assert engine.eval().generate(input_ids, attention_mask=mask, **greedy).tolist() == expected.tolist()
    assert all(torch.equal(p, before[name]) for name, p in engine.module.named_parameters())
    base = build_model(family).generate(input_ids, attention_mask=mask, **greedy)
    assert base.tolist() != expected.tolist()  # the adapters do something


def test_training_moves_the_adapters_and_the_next_rollout_sees_them():
    engine, *_ = hybrid_engine.initialize(
        model=adapted("llama"),
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
            "hybrid_engine": {"enabled": True},
        },
    )
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": PAD}
    engine.eval()
    first = engine.generate(input_ids, attention_mask=mask, **greedy)
    engine.train()
    engine.backward(engine(input_ids=input_ids[:1], labels=input_ids[:1]).loss)
    engine.step()
    engine.eval()
    second = engine.generate(input_ids, attention_mask=mask, **greedy)
    assert second.tolist() != first.tolist()
    own = type(engine.module).generate(engine.module, input_ids, attention_mask=mask, **greedy)
    assert second.tolist() == own.tolist()
