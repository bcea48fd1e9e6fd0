"""Memory of this process: the bytes that training keeps and will take, free memory, and the KV workspace in it.

The engine reports these bytes, plans of rollouts size the workspace by them, and training reclaims it.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from hybrid_engine.config import EngineConfig, HybridEngineConfig
from hybrid_engine.containers.device import LastingBuffer, host_memory_bytes
from hybrid_engine.containers.quantised import stored_tensors
from hybrid_engine.metrics.memory_plan import format_bytes, read_bytes
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.fsdp2_private import fsdp_params, unreduced_gradients
from hybrid_engine.zero.sharding import Sharding, local_tensor

if TYPE_CHECKING:  # an engine that only trains reads its memory here, and needs no containers
    from hybrid_engine.containers import InferenceModel
    from hybrid_engine.generation.model.weights import WeightGatherer

# Share of the free memory that a rollout may take; the rest is for activations and logits.
USABLE_MEMORY = 0.8
WEIGHTS_BY_STAGE = (
    "whole, gradients averaged at the accumulation boundary",
    "whole, and as shards that the optimizer steps; gradients reduced at the accumulation boundary",
    "whole, and as shards that the optimizer steps; gradients reduced at every micro-batch",
    "sharded; gathered layer by layer in forward and backward, gradients reduced at every micro-batch",
)
STATE_VALUES = 2
"""Values that an optimizer is expected to keep per trained value before its first step: Adam's two moments."""
SERVED_SHARES = {"cpu": 0.5, "cuda": 0.9}
"""Default share of the free memory that a server's KV workspace may take, by device type.

On a CPU, other programs share the host. On a GPU the rest is for activations and logits.
"""


@dataclass(frozen=True, kw_only=True)
class TrainingBytes:
    """Bytes of storage in this process's memory, including FSDP2's padding."""

    parameters: int
    """Bytes of the parameters: whole, or shards at stage 3."""
    shards: int
    """Bytes of the shards of parameters that are also kept whole."""
    masters: int
    """Bytes of the copies that the optimizer steps in place of the parameters."""
    state: int
    """Bytes of the optimizer's state."""
    gradients: int
    """Bytes of the gradients, both reduced and waiting for reduction."""


def count_bytes(sharding: Sharding, optimizer: ZeroOptimizer | None) -> TrainingBytes:
    """Counts the bytes of this process now; local."""
    trained = optimizer.parameters if optimizer is not None else []
    states = optimizer.state.values() if optimizer is not None else []
    pairs = list(sharding.twins()) if sharding.stays_whole else []
    owners = [*(t.param for t in trained), *(t.master for t in trained), *(whole for _, whole in pairs)]
    waiting = unreduced_gradients(sharding.fsdp_modules())
    return TrainingBytes(
        parameters=num_bytes(_kept_parameters(sharding)),
        shards=num_bytes(shard for shard, _ in pairs),
        masters=num_bytes(t.master for t in trained if t.has_master),
        state=num_bytes(v for values in states for v in values.values() if isinstance(v, torch.Tensor)),
        gradients=num_bytes([*(owner.grad for owner in owners if owner.grad is not None), *waiting]),
    )


def _kept_parameters(sharding: Sharding) -> Iterator[torch.Tensor]:
    """Yields the module's parameters; at stage 3 their shards, even while they are gathered."""
    if not sharding.is_sharded or sharding.stays_whole:
        yield from sharding.root.parameters()
        return
    gathered = fsdp_params(sharding.fsdp_modules(), is_gathered=True)
    shard_of = {id(param.unsharded_param): param.sharded_param for param in gathered}
    for parameter in sharding.root.parameters():
        yield shard_of.get(id(parameter), parameter)


