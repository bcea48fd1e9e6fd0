"""The ways to train that bench_train.py compares: our engine, and loops of nothing but PyTorch that do the same.

All take the same micro-batches, divide each loss by their number, clip the gradient norm and step a fused AdamW in
fp32. In bf16 the parameters that compute are bf16, masters and accumulated gradients fp32.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from common import LlamaShape, llama_config
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaForCausalLM

import hybrid_engine
from hybrid_engine.optim.build import cast_module
from hybrid_engine.zero.sharding import full_tensor

# With torch's eps of 1e-8 the update of a parameter whose gradient is nothing but rounding is a coin toss.
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
CLIPPING = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainShape(LlamaShape):
    """A Llama and the batch of one process's step."""

    sequence_tokens: int
    micro_batch: int
    accumulation: int


# 34M parameters, a second or more on a CPU.
FULL = TrainShape(hidden=512, layers=8, heads=8, kv_heads=8, intermediate=1408, vocab=8192, sequence_tokens=128,
                  micro_batch=4, accumulation=4)  # fmt: skip
SMALL = TrainShape(hidden=64, layers=2, heads=4, kv_heads=4, intermediate=128, vocab=512, sequence_tokens=16,
                   micro_batch=2, accumulation=2)  # fmt: skip
# 1.2 billion parameters: two contenders' fp32 weights, gradients and moments take 40 GB of a card.
CUDA = TrainShape(hidden=2048, layers=20, heads=16, kv_heads=16, intermediate=5504, vocab=32_768, sequence_tokens=1024,
                  micro_batch=4, accumulation=8)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is trained. One process is compared with a plain loop, several with plain FSDP2."""

    processes: int
    stage: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"1 process, {dtype}" if self.processes == 1 else f"{self.processes} processes, stage {self.stage}, {dtype}"
        )


class TrainingLoop(Protocol):
    """A model in training."""

    def step(self, micro_batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """One optimizer step on micro-batches `[micro_batch, tokens]`; returns their losses. Collective."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """What the optimizer steps, whole, in fp32, by name. Collective."""
        ...


def build_model(shape: TrainShape, device: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The same random weights at every call with the same arguments, made on the device in their dtype."""
    config = llama_config(shape, shape.sequence_tokens, use_cache=False)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def build_batch(shape: TrainShape, device: str, step: int, rank: int) -> list[torch.Tensor]:
    """One process's micro-batches of one step: random token ids `[micro_batch, sequence_tokens]`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    size = (shape.accumulation, shape.micro_batch, shape.sequence_tokens)
    return list(torch.randint(shape.vocab, size, generator=generator).to(device))


class EngineLoop:
    """Our engine."""

    name = "engine"

    def __init__(self, model: LlamaForCausalLM, case: Case, shape: TrainShape) -> None:
        self.engine: Any
        self.engine, *_ = hybrid_engine.initialize(model=model, config=engine_config(case, shape))

    def step(self, micro_batches: list[torch.Tensor]) -> list[torch.Tensor]:
        losses = []
        for tokens in micro_batches:
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {trained.name: full_tensor(trained.master) for trained in self.engine.optimizer.parameters}


def engine_config(case: Case, shape: TrainShape) -> dict[str, Any]:
    """What the plain loops do, as a config."""
    return {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": case.stage},
        "bf16": {"enabled": case.dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
    }


class PlainLoop:
    """fp32 on one process."""

    name = "plain PyTorch"

    def __init__(self, model: LlamaForCausalLM, case: Case, shape: TrainShape) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)

    def step(self, micro_batches: list[torch.Tensor]) -> list[torch.Tensor]:
        losses = []
        for number, tokens in enumerate(micro_batches, start=1):
            self.begin_micro_batch(is_last=number == len(micro_batches))
            loss = self.model(input_ids=tokens, labels=tokens).loss
            (loss / len(micro_batches)).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPING)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def begin_micro_batch(self, is_last: bool) -> None:
        """Nothing to do on one process."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: full_tensor(param) for name, param in self.model.named_parameters()}


class PlainMastersLoop:
    """bf16 with fp32 masters on one process; gradients are added up in fp32."""

    name = "plain PyTorch"

    def __init__(self, model: LlamaForCausalLM, case: Case, shape: TrainShape) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.params = list(model.parameters())
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, **ADAM, fused=True)

    def step(self, micro_batches: list[torch.Tensor]) -> list[torch.Tensor]:
        losses = []
        for tokens in micro_batches:
            loss = self.model(input_ids=tokens, labels=tokens).loss
            (loss / len(micro_batches)).backward()
            self.move_gradients()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.masters, CLIPPING)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
        return losses

    def move_gradients(self) -> None:
        """Adds the gradients of one micro-batch to those of the masters."""
        for param, master in zip(self.params, self.masters, strict=True):
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad.add_(param.grad)
            param.grad = None

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}


class PlainFSDPLoop(PlainLoop):
    """PyTorch's FSDP2, one group per layer and one for the rest; for bf16 its own mixed precision over fp32 shards."""

    name = "plain FSDP2"

    def __init__(self, model: LlamaForCausalLM, case: Case, shape: TrainShape) -> None:
        self.reduces_at_last_only = case.stage == 1
        policy = MixedPrecisionPolicy()
        if case.dtype == torch.bfloat16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {"mp_policy": policy} | ({"reshard_after_forward": False} if case.stage < 3 else {})
        for part in [*model.model.layers, model]:
            fully_shard(part, **options)
            if model.device.type == "cpu":
                part.set_force_sum_reduction_for_comms(True)  # gloo has no averaging reduction
        super().__init__(model, case, shape)

    def begin_micro_batch(self, is_last: bool) -> None:
        """Gradients are reduced at every micro-batch, in stage 1 at the last."""
        if self.reduces_at_last_only:
            self.model.set_requires_gradient_sync(is_last)


def build_loop(kind: str, case: Case, shape: TrainShape, device: str) -> TrainingLoop:
    """`kind` is "engine" or "plain". Both begin with the weights that a model in the case's dtype has."""
    model = build_model(shape, device)
    cast_module(model, case.dtype)
    if kind == "engine":
        return EngineLoop(model, case, shape)
    if case.processes > 1:
        cast_module(model, torch.float32)
        return PlainFSDPLoop(model, case, shape)
    return (PlainMastersLoop if case.dtype == torch.bfloat16 else PlainLoop)(model, case, shape)
