"""What training is compared with: a plain PyTorch loop on a tiny Llama, and the config that says the same."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_engine.zero.sharding import full_tensor

VOCABULARY = 65
MICRO_BATCH = 2
MICRO_BATCHES_PER_STEP = 4
CLIPPING = 0.5
# With torch's 1e-8 the update of a parameter whose gradient is nothing but rounding is a coin toss.
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
WARMUP_STEPS = 3


def tiny_llama(seed: int = 0, *, tie: bool = True, dropout: float = 0.0) -> LlamaForCausalLM:
    """Two layers; odd sizes, so that shards are uneven on two processes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=63,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tie,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


def engine_config(stage: int = 0, world_size: int = 1, **more: Any) -> dict[str, Any]:
    """The training of `train_plainly` as a config: the same samples per step on any number of processes."""
    return {
        "train_batch_size": MICRO_BATCH * MICRO_BATCHES_PER_STEP,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES_PER_STEP // world_size,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": WARMUP_STEPS, "warmup_type": "linear"}},
        **more,
    }


def batches(num_steps: int, first_step: int = 0) -> list[list[torch.Tensor]]:
    """For each step its micro-batches of [MICRO_BATCH, 12] token ids."""
    result = []
    for step in range(first_step, first_step + num_steps):
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(VOCABULARY, (MICRO_BATCHES_PER_STEP * MICRO_BATCH, 12), generator=generator)
        result.append(list(tokens.split(MICRO_BATCH)))
    return result


@dataclass
class Training:
    """What a training came to."""

    losses: list[float]
    """Each step's mean loss before the step."""
    norms: list[float]
    """Each step's gradient norm before clipping."""
    weights: dict[str, torch.Tensor]
    """All parameters by name, whole, after the last step."""


def train_plainly(model: nn.Module, num_steps: int) -> Training:
    """Trains a copy of `model` with nothing but PyTorch."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)
    losses, norms = [], []
    for step, micro_batches in enumerate(batches(num_steps)):
        for group in optimizer.param_groups:
            # DeepSpeed's linear WarmupLR: the first two steps both stand at its beginning.
            group["lr"] = ADAM["lr"] * min(1.0, max(0, step - 1) / WARMUP_STEPS)
        loss = sum(model(input_ids=tokens, labels=tokens).loss for tokens in micro_batches) / len(micro_batches)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Training(losses, norms, {name: param.detach() for name, param in model.named_parameters()})


def train_engine(engine: Any, num_steps: int, *, first_step: int = 0) -> Training:
    """The same steps through an engine; the losses are those of this process's samples; collective."""
    rank, world_size = engine.sharding.rank, engine.sharding.world_size
    losses, norms = [], []
    for micro_batches in batches(num_steps, first_step):
        mine = micro_batches[rank::world_size]
        total = 0.0
        for tokens in mine:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += loss.item()
        losses.append(total / len(mine))
        norms.append(engine.get_global_grad_norm())
    return Training(losses, norms, whole_weights(engine))


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name, gathered; collective."""
    engine.sharding.settle()
    return {name: full_tensor(param).clone() for name, param in engine.module.named_parameters()}


def relative_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest error of any parameter, in units of that parameter's largest entry."""
    assert actual.keys() == expected.keys()
    return max(
        ((actual[name].float() - expected[name].float()).abs().max() / expected[name].float().abs().max()).item()
        for name in expected
    )
