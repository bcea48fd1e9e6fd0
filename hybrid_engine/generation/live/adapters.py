"""A live batch for each of several adapters over one model, of which one at a time is fused into the weights.

Rows of two adapters never take a turn together. The batch whose adapter is fused takes TURNS_AT_ONCE turns while others
have work, then the next batch does: a switch fuses all adapted weights again, and each batch waits at most for the
turns of the others. The KV workspace is divided evenly, so that the rows of a batch stay in place during the turns of
others.
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
    """The adapter of a peft model that its containers read; None: the base model alone.

    Args:
        module: a `PeftModel`, whose active adapter changes meanwhile.
    """

    def __init__(self, module: nn.Module, model: InferenceModel):
        self._module, self._model = module, model
        self._before: str = module.active_adapter  # type: ignore[assignment]
        self._trained = {parameter: parameter.requires_grad for parameter in module.parameters()}
        self._fused: str | None = self._before

    def fuse(self, name: str | None) -> None:
        """Fuses this adapter in place of the current one."""
        if name == self._fused:
            return
        self._model.unfuse_lora()
        self._activate(name)
        self._model.fuse_lora()
        self._fused = name

    def give_back(self) -> None:
        """Restores the active adapter and the trained parameters; nothing is fused after it."""
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
    """The batches of all adapters as one batch.

    Args:
        batches: batch of each adapter; None is the base model.
    """

    def __init__(self, batches: Mapping[str | None, LiveBatch], fused: FusedAdapter):
        self._batches, self._fused = batches, fused
        self._current, self._num_turns = next(iter(batches)), 0
        self._settled: list[Progress] = []  # not reported yet
        self.longest = min(batch.longest for batch in batches.values())

    @property
    def has_work(self) -> bool:
        """Whether a turn has a result."""
        return bool(self._settled) or any(batch.has_work for batch in self._batches.values())

    @property
    def num_running(self) -> int:
        """Number of sequences that decode, each in the turns of its adapter."""
        return sum(batch.num_running for batch in self._batches.values())

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started, or start again."""
        return sum(batch.num_waiting for batch in self._batches.values())

    @property
    def kv_blocks(self) -> KVBlocks:
        """Use of the KV blocks of all adapters' batches together."""
        return KVBlocks(*map(sum, zip(*(batch.kv_blocks for batch in self._batches.values()), strict=True)))

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences for which progress is still to come."""
        return [sequence for batch in self._batches.values() for sequence in batch.unfinished]

    def add(self, sequences: list[Sequence]) -> None:
        """Queues sequences, each in its adapter's batch."""
        for name, batch in self._batches.items():
            own = [sequence for sequence in sequences if sequence.adapter == name]
            if any(sequence.prompt.num_tops is not None for sequence in own):
                self._settled += [told for other in self._batches.values() for told in other.settle()]
                self._fused.fuse(name)  # prompts are scored as they join
            batch.add(own)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes `sequences` from their adapters' batches, whether they run or wait."""
        for name, batch in self._batches.items():
            batch.cancel([sequence for sequence in sequences if sequence.adapter == name])

    def take_out(self) -> list[Progress]:
        """Removes all sequences from all adapters' batches; returns the progress not reported yet."""
        settled, self._settled = self._settled, []
        return settled + [told for batch in self._batches.values() for told in batch.take_out()]

    def turn(self) -> list[Progress]:
        """Takes a turn of the batch whose adapter is fused, or of the next one that has work."""
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
    """Returns the workspaces of `num_parts` batches like `plan`, each contiguous, in the memory of `kv`."""
    shape = model.kv_shape(kv.shape[2] // num_parts, plan.block_size)
    size = torch.Size(shape).numel()
    return [part.view(shape) for part in kv.view(-1)[: size * num_parts].split(size)]