def describe_memory(sharding: Sharding, optimizer: ZeroOptimizer | None, config: EngineConfig) -> str:
    """Describes stage, processes, precision, sharding and bytes of this process in a few lines."""
    held = count_bytes(sharding, optimizer)
    beside = f", and {format_bytes(held.shards)} of shards" if held.shards else ""
    lines = [
        f"ZeRO stage {sharding.stage}, rank {sharding.rank} of {sharding.world_size}; "
        f"parameters in {str(config.dtype).removeprefix('torch.')}",
        f"weights: {_describe_sharding(sharding)}",
        f"parameters: {format_bytes(held.parameters)}{beside} on this process",
    ]
    if optimizer is None:
        return "\n".join([*lines, "no optimizer: this engine only evaluates"])
    masters = [t.master for t in optimizer.parameters]
    gradients = sum(local_tensor(master).numel() * config.accumulation_dtype.itemsize for master in masters)
    return "\n".join(
        [
            *lines,
            f"trained: {len(masters)} parameters; gradients {format_bytes(gradients)} at the step, "
            f"{format_bytes(held.gradients)} now",
            f"masters: {format_bytes(held.masters)}",
            f"optimizer state: {format_bytes(held.state)} ({type(optimizer.inner).__name__})",
        ]
    )


def _describe_sharding(sharding: Sharding) -> str:
    if sharding.unit_size > 1 and not sharding.is_sharded:
        return f"split by a plan over the {sharding.unit_size} processes of a unit"
    if not sharding.is_sharded and sharding.world_size > 1:
        return "whole on every process and unwrapped, nothing is trained"
    if not sharding.is_sharded:
        return "whole and unwrapped, a single process has nobody to share with"
    groups = f"{len(sharding.layers) + 1} FSDP groups, {len(sharding.layers)} for layers and one for the rest"
    return f"{WEIGHTS_BY_STAGE[sharding.stage]}; {groups}"


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this process's storages that hold the tensors, each storage counted once."""
    plain = (part for tensor in tensors for part in stored_tensors(tensor))
    storages = [local_tensor(tensor).untyped_storage() for tensor in plain]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def usable_memory_bytes(device: torch.device) -> int:
    """Number of bytes that a rollout may allocate on `device` now."""
    free, _ = free_and_total_bytes(device)
    return int(free * USABLE_MEMORY)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the free bytes of `device`, including the allocator's cached ones, and its total bytes."""
    if device.type != "cuda":
        return host_memory_bytes()
    free, total = torch.cuda.mem_get_info(device)
    stock = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + stock - _idle_bytes_of_graphs(device), total


def _idle_bytes_of_graphs(device: torch.device) -> int:
    """Bytes that the allocator reserves for recorded graphs and that no tensor uses; nothing else can use them."""
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    private = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


class PeakMeter(Protocol):
    """Measures the largest growth of the memory that tensors take."""

    def begin(self, forgets_earlier: bool) -> None:
        """Starts a measurement; without `forgets_earlier` a peak counts only if it exceeds all earlier ones."""

    def growth_bytes(self) -> int:
        """Returns the largest growth since `begin()` in bytes; 0 if an earlier peak hides it."""


