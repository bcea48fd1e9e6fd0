"""Continuous batching: turns waiting sequences into finished ones, one model pass per turn.

A turn is a decode of everything that runs, a prefill of what was just admitted, or both in one pass: a mixed turn, as
in Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310). That every turn passes once over the layers is what lets
processes whose weights are streamed layer by layer stay in step although their sequences differ.

With `lag=1` the tokens of a turn are read while the next one runs, so that the host never waits for the
device: a sequence whose end of sequence is noticed late has been fed once too often, which its own blocks
absorb, and what it drew then is dropped.
"""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.generation.batching.scheduler import Admission, Copy, Extension, Prefill, Scheduler
from hybrid_engine.generation.batching.sequence import PENDING, Prompt, Sequence
from hybrid_engine.generation.batching.stopwatch import Stopwatch
from hybrid_engine.generation.decoding.decode import DecodeStep, Draw, send_to_device
from hybrid_engine.generation.decoding.open_step import OpenStep, TurnModel
from hybrid_engine.generation.sampling.stops import is_ended
from hybrid_engine.ops import BlockCopyOp, DecodeBatch, PrefillBatch

# Tokens of a prompt's new part that are fed at once: each has its logits, which are many with a large vocabulary.
TOKENS_PER_EXTENSION = 64


class TextGeneration:
    """Runs a scheduler's sequences through a model.

    Args:
        step: decodes; its KV workspace is the one that the scheduler's block numbers count in.
        layers: called once per turn; yields the model's layers in order, gathered where they are sharded.
        lag: turns that may be under way before their tokens are read; 0 reads them at once.
        mixes: whether what runs decodes in the pass of a prefill; not with an OpenStep. Neither is a recorded step
            then, but a prefill never is, so that a mixed turn saves a pass: on two busy Zen 5 cores rollouts with 64
            slots took 0.89 to 0.99 of the seconds of CPU.
    """

    def __init__(
        self,
        model: TurnModel,
        scheduler: Scheduler,
        step: DecodeStep | OpenStep,
        layers: Callable[[], Iterable[InferenceLayer]],
        lag: int = 0,
        mixes: bool = False,
    ):
        self.model, self.scheduler, self.layers, self.mixes = model, scheduler, layers, mixes
        self.num_prefill_turns = self.num_mixed_turns = 0
        self.step, self.kv, self.lag = step, step.kv, lag
        self.raises_errors = True
        """Whether an error of one row's own rule ends the turn; else it ends that row."""
        self.copy_blocks = BlockCopyOp()
        self.prefill_time, self.decode_time = Stopwatch(self.kv.device), Stopwatch(self.kv.device)
        self._under_way: deque[tuple[list[Sequence], Draw]] = deque()

    @property
    def has_work(self) -> bool:
        """True until every sequence has finished and every token been read."""
        return self.scheduler.has_work or bool(self._under_way)

    def turn(self) -> None:
        """One pass over the layers; an empty one when there is nothing to do."""
        self._recompute()
        admission = self.scheduler.admit()
        if admission.prefills or admission.extensions:
            with self.prefill_time.measure():
                is_mixed = self._prefill(admission)
                self._read(self.lag * (2 if is_mixed else 1))  # a mixed turn draws twice
            return
        # Reading counts too: where the host is the slower one, the device waits for it until the next turn.
        with self.decode_time.measure():
            self._enter(admission)
            if self.scheduler.running:
                self._decode()
            else:
                self.idle()
            self._read(self.lag if self.scheduler.running else 0)

    def _recompute(self) -> None:
        """Sends those back whose keys belong to other frequencies from their next token on."""
        length = self.model.recompute_length
        if length is not None and any(len(row) == length for row in self.scheduler.running):
            self._read(0)
            for row in [row for row in self.scheduler.running if len(row) == length]:
                self.scheduler.recompute(row)

    def idle(self) -> None:
        """Passes over the layers without computing, so that other processes can gather theirs."""
        for _ in self.layers():
            pass

    def _prefill(self, admission: Admission) -> bool:
        """Prefills what was admitted and draws for it; whether what runs decoded in the same pass."""
        own = self._extend(admission.extensions)
        logits: torch.Tensor | list[torch.Tensor] = []
        rows: list[Sequence] = []
        if admission.prefills:
            batch, rows = self._prefill_batch(admission.prefills), self._rows_beside(admission)
            if rows:
                assert isinstance(self.step, DecodeStep)
                draw, logits = self.step.run_beside(batch, rows, self.scheduler.take_changed(rows), self.layers)
                self._note(rows, draw)
            else:
                logits = self.model.forward(batch, self.kv, self.layers())
        for prefill, row in zip(admission.prefills, logits, strict=True):
            if isinstance(prefill.owner, Prompt):
                prefill.owner.logits = row.clone()  # a view would keep all rows alive
            else:
                own[prefill.owner] = row
        self._enter(admission, own)
        self.num_prefill_turns += not rows
        self.num_mixed_turns += bool(rows)
        return bool(rows)

    def _rows_beside(self, admission: Admission) -> list[Sequence]:
        """What decodes in the pass that prefills `admission`; nothing in a pure prefill turn."""
        if not self.mixes:
            return []
        entering = set(admission.sequences)
        self._read_for([row for row in self.scheduler.running if row not in entering])
        return self.scheduler.grow_beside(admission)

    def _extend(self, extensions: list[Extension]) -> dict[Sequence, torch.Tensor]:
        """Feeds what is new of prompts whose beginnings are in the workspace; the logits after each.

        A token is a row of a decode step, and sees what stands before it.
        """
        own: dict[Sequence, torch.Tensor] = {}
        for extension in extensions:
            sequence, tokens = extension.sequence, extension.sequence.prompt.tokens
            table = torch.tensor(sequence.blocks)
            for first in range(extension.first, len(tokens), TOKENS_PER_EXTENSION):
                last = min(first + TOKENS_PER_EXTENSION, len(tokens))
                numbers = torch.stack((torch.tensor(tokens[first:last]), torch.arange(first, last)))
                fed, positions = send_to_device(numbers, self.kv.device)
                batch = DecodeBatch(
                    tokens=fed,
                    positions=positions,
                    block_tables=send_to_device(table.expand(last - first, -1).contiguous(), self.kv.device),
                    context=last,
                    is_identity=False,
                    rows_meet=True,
                )
                logits = self.model.forward(batch, self.kv, self.layers())
            own[sequence] = logits[-1]
        return own

    def _enter(self, admission: Admission, own: dict[Sequence, torch.Tensor] | None = None) -> None:
        """Forks what was admitted and draws its next token, from its own logits or from its prompt's."""
        if not admission.sequences:
            return
        self._copy(admission.copies)
        rows = [(own or {}).get(sequence, sequence.prompt.logits) for sequence in admission.sequences]
        self._note(admission.sequences, self.step.draw(admission.sequences, torch.stack(rows)))
        for prompt in {sequence.prompt for sequence in admission.sequences}:
            if prompt.num_waiting == 0:
                prompt.logits = None

    def _decode(self) -> None:
        if self.scheduler.must_preempt:
            self._read(0)  # some may have finished; a preempted one is recomputed from its tokens
        self._read_for(self.scheduler.running)
        self.scheduler.grow()
        self._copy(self.scheduler.close_gaps())
        rows = self.scheduler.rows
        if rows:
            self._note(rows, self.step.run(rows, self.scheduler.take_changed(), self.layers))
        else:
            self.idle()

    def _read_for(self, rows: list[Sequence]) -> None:
        """Reads what is under way where what `rows` may draw depends on what they drew."""
        if self._under_way and any(row.options.rules.changes_by_tokens for row in rows):
            self._read(0)

    def _note(self, rows: list[Sequence], draw: Draw) -> None:
        """Holds places for the drawn tokens; those leave that have all they may have."""
        self._under_way.append((rows, draw))
        for row in rows:
            row.tokens.append(PENDING)
            if len(row.tokens) >= row.options.max_new_tokens:
                self.scheduler.finish(row, "length")

    def _read(self, lag: int) -> None:
        """Fills in the tokens of all turns but the last `lag`; those leave that drew an end of sequence."""
        while len(self._under_way) > lag:
            rows, draw = self._under_way.popleft()
            tokens, logprobs, ends, tops = draw.read()
            going_on = [row.finish_reason != "stop" for row in rows]  # others drew after their end
            for row, token, logprob, goes_on in zip(rows, tokens, logprobs, going_on, strict=True):
                if goes_on:
                    known = row.logprobs
                    row.tokens[len(known)] = token
                    known.append(logprob)
            if tops is not None:
                for row, likeliest, goes_on in zip(rows, tops, going_on, strict=True):
                    if goes_on and row.options.rules.top_logprobs:
                        row.tops.append(likeliest[: row.options.rules.top_logprobs])
            ended = [rows[index] for index in ends]
            ended += [row for row in rows if row.options.rules.has_ends and is_ended(row, self.model.vocab_size)]
            failed = [row for row in rows if row.error is not None]
            if failed and self.raises_errors:
                raise failed[0].error  # type: ignore[misc]
            ended += failed
            for row in ended:
                if row.finish_reason != "stop":
                    del row.tokens[len(row.logprobs) :]
                    self.scheduler.finish(row, "stop")

    def read_all(self) -> None:
        """Waits for every token that was drawn."""
        self._read(0)

    def _copy(self, copies: list[Copy]) -> None:
        if copies:
            numbers = [[copy.source for copy in copies], [copy.target for copy in copies]]
            numbers.append([copy.num_tokens for copy in copies])
            self.copy_blocks(self.kv, *send_to_device(torch.tensor(numbers), self.kv.device))

    def _prefill_batch(self, prefills: list[Prefill]) -> PrefillBatch:
        size, device = self.scheduler.block_size, self.kv.device
        lengths = tuple(len(prefill.tokens) for prefill in prefills)
        positions = torch.cat([torch.arange(length) for length in lengths])
        blocks = [torch.tensor(p.blocks)[torch.arange(n) // size] for p, n in zip(prefills, lengths, strict=True)]
        # What was prefilled anew was fed as it would have been had it never left.
        whole = self.model.recompute_length is not None
        fed = torch.tensor([len(p.tokens) if whole else len(p.prompt.tokens) for p in prefills])
        fed = fed.repeat_interleave(torch.tensor(lengths), output_size=len(positions))
        tokens = torch.tensor([token for prefill in prefills for token in prefill.tokens])
        by_token = (tokens, positions, torch.cat(blocks), positions % size, torch.maximum(positions + 1, fed))
        tokens, positions, write_blocks, write_offsets, row_lengths = send_to_device(torch.stack(by_token), device)
        starts = send_to_device(torch.tensor((0, *lengths)).cumsum(0), device)
        return PrefillBatch(
            tokens=tokens,
            positions=positions,
            write_blocks=write_blocks,
            write_offsets=write_offsets,
            lengths=lengths,
            starts=starts.int(),
            wanted=starts[1:] - 1,
            row_lengths=row_lengths,
        )
