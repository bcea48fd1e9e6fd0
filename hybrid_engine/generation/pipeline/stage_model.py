"""A causal model on containers of which this process runs one stage. N tokens, R wanted rows, V vocabulary."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.tensor_parallel import TensorParallel
from hybrid_engine.distributed.verdict import LostError
from hybrid_engine.generation.model_group import ModelGroup
from hybrid_engine.generation.pipeline.links import StageLinks
from hybrid_engine.ops import Batch


class StageModel(InferenceModel):
    """The layers of `stage`; the embedding on the first, the final norm and the LM head on the last.

    Of `model`, which may lie on the meta device, nothing else is ever bound, and so nothing else is read.
    """

    embedding: Any  # type: ignore[assignment]
    lm_head: Any  # type: ignore[assignment]

    def __init__(self, model: nn.Module, parallel: TensorParallel, group: ModelGroup, device: torch.device):
        super().__init__(model, parallel)
        stage = group.stage
        assert stage is not None
        self.group, self.stage, self.links = group, stage, StageLinks(stage, device)
        self.num_layers = len(self.layers)
        self.most_layers = max(map(len, stage.all_layers(self.num_layers)))
        keep_stage(self, stage.layers(self.num_layers), stage.is_first, stage.is_last)

    @property
    def weight(self) -> torch.Tensor:
        """One of the weights that are bound here."""
        return self.layers[0].linears[0].pair[0]

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the KV workspace, alike on all stages, so that all plan the same."""
        return (self.most_layers, *super().kv_shape(num_blocks, block_size)[1:])

    def forward(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """The logits `[R, V]` fp32 of a pass through all stages, on each of them; collective.

        An error of one process is raised on all. A rollout keeps the logits on the last stage: see `run_stage`.
        """
        logits = self.group.agree(lambda: self._run_alone(batch, kv, layers))
        num_rows = len(batch.tokens if batch.wanted is None else batch.wanted)
        return self.links.broadcast_logits(logits, num_rows, self.vocab_size)

    def _run_alone(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """`run_stage` as a turn of its own without a draw; its messages have all gone at its end, also by an error."""
        self.links.begin_turn(1, is_drawn=False)
        try:
            logits = self.run_stage(batch, kv, layers)
        except LostError:
            raise
        except BaseException:
            self.links.fail_turn(self.dtype)
            self.links.finish()
            raise
        self.links.finish()
        return logits

    def run_stage(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """This stage's part of a pass; logits `[R, V]` fp32 on the last, `[R, 0]` on the others.

        Waits for the stage before, not for the next one. StageFailedError where the stage before has failed; an error
        also ends the sums that other processes of this stage wait in.
        """
        with nullcontext() if self.group.sums is None else self.group.sums.ending_others():
            return self._run_stage(batch, kv, layers)

    def _run_stage(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        hidden = self._embed(batch) if self.stage.is_first else self.links.receive_hidden(self.dtype)
        hidden = self._run_layers(hidden, batch, kv, layers)
        if self.stage.is_last:
            return self._head(hidden, batch)
        self.links.send_hidden(hidden)
        num_rows = len(batch.tokens if batch.wanted is None else batch.wanted)
        return hidden.new_empty(num_rows, 0)


def keep_stage(model: Any, layers: range, is_first: bool, is_last: bool) -> None:
    """Takes from an `InferenceModel` all but these layers, and the ends that the first and the last stage have."""
    model.layers = [model.layers[index] for index in layers]
    for place, layer in enumerate(model.layers):
        layer.index = place  # in the KV workspace
    if not is_first:
        model.embedding = model.position_embedding = model.embedding_norm = model.project_in = None
    if not is_last:
        model.lm_head = model.final_norm = model.project_out = None