class AllocatorPeak:
    """A PeakMeter of a CUDA device, from the peak of PyTorch's allocator, which user scripts read too."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start, self._earlier = device, 0, 0

    def begin(self, forgets_earlier: bool) -> None:
        """Starts a measurement. See PeakMeter."""
        if forgets_earlier:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)
        self._earlier = 0 if forgets_earlier else torch.cuda.max_memory_allocated(self._device)

    def growth_bytes(self) -> int:
        """Returns the growth of the peak since `begin()`. See PeakMeter."""
        peak = torch.cuda.max_memory_allocated(self._device)
        return peak - self._start if peak > self._earlier else 0


class TrainingMemory:
    """Bytes that training will take on `device` in this process.

    Args:
        sharding: sharding of the model.
        optimizer: None for an engine that only evaluates, which takes nothing.
        gradient_dtype: dtype of the reduced gradients that the optimizer steps with.
        device: device that the model computes on.
        meter: measures peaks; None if that is not possible, as on a CPU: activations then use the share that stays
            free.
    """

    def __init__(
        self,
        sharding: Sharding,
        optimizer: ZeroOptimizer | None,
        gradient_dtype: torch.dtype,
        device: torch.device,
        meter: PeakMeter | None,
    ) -> None:
        self._optimizer, self._device, self._meter = optimizer, device, meter
        trained = optimizer.parameters if optimizer is not None else []
        self._masters = [entry.master for entry in trained if entry.has_master]
        masters = [local_tensor(entry.master) for entry in trained]
        here = [master for master in masters if master.device.type == device.type]
        self._gradient_bytes = sum(master.numel() * gradient_dtype.itemsize for master in masters)
        if sharding.keeps_whole_gradients:
            self._gradient_bytes += sum(entry.param.numel() * entry.param.element_size() for entry in trained)
        self._kept_bytes = self._held_bytes() + STATE_VALUES * sum(master.nbytes for master in here)
        self._peak_bytes: int | None = None
        self._held_at_start: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the peak of the first step is known, or cannot be measured."""
        return self._meter is None or self._optimizer is None or self._peak_bytes is not None

    def missing_bytes(self) -> int:
        """Bytes still to be allocated: masters, optimizer state, gradients and, after a measured step, activations."""
        if self._optimizer is None:
            return 0
        return max(0, self._kept_bytes - self._held_bytes()) + max(self._gradient_bytes, self._peak_bytes or 0)

    def begin(self) -> None:
        """Starts a measurement when training begins; it ends with the next optimizer step."""
        if self._meter is not None and self._optimizer is not None:
            self._meter.begin(forgets_earlier=self._peak_bytes is None)
            self._held_at_start = self._held_bytes()

    def finish_step(self) -> None:
        """Records after an optimizer step the bytes that the optimizer keeps and the peak of the step."""
        if self._optimizer is None or self._optimizer.overflow:
            return
        self._kept_bytes = held = self._held_bytes()
        if self._meter is not None and self._held_at_start is not None:
            passing = self._meter.growth_bytes() - max(0, held - self._held_at_start)
            self._peak_bytes = max(self._peak_bytes or 0, passing)
            self._held_at_start = None

    def _held_bytes(self) -> int:
        """Bytes of masters and optimizer state on the device now."""
        if self._optimizer is None:
            return 0
        state = [v for values in self._optimizer.inner.state.values() for v in values.values() if torch.is_tensor(v)]
        return num_bytes(t for t in (*self._masters, *state) if t.device.type == self._device.type)


class KVWorkspace:
    """`tensor [L, 2, num_blocks, K, block_size, D]`: keys at 0 and values at 1 of the second dimension."""

    def __init__(self) -> None:
        self._buffer = LastingBuffer()

    @property
    def tensor(self) -> torch.Tensor | None:
        """The workspace tensor, whether or not its memory is allocated; None before the first rollout."""
        return self._buffer.tensor

    @property
    def allocated_bytes(self) -> int:
        """Number of bytes allocated now."""
        return self._buffer.num_bytes

    @property
    def resident_bytes(self) -> int:
        """Number of allocated bytes that have been written; on a CPU often fewer than are allocated."""
        return self._buffer.resident_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the tensor with its memory allocated; reuses it if it has `shape` or more blocks.

        New memory is zeroed: attention multiplies masked places by zero, which requires finite numbers.
        """
        if self.tensor is not None and self.allocated_bytes > 0 and self._serves(self.tensor, shape, dtype, device):
            return self.tensor
        return self._buffer.take_zeros(shape, dtype, device)

    @staticmethod
    def _serves(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
        held = tuple(tensor.shape)
        is_alike = (tensor.dtype, tensor.device) == (dtype, device) and held[:2] + held[3:] == shape[:2] + shape[3:]
        return is_alike and held[2] >= shape[2]

    def release(self) -> None:
        """Frees the memory and keeps the tensor."""
        self._buffer.release()

    def retake(self) -> None:
        """Allocates the memory of a released tensor again, zeroed; does nothing before the first rollout."""
        if self.tensor is not None:
            self.take(tuple(self.tensor.shape), self.tensor.dtype, self.tensor.device)


class MemoryLimit(NamedTuple):
    """Limit of a KV workspace: a number of bytes, or a share of the free memory."""

    text: str
    """The user's option, for errors."""
    num_bytes: int | None
    """Limit in bytes; None: `share` applies."""
    share: float = 1.0

    def of(self, free_bytes: int) -> int:
        """Returns the limit in bytes for `free_bytes`; raises ValueError if it exceeds them."""
        if self.num_bytes is None:
            return int(self.share * free_bytes)
        if self.num_bytes > free_bytes:
            raise ValueError(
                f"{self.text} is more than the {format_bytes(free_bytes)} that are free beside the model; lower it"
            )
        return self.num_bytes


