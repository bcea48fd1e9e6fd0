"""The text-generation strategy: turns waiting sequences into finished ones, one model pass per turn.

A turn is either a prefill of what was just admitted or a decode of everything that runs. That every turn
passes once over the layers is what lets processes whose weights are streamed layer by layer stay in step
although their sequences differ.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.scheduler import Admission, Copy, Prefill, Scheduler
from hybrid_engine.generation.sequence import Prompt, Sequence
from hybrid_engine.ops import BlockCopyOp, DecodeBatch, PrefillBatch, SampleOp
from hybrid_engine.ops.sample import penalize_repetition


@dataclass
class RolloutTimes:
    """Where a rollout's seconds went."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class TextGeneration:
    """Runs a scheduler's sequences through a model.

    Args:
        layers: called once per turn; yields the model's layers in order, gathered where they are sharded.
        kv: the workspace tensor that the scheduler's block numbers count in.
    """

    def __init__(
        self,
        model: InferenceModel,
        scheduler: Scheduler,
        options: GenerationOptions,
        kv: torch.Tensor,
        layers: Callable[[], Iterable[InferenceLayer]],
    ):
        self.model, self.scheduler, self.options, self.kv, self.layers = model, scheduler, options, kv, layers
        self.sample = SampleOp(options.do_sample, options.temperature, options.top_k, options.top_p, options.min_p)
        self.copy_block = BlockCopyOp()
        self.times = RolloutTimes()

    def turn(self) -> None:
        """One pass over the layers; an empty one when there is nothing to do."""
        admission = self.scheduler.admit()
        start = time.perf_counter()
        if admission.prefills:
            self._prefill(admission)
            self.times.prefill_seconds += time.perf_counter() - start
            return
        self._enter(admission)
        if self.scheduler.running:
            self._decode()
        else:
            self.idle()
        self.times.decode_seconds += time.perf_counter() - start

    def idle(self) -> None:
        """Passes over the layers without computing, so that other processes can gather theirs."""
        for _ in self.layers():
            pass

    def _prefill(self, admission: Admission) -> None:
        batch = self._prefill_batch(admission.prefills)
        logits = self.model.forward(batch, self.kv, self.layers())
        own: dict[Sequence, torch.Tensor] = {}
        for prefill, row in zip(admission.prefills, logits, strict=True):
            if isinstance(prefill.owner, Prompt):
                prefill.owner.logits = row.clone()  # a view would keep all rows alive
            else:
                own[prefill.owner] = row
        self._enter(admission, own)

    def _enter(self, admission: Admission, own: dict[Sequence, torch.Tensor] | None = None) -> None:
        """Forks what was admitted and draws its next token, from its own logits or from its prompt's."""
        if not admission.sequences:
            return
        self._copy(admission.copies)
        rows = [(own or {}).get(sequence, sequence.prompt.logits) for sequence in admission.sequences]
        self._draw(admission.sequences, torch.stack(rows))
        for prompt in {sequence.prompt for sequence in admission.sequences}:
            if prompt.num_waiting == 0:
                prompt.logits = None

    def _decode(self) -> None:
        self.scheduler.grow()
        self._copy(self.scheduler.close_gaps())
        rows = sorted(self.scheduler.running, key=lambda sequence: sequence.blocks[0])
        self._draw(rows, self.model.forward(self._decode_batch(rows), self.kv, self.layers()))

    def _draw(self, rows: list[Sequence], logits: torch.Tensor) -> None:
        """Samples a token for each row from `logits [S, V]` fp32, and lets those leave that are done."""
        device = logits.device
        keys = torch.tensor([row.key for row in rows], device=device)
        positions = torch.tensor([len(row.tokens) for row in rows], device=device)
        tokens, logprobs = self.sample(logits, self._adjust(rows, logits), keys, positions)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.seen is not None:
                row.seen[token] = True
            if token in self.options.eos_token_ids:
                self.scheduler.finish(row, "stop")
            elif len(row.tokens) >= self.options.max_new_tokens:
                self.scheduler.finish(row, "length")

    def _adjust(self, rows: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
        """The logits that are drawn from: repetition penalised, end-of-sequence banned while it is too early."""
        options = self.options
        if options.repetition_penalty != 1.0:
            seen = torch.stack([self._seen(row, logits) for row in rows])
            logits = penalize_repetition(logits, seen, options.repetition_penalty)
        early = [index for index, row in enumerate(rows) if len(row.tokens) < options.min_new_tokens]
        if early and options.eos_token_ids:
            logits = logits.clone()
            banned = torch.tensor(options.eos_token_ids, device=logits.device)
            logits[torch.tensor(early, device=logits.device)[:, None], banned] = float("-inf")
        return logits

    @staticmethod
    def _seen(row: Sequence, logits: torch.Tensor) -> torch.Tensor:
        if row.seen is None:
            row.seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            row.seen[torch.tensor(row.prompt.tokens, device=logits.device)] = True
        return row.seen

    def _copy(self, copies: list[Copy]) -> None:
        for copy in copies:
            self.copy_block(self.kv, copy.source, copy.target, copy.num_tokens)

    def _prefill_batch(self, prefills: list[Prefill]) -> PrefillBatch:
        size, device = self.scheduler.block_size, self.kv.device
        lengths = tuple(len(prefill.tokens) for prefill in prefills)
        positions = torch.cat([torch.arange(length) for length in lengths])
        blocks = [torch.tensor(p.blocks)[torch.arange(n) // size] for p, n in zip(prefills, lengths, strict=True)]
        return PrefillBatch(
            tokens=torch.tensor([token for prefill in prefills for token in prefill.tokens], device=device),
            positions=positions.to(device),
            write_blocks=torch.cat(blocks).to(device),
            write_offsets=(positions % size).to(device),
            lengths=lengths,
            wanted=(torch.tensor(lengths).cumsum(0) - 1).to(device),
        )

    def _decode_batch(self, rows: list[Sequence]) -> DecodeBatch:
        size, device = self.scheduler.block_size, self.kv.device
        last = [len(row) - 1 for row in rows]
        num_columns = max(len(row.blocks) for row in rows)
        tables = [row.blocks + row.blocks[-1:] * (num_columns - len(row.blocks)) for row in rows]
        return DecodeBatch(
            tokens=torch.tensor([row.tokens[-1] for row in rows], device=device),
            positions=torch.tensor(last, device=device),
            write_blocks=torch.tensor([r.blocks[i // size] for r, i in zip(rows, last, strict=True)], device=device),
            write_offsets=torch.tensor([i % size for i in last], device=device),
            block_tables=torch.tensor(tables, device=device),
            context=max(last) + 1,
            is_identity=tables == [[i] for i in range(len(rows))],
        )
