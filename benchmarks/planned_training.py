"""What a process of `bench_plan_memory.py` does: two training steps of a Llama under a plan."""

import ctypes
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import peak_memory
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.optimizer import build_optimizer
from hybrid_engine.extensions.parallelize.parallelize import parallelize
from hybrid_engine.extensions.parallelize.planning.plan import Plan

SHAPES = {
    "full": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8192},
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
}
TOKENS = {"full": (4, 128), "small": (2, 32)}


M_MMAP_THRESHOLD = -3
"""Of malloc.h: blocks of so many bytes are mapped by themselves and given back when they are freed."""


class LiveTensors(TorchDispatchMode):
    """Counts, at each op, the bytes of all storages that ops made and that are still there; keeps the most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                if storage.device.type != "meta":
                    self.seen[storage] = True
        # Sizes as they are now: FSDP2 empties and fills storages in place.
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self.seen))
        return result


class Trained(nn.Module):
    """A causal model whose forward takes a sample and returns its loss."""

    def __init__(self, shape: str):
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], num_attention_heads=8, num_key_value_heads=8))

    def forward(self, sample: Tensor) -> Tensor:
        return self.model(input_ids=sample, labels=sample, use_cache=False).loss


def megatron(graph: Graph, config: ComputeConfig) -> Plan:
    """Columns, then rows; heads of attention; the vocabulary of the head."""
    plan = Plan(graph=graph, mesh=(config.plan_ngpus,))
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        plan.place(f"*.{name}", out="n")
    for name in ("o_proj", "down_proj"):
        plan.place(f"*.{name}", out="k")
    plan.place("*.self_attn", out="b", op="scaled_dot_product_attention")
    plan.place("*.mlp.act_fn", out="c")
    plan.place("*.mlp", out="c", op="mul")
    plan.place("*.lm_head", out="n")
    return plan


POLICIES: dict[str, str | Callable[..., Plan]] = {
    "dp": "dp",
    "data": "data",
    "megatron": megatron,
    "autodist": "autodist",
    "pp": "pp",
}


@dataclass(frozen=True)
class Peak:
    """The most bytes that a process had at once, and the plan that it trained under."""

    num_bytes: int
    plan: dict[str, Any]


def train(policy: str, config: ComputeConfig, shape: str, num_samples: int, what: str) -> Peak:
    """Two steps of Adam under a plan, from before the module is built.

    `what` is counted: "tensors", those that ops made; "resident" memory beyond what the process has after the same
    training of a small model, with a C library that gives back what was freed; "kept", with one that does as it likes.
    """
    if what == "tensors":
        with LiveTensors() as live:
            plan = _two_steps(policy, config, shape, num_samples)
        return Peak(live.peak_bytes, plan)
    if what == "resident":
        # glibc's default grows up to 32 MiB with what is freed; blocks below it stay with the process.
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    _two_steps(policy, replace(config, pas_config=_with_room(config)), "small", num_samples)
    with peak_memory("cpu") as peak:
        plan = _two_steps(policy, config, shape, num_samples)
    return Peak(peak.num_bytes, plan)


def _with_room(config: ComputeConfig) -> dict[str, Any]:
    return {name: value for name, value in config.pas_config.items() if name != "mem_constraint"}


def _two_steps(policy: str, config: ComputeConfig, shape: str, num_samples: int) -> dict[str, Any]:
    torch.manual_seed(0)
    sample = torch.randint(0, 512, TOKENS[shape])
    with tempfile.TemporaryDirectory() as folder:
        kind = parallelize(
            Trained, {"sample": sample}, POLICIES[policy], config, gen_savedir=folder, module_fn=lambda: Trained(shape)
        )
    module = kind()
    optimizer = build_optimizer(module, torch.optim.Adam, lr=1e-4)
    for _ in range(2):
        module.train_step([sample] * num_samples)
        optimizer.step()
        optimizer.zero_grad()
    return module.plan.to_json()


def on_meta(shape: str) -> nn.Module:
    """The module without its weights."""
    with torch.device("meta"):
        return Trained(shape)