def read_memory(memory: float | str | None, device_type: str, name: str = "memory") -> MemoryLimit:
    """Reads the limit from option `name`: a size such as "6GiB", or a share from 0 to 1; None: that of SERVED_SHARES.

    Raises:
        ValueError: `memory` is neither.
    """
    text = f"{name}={memory}"
    if memory is None:
        return MemoryLimit(text, None, SERVED_SHARES.get(device_type, 0.5))
    is_number = isinstance(memory, int | float) and not isinstance(memory, bool)
    try:
        share = float(memory) if is_number or isinstance(memory, str) else math.nan
    except ValueError:
        return MemoryLimit(text, read_bytes(str(memory), name.replace("_", "-")))
    if not 0 < share <= 1:
        raise ValueError(
            f"{name}={memory!r} must be a share of the free memory, above 0 and up to 1, or a size with its unit, such "
            "as 6GiB; give one"
        )
    return MemoryLimit(text, None, share)


class MemoryBudget:
    """The memory of `device`, where a model generates and, unless `training` is None, trains. All methods are local."""

    def __init__(
        self,
        device: torch.device,
        config: HybridEngineConfig,
        gatherer: "WeightGatherer",
        workspace: KVWorkspace,
        training: TrainingMemory | None,
    ) -> None:
        self.device, self._config, self._gatherer = device, config, gatherer
        self._workspace, self._training = workspace, training

    def is_crowded(self, model: "InferenceModel | None") -> bool:
        """Whether the whole weights, with the adapters fused for the containers of `model`, do not fit."""
        if not self._gatherer.asks_for_memory:
            return False
        buffers = 0 if model is None else model.buffer_bytes()
        return self._gatherer.is_crowded(usable_memory_bytes(self.device) - buffers)

    def bytes_to_gather(self, model: "InferenceModel | None") -> int:
        """Bytes of weights and fused adapters that are allocated before the KV workspace."""
        buffers = 0 if model is None else model.buffer_bytes(self._gatherer.is_streamed)
        return self._gatherer.resident_bytes + buffers

    def spare_bytes(self, model: "InferenceModel | None") -> int:
        """Bytes available for a KV workspace: free memory and the current workspace, less what gathering will take."""
        held = self._workspace.resident_bytes
        return usable_memory_bytes(self.device) + held - self.bytes_to_gather(model)

    def served_bytes(self, model: "InferenceModel | None", limit: MemoryLimit) -> int:
        """Bytes for a server's KV workspace: `limit` of the memory that the weights leave free."""
        free, _ = free_and_total_bytes(self.device)
        if self.device.type == "cpu" and limit.num_bytes is None:  # divided among torchrun's processes on this host
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return limit.of(max(0, free + self._workspace.resident_bytes - self.bytes_to_gather(model)))

    @property
    def training_bytes(self) -> int:
        """Bytes that training will take while a KV workspace exists; 0 if it is released before training."""
        if self._training is None or self._config.release_inference_cache:
            return 0
        return self._training.missing_bytes()

    def make_room_for_training(self) -> None:
        """Releases the KV workspace unless training's bytes and a share of the memory are free beyond it."""
        if self._training is None or self._workspace.allocated_bytes == 0:
            return
        free, total = free_and_total_bytes(self.device)
        wanted = self._training.missing_bytes() + self._config.training_free_share * total
        if not self._training.is_known or free < wanted:
            self._workspace.release()

    def describe_kept_workspace(self) -> str:
        """Describes when a KV workspace is kept after a rollout."""
        if self._config.release_inference_cache:
            return "given back after each rollout"
        if self._training is None:
            return "kept between rollouts"
        share, taken = self._config.training_free_share, format_bytes(self._training.missing_bytes())
        return f"kept through training if {share:.0%} of the memory stays free beside the {taken} that takes"
