"""What a process of `bench_plan_memory.py` does: two training steps of a Llama under a plan."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_engine.parallel.compute_config import ComputeConfig
from hybrid_engine.parallel.graph.graph import Graph
from hybrid_engine.parallel.optimizer import build_optimizer
from hybrid_engine.parallel.parallelize import parallelize
from hybrid_engine.parallel.planning.plan import Plan

SHAPES = {
    "full": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8192},
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
}
TOKENS = {"full": (4, 128), "small": (2, 32)}


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that ops made and that are still there: what is there at once, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.peak_bytes = 0
        self.seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.enter(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return result

    def enter(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor that has data, once."""
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" or storage in self.seen:
            return
        self.seen[storage] = True
        self.num_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._leave, storage.nbytes())

    def _leave(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


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
}


def train(policy: str, config: ComputeConfig, shape: str, num_samples: int, folder: str) -> tuple[int, dict[str, Any]]:
    """The most bytes of tensors that this process had at once in two steps, and the plan."""
    torch.manual_seed(0)
    sample = torch.randint(0, 512, TOKENS[shape])
    with LiveTensors() as live:
        kind = parallelize(
            Trained, {"sample": sample}, POLICIES[policy], config, gen_savedir=folder, module_fn=lambda: Trained(shape)
        )
        module = kind()
        optimizer = build_optimizer(module, torch.optim.Adam, lr=1e-4)
        for _ in range(2):
            module.train_step([sample] * num_samples)
            optimizer.step()
            optimizer.zero_grad()
    return live.peak_bytes, module.plan.to_json()


def on_meta(shape: str) -> nn.Module:
    """The module without its weights."""
    with torch.device("meta"):
        return Trained(shape)
