"""A live batch for each of several adapters over one model, of which one at a time is fused into the weights.

Rows of two adapters never take a turn together. The batch whose adapter is fused takes TURNS_AT_ONCE turns while others
have work, then the next one does: a switch fuses all adapted weights anew, and nobody waits for longer than the others'
turns. The KV workspace is dealt out evenly, so that rows stay where they are while others take turns.
"""

from collections.abc import Mapping

import torch
from torch import nn

from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.batching.plan import Plan
from hybrid_engine.generation.live.batch import KVBlocks, LiveBatch, Progress
from hybrid_engine.generation.request.core import Sequence

TURNS_AT_ONCE = 32


class FusedAdapter:
    """Which adapter of a peft model its containers read; None: the base model alone.

    Args:
        module: a `PeftModel`, whose active adapter is another one meanwhile.
    """

    def __init__(self, module: nn.Module, model: InferenceModel):
        self._module, self._model = module, model
        self._before: str = module.active_adapter  # type: ignore[assignment]
        self._trained = {parameter: parameter.requires_grad for parameter in module.parameters()}
        self._fused: str | None = self._before

    def fuse(self, name: str | None) -> None:
        """Fuses this adapter in the place of the one that is."""
        if name == self._fused:
            return
        self._model.unfuse_lora()
        self._activate(name)
        self._model.fuse_lora()
        self._fused = name

    def give_back(self) -> None:
        """Makes the adapter active again that was, and those parameters trained that were; nothing is fused then."""
        self._model.unfuse_lora()
        self._activate(self._before)
        for parameter, is_trained in self._trained.items():
            parameter.requires_grad_(is_trained)

    def _activate(self, name: str | None) -> None:
        tuner = self._module.base_model
        if name is None:
            tuner.disable_adapter_layers()  # type: ignore[operator, union-attr]
        else:
            tuner.enable_adapter_layers()  # type: ignore[operator, union-attr]
            self._module.set_adapter(name)  # type: ignore[operator]


class AdapterBatches(LiveBatch):
    """The batches of all adapters as one.

    Args:
        batches: by adapter; None is the base model.
    """

    def __init__(self, batches: Mapping[str | None, LiveBatch], fused: FusedAdapter):
        self._batches, self._fused = batches, fused
        self._current, self._num_turns = next(iter(batches)), 0
        self._settled: list[Progress] = []  # and not told yet
        self.longest = min(batch.longest for batch in batches.values())

    @property
    def has_work(self) -> bool:
        """Whether a turn would bring something."""
        return bool(self._settled) or any(batch.has_work for batch in self._batches.values())

    @property
    def num_running(self) -> int:
        """Sequences that decode, each in the turns of its adapter."""
        return sum(batch.num_running for batch in self._batches.values())

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun, or begin again."""
        return sum(batch.num_waiting for batch in self._batches.values())

    @property
    def kv_blocks(self) -> KVBlocks:
        """What the KV blocks of all adapters' batches together are for."""
        return KVBlocks(*map(sum, zip(*(batch.kv_blocks for batch in self._batches.values()), strict=True)))

    @property
    def unfinished(self) -> list[Sequence]:
        """All that something is still to come for."""
        return [sequence for batch in self._batches.values() for sequence in batch.unfinished]

    def add(self, sequences: list[Sequence]) -> None:
        """Lets sequences wait, each in its adapter's batch."""
        for name, batch in self._batches.items():
            own = [sequence for sequence in sequences if sequence.adapter == name]
            if any(sequence.prompt.num_tops is not None for sequence in own):
                self._settled += [told for other in self._batches.values() for told in other.settle()]
                self._fused.fuse(name)  # prompts are scored as they join
            batch.add(own)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Takes `sequences` out of their adapters' batches, whether they run or wait."""
        for name, batch in self._batches.items():
            batch.cancel([sequence for sequence in sequences if sequence.adapter == name])

    def take_out(self) -> list[Progress]:
        """Takes everything out of all adapters' batches; returns what was drawn and not handed on yet."""
        settled, self._settled = self._settled, []
        return settled + [told for batch in self._batches.values() for told in batch.take_out()]

    def turn(self) -> list[Progress]:
        """A turn of the batch whose adapter is fused, or of the next one that has work."""
        before, self._current = self._current, self._choose()
        progress, self._settled = self._settled, []
        if before != self._current:
            progress += self._batches[before].settle()
        self._fused.fuse(self._current)
        self._num_turns += 1
        return progress + self._batches[self._current].turn()

    def _choose(self) -> str | None:
        names = list(self._batches)
        place = names.index(self._current)
        others = [name for name in (*names[place + 1 :], *names[:place]) if self._batches[name].has_work]
        if not others or (self._batches[self._current].has_work and self._num_turns < TURNS_AT_ONCE):
            return self._current
        self._num_turns = 0
        return others[0]


def split_workspace(kv: torch.Tensor, model: InferenceModel, plan: Plan, num_parts: int) -> list[torch.Tensor]:
    """The workspaces of `num_parts` batches like `plan`, contiguous, in the memory of `kv`, which has their blocks."""
    shape = model.kv_shape(kv.shape[2] // num_parts, plan.block_size)
    size = torch.Size(shape).numel()
    return [part.view(shape) for part in kv.view(-1)[: size * num_parts].split(size)]
