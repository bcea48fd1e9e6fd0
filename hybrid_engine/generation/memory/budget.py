"""What rollouts and training may each take of one device's memory: gathered weights, KV workspace, a step's tensors."""

import math
import os
from typing import NamedTuple

import torch

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.containers import InferenceModel
from hybrid_engine.generation.memory.training import TrainingMemory
from hybrid_engine.generation.memory.usage import free_and_total_bytes, usable_memory_bytes
from hybrid_engine.generation.memory.workspace import KVWorkspace
from hybrid_engine.metrics.memory_plan import format_bytes, read_bytes
from hybrid_engine.zero.gathering import WeightGatherer

SERVED_SHARES = {"cpu": 0.5, "cuda": 0.9}
"""Of the free memory, by the type of device, that a server's KV workspace may take unless told otherwise.

Other programs run on the host beside it. On a GPU the rest is for activations and logits.
"""


class MemoryLimit(NamedTuple):
    """What a KV workspace may take of the memory that is free: a number of bytes, or a share."""

    text: str
    """As it was given, for errors."""
    num_bytes: int | None
    """None: `share` says it."""
    share: float = 1.0

    def of(self, free_bytes: int) -> int:
        """The bytes that it may take of `free_bytes`; ValueError where more are asked for than are free."""
        if self.num_bytes is None:
            return int(self.share * free_bytes)
        if self.num_bytes > free_bytes:
            raise ValueError(
                f"{self.text} is more than the {format_bytes(free_bytes)} that are free beside the model; lower it"
            )
        return self.num_bytes


def read_memory(memory: float | str | None, device_type: str, name: str = "memory") -> MemoryLimit:
    """The limit that option `name` says: a size such as "6GiB", or a share from 0 to 1; None: that of SERVED_SHARES.

    Raises:
        ValueError: it is neither.
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
    """The memory of `device`, where a model generates and, unless `training` is None, is trained. All of it local."""

    def __init__(
        self,
        device: torch.device,
        config: HybridEngineConfig,
        gatherer: WeightGatherer,
        workspace: KVWorkspace,
        training: TrainingMemory | None,
    ) -> None:
        self.device, self._config, self._gatherer = device, config, gatherer
        self._workspace, self._training = workspace, training

    def is_crowded(self, model: InferenceModel | None) -> bool:
        """Whether the whole weights do not fit, with the adapters that are fused for the containers of `model`."""
        if not self._gatherer.asks_for_memory:
            return False
        buffers = 0 if model is None else model.buffer_bytes()
        return self._gatherer.is_crowded(usable_memory_bytes(self.device) - buffers)

    def bytes_to_gather(self, model: InferenceModel | None) -> int:
        """Memory of weights and fused adapters that is taken before the KV workspace."""
        buffers = 0 if model is None else model.buffer_bytes(self._gatherer.is_streamed)
        return self._gatherer.resident_bytes + buffers

    def spare_bytes(self, model: InferenceModel | None) -> int:
        """Memory for a KV workspace: what is free and what one holds already, less what gathering will take."""
        held = self._workspace.resident_bytes
        return usable_memory_bytes(self.device) + held - self.bytes_to_gather(model)

    def served_bytes(self, model: InferenceModel | None, limit: MemoryLimit) -> int:
        """Memory for the KV workspace of a server: what `limit` says of the bytes that are free beside the weights."""
        free, _ = free_and_total_bytes(self.device)
        if self.device.type == "cpu" and limit.num_bytes is None:  # processes that torchrun starts here take alike
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return limit.of(max(0, free + self._workspace.resident_bytes - self.bytes_to_gather(model)))

    @property
    def training_bytes(self) -> int:
        """What training will take while there is a KV workspace; nothing where that is given back before."""
        if self._training is None or self._config.release_inference_cache:
            return 0
        return self._training.missing_bytes()

    def make_room_for_training(self) -> None:
        """Gives the KV workspace back, unless what training takes and a share of the memory are free beside it."""
        if self._training is None or self._workspace.allocated_bytes == 0:
            return
        free, total = free_and_total_bytes(self.device)
        wanted = self._training.missing_bytes() + self._config.training_free_share * total
        if not self._training.is_known or free < wanted:
            self._workspace.release()

    def describe_kept_workspace(self) -> str:
        """When a KV workspace stays after a rollout, in words."""
        if self._config.release_inference_cache:
            return "given back after each rollout"
        if self._training is None:
            return "kept between rollouts"
        share, taken = self._config.training_free_share, format_bytes(self._training.missing_bytes())
        return f"kept through training if {share:.0%} of the memory stays free beside the {taken} that takes"
