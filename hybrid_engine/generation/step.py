"""One step of the machine, and rollouts on containers, which take steps until every sequence has finished.

`ContinuousBatch.step()` is the main line: it turns waiting sequences into finished ones, with one pass over the layers.
`ContainerRollouts` gathers for a rollout that passed every check, and runs it; everything that gathering takes is
registered on an ExitStack, which releases it in reverse order, even if the run raises. Live batches take steps too.

A step is a decode of all running sequences, a prefill of the newly admitted ones, or both in one pass: a mixed step, as
in Sarathi-Serve (Agrawal et al. 2024, arXiv 2403.02310), in which a long prompt is fed in chunks over several steps.
Every step passes over the layers once. This keeps processes whose weights are streamed layer by layer together although
their sequences differ.

With `lag=1` the tokens of a step are read while the next one runs, so that the host never waits for the device. A
sequence whose end of sequence is noticed late has been fed one token too many; its own blocks absorb that token, and
the one drawn after it is dropped.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.cache import ModelCache
from hybrid_engine.containers.device import send_to_device
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.towers import encode
from hybrid_engine.distributed.verdict import Partners, attempt, holding_interrupts
from hybrid_engine.generation.core import (
    PENDING,
    Admission,
    CaptureStats,
    Copy,
    Draw,
    Prefill,
    Prompt,
    RolloutPlan,
    RolloutResult,
    Sequence,
)
from hybrid_engine.generation.decode import Choice, DecodeStep, DecodeSteps, OpenStep, SteppedModel
from hybrid_engine.generation.memory import KVWorkspace
from hybrid_engine.generation.model.weights import (
    LastingWeights,
    WeightGatherer,
    bound,
    bound_to_copies,
    pass_over_layers,
)
from hybrid_engine.generation.output import ScoringTurns, collect_output, score_prompts
from hybrid_engine.generation.recorders import CudaGraphs, Layers
from hybrid_engine.generation.sampling import InStep, is_ended, to_pinned
from hybrid_engine.generation.scheduler import Scheduler
from hybrid_engine.metrics.latency import Stopwatch
from hybrid_engine.ops import Context, PlacedFeatures, PrefillBatch, SeenSpans

# Tokens of a long prompt in one mixed turn: enough to keep the matrix products of a pass busy, so that the rows which
# decode in the same pass cost little, and few enough that those rows do not wait long. On one core of an AMD EPYC
# (torch 2.13, commit 3609834; 12 prompts of 4000 tokens, 8 slots, four layers of width 384 in fp32) rollouts with
# chunks of 256, 512, 1024, 2048 and 4096 took 23.2, 21.9, 22.7, 24.0 and 23.2 s of CPU, and the longest turn in which
# others decoded took 0.19, 0.33, 0.68, 1.35 and 3.6 s.
CHUNK_TOKENS = 2048
CHUNK_TOKENS_ON_CPU = 512
_FAILED = 2
"""State of a process between two turns after an error; 1 means that it has work, 0 that it has none."""


def chunk_tokens(device: torch.device) -> int:
    """Number of tokens of a long prompt in one mixed step."""
    return CHUNK_TOKENS_ON_CPU if device.type == "cpu" else CHUNK_TOKENS


class ContinuousBatch:
    """The machine: runs a scheduler's sequences through a model, one `step()` after the other.

    Args:
        decoder: decodes rows; the scheduler's block numbers are indices into its KV workspace.
        layers: called once per step; yields the model's layers in order, gathered where they are sharded.
        lag: number of steps that may be in flight before their tokens are read; 0 reads them at once.
        mixes: whether running sequences decode in the pass of a prefill; not supported with an OpenStep. A mixed pass
            is not recorded. A prefill pass never is either, so a mixed step saves a pass: on two busy Zen 5 cores,
            rollouts with 64 slots took 0.89 to 0.99 of the CPU seconds.
    """

    def __init__(
        self,
        model: SteppedModel,
        scheduler: Scheduler,
        decoder: DecodeStep | OpenStep,
        layers: Layers,
        lag: int = 0,
        mixes: bool = False,
    ):
        self.model, self.scheduler, self.layers, self.mixes = model, scheduler, layers, mixes
        self.num_prefill_steps = self.num_mixed_steps = 0
        self.decoder, self.cache, self.lag = decoder, decoder.cache, lag
        self.raises_errors = True
        """Whether an error of one row's own rule ends the step; otherwise it ends that row."""
        self.prefill_time, self.decode_time = Stopwatch(self.cache.device), Stopwatch(self.cache.device)
        self._under_way: deque[tuple[list[Sequence], Draw]] = deque()

    @property
    def has_work(self) -> bool:
        """True until every sequence has finished and every token has been read."""
        return self.scheduler.has_work or bool(self._under_way)

    def step(self) -> None:
        """Takes one step, with one pass over the layers, which is empty if there is no work.

        Schedule, prepare, forward, sample, record, finish: the scheduler admits sequences, whose prompts are packed
        into a batch or whose blocks are copied; the model computes logits; the decoder samples a token for each row;
        the draw is recorded as pending; and when it has been read, rows that drew an end finish.
        """
        self._make_way()
        admission = self.scheduler.admit(chunk_tokens(self.cache.device) if self.mixes else None)
        if admission.prefills:
            with self.prefill_time.measure():
                num_draws = self._prefill(admission)
                self._finish(self.lag * num_draws)
            return
        # Reading is timed too: if the host is slower than the device, the device waits for it until the next step.
        with self.decode_time.measure():
            self._enter(admission)
            if self.scheduler.running:
                self._decode()
            else:
                self.idle()
            self._finish(self.lag if self.scheduler.running else 0)

    def _make_way(self) -> None:
        """Sends back rows whose keys change frequencies at their next token, and rows that must make way."""
        length = self.model.recompute_length
        if length is not None and any(len(row) == length for row in self.scheduler.running):
            self._finish(0)
            for row in [row for row in self.scheduler.running if len(row) == length]:
                self.scheduler.recompute(row)
        if self.scheduler.must_make_way:
            self._finish(0)
            self.scheduler.make_way()

    def idle(self) -> None:
        """Passes over the layers without computing, so that other processes can gather theirs."""
        for _ in self.layers():
            pass

    def _prefill(self, admission: Admission) -> int:
        """Prefills the admitted sequences, in a pass in which running rows may decode too, and samples for all of them.

        Returns the number of draws; a chunk that is not a prompt's last draws nothing.
        """
        own: dict[Sequence, torch.Tensor] = {}
        logits: torch.Tensor | list[torch.Tensor] = []
        rows: list[Sequence] = []
        if admission.prefills:
            is_recomputed_whole = self.model.recompute_length is not None
            batch = pack_prefills(admission.prefills, self.scheduler.block_size, is_recomputed_whole, self.cache.device)
            rows = self._rows_beside(admission)
            if rows:
                assert isinstance(self.decoder, DecodeStep)
                draw, logits = self.decoder.run_beside(batch, rows, self.scheduler.take_changed(rows), self.layers)
                self._record(rows, draw)
            else:
                logits = self.model.forward(batch, self.cache, self.layers())
            if self.decoder.records_routing:
                self._note_routes(admission.prefills, len(rows))
        for prefill, row in zip(admission.prefills, logits, strict=True):
            if not prefill.is_last:
                continue
            if isinstance(prefill.owner, Prompt):
                prefill.owner.logits = row.clone()  # a view would keep all rows alive
            else:
                own[prefill.owner] = row
        self._enter(admission, own)
        self.num_prefill_steps += not rows
        self.num_mixed_steps += bool(rows)
        return bool(rows) + bool(admission.sequences)

    def _note_routes(self, prefills: list[Prefill], num_decoded: int) -> None:
        """Stores the experts that the tokens of `prefills` took in the last pass, after those of `num_decoded` rows."""
        assert isinstance(self.model, InferenceModel)
        lengths = [prefill.last - prefill.first for prefill in prefills]
        taken = self.model.taken_experts(num_decoded + sum(lengths))[num_decoded:]
        # A device may still copy them; they are read after the rollout.
        on_host = to_pinned(taken) if taken.is_cuda else taken
        for prefill, part in zip(prefills, on_host.split(lengths), strict=True):
            prefill.note_routes(part)

    def _rows_beside(self, admission: Admission) -> list[Sequence]:
        """Rows that decode in the pass that prefills `admission`; empty in a pure prefill step."""
        if not self.mixes:
            return []
        entering = set(admission.sequences)
        self._finish_for([row for row in self.scheduler.running if row not in entering])
        return self.scheduler.grow_beside(admission)

    def _enter(self, admission: Admission, own: dict[Sequence, torch.Tensor] | None = None) -> None:
        """Forks the admitted sequences and samples their next tokens, from their own logits or their prompt's."""
        if not admission.sequences:
            return
        self._copy(admission.copies)
        if admission.state_copies:
            self.cache.copy_states(*send_to_device(torch.tensor(admission.state_copies).t(), self.cache.device))
        rows = [(own or {}).get(sequence, sequence.prompt.logits) for sequence in admission.sequences]
        self._record(admission.sequences, self.decoder.draw(admission.sequences, torch.stack(rows)))
        for prompt in {sequence.prompt for sequence in admission.sequences}:
            if prompt.num_waiting == 0:
                prompt.logits = None

    def _decode(self) -> None:
        """Decodes all running rows: gives each a place for its newest token, feeds it and samples the next one."""
        if self.scheduler.must_preempt:
            self._finish(0)  # some may have finished; a preempted one is recomputed from its tokens
        self._finish_for(self.scheduler.running)
        self.scheduler.grow()
        self._copy(self.scheduler.close_gaps())
        rows = self.scheduler.rows
        if rows:
            self._record(rows, self.decoder.run(rows, self.scheduler.take_changed(), self.layers))
        else:
            self.idle()

    def _finish_for(self, rows: list[Sequence]) -> None:
        """Reads the steps in flight if the next draw of one of `rows` depends on their tokens."""
        if self._under_way and any(row.options.rules.changes_by_tokens for row in rows):
            self._finish(0)

    def _record(self, rows: list[Sequence], draw: Draw) -> None:
        """Appends a PENDING token to each row; finishes the rows that have all their new tokens."""
        self._under_way.append((rows, draw))
        for row in rows:
            row.tokens.append(PENDING)
            if len(row.tokens) >= row.options.max_new_tokens:
                self.scheduler.finish(row, "length")

    def _finish(self, lag: int) -> None:
        """Fills in the tokens of all steps but the last `lag`; finishes the rows that drew an end."""
        while len(self._under_way) > lag:
            rows, draw = self._under_way.popleft()
            tokens, logprobs, ends, tops, supports, routes = draw.read()
            going_on = [row.finish_reason != "stop" for row in rows]  # the other rows had ended before this draw
            for row, token, logprob, goes_on in zip(rows, tokens, logprobs, going_on, strict=True):
                if goes_on:
                    known = row.logprobs
                    row.tokens[len(known)] = token
                    known.append(logprob)
            if tops is not None:
                for row, likeliest, goes_on in zip(rows, tops, going_on, strict=True):
                    if goes_on and row.options.rules.top_logprobs:
                        row.tops.append(likeliest[: row.options.rules.top_logprobs])
            if supports is not None:
                for row, record, goes_on in zip(rows, supports, going_on, strict=True):
                    if goes_on and row.options.rules.record_supports:
                        row.supports.append(record)
            if routes is not None:
                for place, (row, goes_on) in enumerate(zip(rows, going_on, strict=True)):
                    if goes_on:
                        row.routes.add(len(row.logprobs) - 2, routes[place : place + 1])
            ended = [rows[index] for index in ends]
            ended += [row for row in rows if row.options.rules.has_ends and is_ended(row)]
            failed = [row for row in rows if row.error is not None]
            if failed and self.raises_errors:
                raise failed[0].error  # type: ignore[misc]
            ended += failed
            for row in ended:
                if row.finish_reason != "stop":
                    row.num_late = len(row.tokens) - len(row.logprobs)
                    del row.tokens[len(row.logprobs) :]
                    self.scheduler.finish(row, "stop")

    def read_all(self) -> None:
        """Waits for every token that was drawn."""
        self._finish(0)

    def _copy(self, copies: list[Copy]) -> None:
        if copies:
            numbers = [[copy.source for copy in copies], [copy.target for copy in copies]]
            numbers.append([copy.num_tokens for copy in copies])
            self.cache.copy_blocks(*send_to_device(torch.tensor(numbers), self.cache.device))


class BatchInStep(ContinuousBatch):
    """A ContinuousBatch that starts to draw when the last prompt is prefilled."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._held: dict[Sequence, torch.Tensor] = {}  # prefilled rows with their logits

    def _enter(self, admission: Admission, own: dict[Sequence, torch.Tensor] | None = None) -> None:
        for sequence in admission.sequences:
            self._held[sequence] = (own or {})[sequence]
        if self._held and not self.scheduler.waiting:
            rows = sorted(self._held, key=lambda sequence: sequence.row)
            self._record(rows, self.decoder.draw(rows, torch.stack([self._held[row] for row in rows])))
            self._held.clear()

    def _decode(self) -> None:
        if self._held:
            self.idle()
        else:
            super()._decode()


def pack_prefills(
    prefills: list[Prefill], block_size: int, is_recomputed_whole: bool, device: torch.device
) -> PrefillBatch:
    """Packs the tokens of `prefills` one after the other; logits are computed for the last token of each.

    `is_recomputed_whole`: whether a response that is prefilled again was computed together with its prompt before;
    otherwise it was fed token by token after the prompt.
    """
    parts = [torch.arange(prefill.first, prefill.last) for prefill in prefills]
    lengths = tuple(map(len, parts))
    positions = torch.cat(parts)
    # Row lengths are those of the first computation, so that a repeated prefill reproduces it.
    fed = torch.tensor([len(p.tokens) if is_recomputed_whole else len(p.prompt.tokens) for p in prefills])
    fed = fed.repeat_interleave(torch.tensor(lengths), output_size=len(positions))
    tokens = torch.tensor([token for prefill in prefills for token in prefill.tokens[prefill.first : prefill.last]])
    blocks = _blocks_of(prefills, parts, block_size)
    by_token = (tokens, positions, blocks, positions % block_size, torch.maximum(positions + 1, fed))
    tokens, positions, write_blocks, write_offsets, row_lengths = send_to_device(torch.stack(by_token), device)
    starts = _starts(lengths, device)
    return PrefillBatch(
        tokens=tokens,
        positions=positions,
        write_blocks=write_blocks,
        write_offsets=write_offsets,
        lengths=lengths,
        starts=starts.int(),
        wanted=starts[1:] - 1,
        row_lengths=row_lengths,
        context=_context(prefills, block_size, device) if any(prefill.first for prefill in prefills) else None,
        state_slots=_state_slots(prefills, device),
        images=_place_features(prefills, device),
        axis_positions=_axis_positions(prefills, device),
        spans=_spans(prefills, device),
    )


def _place_features(prefills: list[Prefill], device: torch.device) -> PlacedFeatures | None:
    """Returns the features of the image tokens that are fed; None if there are none."""
    places, values, start = [], [], 0
    for prefill in prefills:
        images = prefill.prompt.images
        if images is not None:
            first, last = (int(torch.searchsorted(images.places, edge)) for edge in (prefill.first, prefill.last))
            places.append(images.places[first:last] + (start - prefill.first))
            values.append(prefill.prompt.features[first:last])
        start += prefill.last - prefill.first
    if not any(map(len, places)):
        return None
    return PlacedFeatures(send_to_device(torch.cat(places), device), torch.cat(values))


def _spans(prefills: list[Prefill], device: torch.device) -> SeenSpans | None:
    """Returns the spans of the tokens that are fed; None if none sees a later one."""
    images = [prefill.prompt.images for prefill in prefills]
    tower = next((own.tower for own in images if own is not None and own.spans), None)
    if tower is None:
        return None
    parts = []
    for prefill in prefills:
        spans = torch.tensor([0, -1])[:, None].repeat(1, prefill.last)
        for first, last in prefill.prompt.images.spans if prefill.prompt.images is not None else ():
            spans[:, first : last + 1] = torch.tensor([first, last])[:, None]
        parts.append(spans[:, prefill.first :])
    return SeenSpans(send_to_device(torch.cat(parts, dim=1), device), tower.is_local)


def _axis_positions(prefills: list[Prefill], device: torch.device) -> torch.Tensor | None:
    """Returns the positions `[3, N]` of the tokens that are fed; None if the indices are all of them."""
    if all(prefill.prompt.images is None or prefill.prompt.images.positions is None for prefill in prefills):
        return None
    return send_to_device(torch.cat([_positions_of(prefill) for prefill in prefills], dim=1), device)


def _positions_of(prefill: Prefill) -> torch.Tensor:
    images, indices = prefill.prompt.images, torch.arange(prefill.first, prefill.last)
    if images is None or images.positions is None:
        return indices.expand(3, -1)
    later = indices[indices >= images.positions.shape[1]] + images.shift
    return torch.cat((images.positions[:, prefill.first : prefill.last], later.expand(3, -1)), dim=1)


def _context(prefills: list[Prefill], block_size: int, device: torch.device) -> Context:
    """Returns the blocks and offsets of all tokens of the owners up to the last ones that are fed."""
    parts = [torch.arange(prefill.last) for prefill in prefills]
    lengths = tuple(map(len, parts))
    places = torch.stack((_blocks_of(prefills, parts, block_size), torch.cat(parts) % block_size))
    blocks, offsets = send_to_device(places, device)
    return Context(blocks, offsets, lengths, _starts(lengths, device).int())


def _state_slots(prefills: list[Prefill], device: torch.device) -> torch.Tensor | None:
    """Returns the slot of each owner's states; None if layers have no states."""
    if prefills[0].state_slot < 0:
        return None
    return send_to_device(torch.tensor([prefill.state_slot for prefill in prefills]), device)


def _blocks_of(prefills: list[Prefill], positions: list[torch.Tensor], block_size: int) -> torch.Tensor:
    """Returns the blocks that hold the tokens at `positions` of each prefill, concatenated."""
    pairs = zip(prefills, positions, strict=True)
    return torch.cat([torch.tensor(prefill.blocks)[places // block_size] for prefill, places in pairs])


def _starts(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return send_to_device(torch.tensor((0, *lengths)).cumsum(0), device)


def _say_nothing() -> None:
    pass


def encode_images(model: InferenceModel, sequences: list[Sequence]) -> None:
    """Computes the features of the prompts' images, once for equal ones; the weights must be gathered."""
    features: dict[bytes, torch.Tensor] = {}
    for prompt in dict.fromkeys(sequence.prompt for sequence in sequences):
        if prompt.images is None:
            continue
        if prompt.images.digest not in features:
            features[prompt.images.digest] = encode(model.base, prompt.images, model.device, model.dtype)
        prompt.features = features[prompt.images.digest]


class ContainerRollouts:
    """Runs rollouts on containers: paged KV, continuous batching, one pass over the layers per turn."""

    def __init__(
        self,
        model: InferenceModel,
        gatherer: WeightGatherer,
        lasting: LastingWeights,
        workspace: KVWorkspace,
        config: HybridEngineConfig,
        partners: Partners,
    ):
        """`lasting`: provides copies of sharded weights to `model`.

        `partners`: processes that stream weights with this one.
        """
        self.model, self.gatherer, self.workspace, self.config = model, gatherer, workspace, config
        self.lasting, self.partners = lasting, partners
        is_cuda = model.device.type == "cuda"
        is_recorded = is_cuda and config.enable_cuda_graph and model.can_be_recorded
        recorder = CudaGraphs(model.device) if is_recorded else None
        has_tapes = model.device.type == "cpu" and config.enable_cuda_graph
        self.steps = DecodeSteps(model, config.max_out_tokens, recorder, has_tapes)
        self.mixes = True  # see ContinuousBatch
        self.lag = 1 if is_cuda else 0  # turns read late, so that the host does not wait

    @property
    def num_reserved(self) -> int:
        """Blocks, and state slots, outside the scheduler's: one that the padding rows of a graph's batch write to."""
        return 0 if self.steps.recorder is None else 1

    def new_recorder(self) -> Any:
        """Returns a new recorder with memory of its own; None if steps are not recorded."""
        return None if self.steps.recorder is None else self.steps.recorder.another()

    def warm_up(self, plan: RolloutPlan, cache: ModelCache) -> CaptureStats:
        """Compiles the kernels of rollouts like `plan` by a prefill and a decode; records their steps of every size.

        Its sequences are left unfinished, and their drawn tokens are not read.
        """
        strategy = self.start(plan, cache)
        for _ in range(2):
            strategy.step()
        shortest = min(len(sequence.prompt.tokens) for sequence in plan.sequences)
        rows, contexts = range(1, plan.max_running + 1), range(shortest + 1, plan.longest + 1)
        decoder = strategy.decoder
        assert isinstance(decoder, DecodeStep)
        decoder.recorder.prepare(decoder, rows, contexts, self.layers)
        return self.steps.stats

    def gather(self, plan: RolloutPlan, release: ExitStack, is_recorded: bool = True) -> ModelCache:
        """Gathers the weights or a stream of them, fuses LoRA and takes the KV workspace.

        Returns the workspace's cache.

        `is_recorded`: whether steps may be recorded. Recorded steps read copies of sharded weights, which hold no other
        adapter.
        """
        # Under autocast the projections would leave the dtype of the workspace.
        release.enter_context(torch.autocast(self.model.device.type, enabled=False))
        if self.steps.recorder is not None and is_recorded:
            self.gatherer.keep_addresses()
        if self._reads_copies and is_recorded:
            release.enter_context(bound_to_copies(self.model, self.gatherer, self.lasting))
        else:
            has_images = any(sequence.prompt.images is not None for sequence in plan.sequences)
            runs_module = self.model.runs_module or has_images
            gathered = self.gatherer.gathered_for_forward if runs_module else self.gatherer.gathered
            release.enter_context(gathered())
            release.enter_context(bound(self.model, self.gatherer, self.config.tp_gather_partition_size))
        self.model.prepare_positions(plan.longest + 1 if self.steps.recorder is None else self.config.max_out_tokens)
        release.push(self._give_back_workspace)
        return self.workspace.take(
            self.model.cache_shape(
                plan.num_blocks + self.num_reserved, plan.block_size, plan.num_state_slots + self.num_reserved
            ),
            self.model.dtype,
            self.model.device,
        )

    @property
    def _reads_copies(self) -> bool:
        """Whether recorded steps read copies at fixed addresses: if weights are sharded, and whole in a rollout."""
        return self.steps.recorder is not None and self.gatherer.can_stream and not self.gatherer.is_streamed

    def _give_back_workspace(self, error_type: type | None, *_: object) -> None:
        """Releases the workspace if the config says so, and always after an error: it may hold non-finite numbers."""
        if error_type is not None:
            self.steps.drop()  # the tables of an interrupted step may be inconsistent
        if self.config.release_inference_cache or error_type is not None:
            self.workspace.release()

    def layers(self) -> Iterable[InferenceLayer]:
        """Returns one pass over the layers."""
        return pass_over_layers(self.model, self.gatherer)

    def start(
        self, plan: RolloutPlan, cache: ModelCache, choice: Choice | None = None, is_recorded: bool = True
    ) -> ContinuousBatch:
        """Builds the strategy that takes the turns of `plan`; none is taken yet. `choice` is that of `run`.

        `is_recorded`: whether its steps may be recorded, which read weights at their current addresses.
        """
        if choice is not None:
            kind = BatchInStep if isinstance(choice, InStep) else ContinuousBatch
            return kind(
                self.model,
                Scheduler.for_plan(plan),
                OpenStep(self.model, cache, choice, plan.records_routing),
                self.layers,
            )
        step = self.steps.for_rollout(plan, cache, self.gatherer.is_streamed or not is_recorded)
        lag = 0 if self.gatherer.is_streamed else self.lag
        return ContinuousBatch(self.model, Scheduler.for_plan(plan), step, self.layers, lag, self.mixes)

    def run(
        self, plan: RolloutPlan, cache: ModelCache, input_ids: torch.Tensor, choice: Choice | None = None
    ) -> RolloutResult:
        """Takes turns until every sequence has finished or, if weights are streamed, those of every process have.

        `choice` draws the tokens and decides which rows end; if it is None, each sequence's options do.

        Raises:
            RuntimeError: the model's logits are not finite.
        """
        encode_images(self.model, plan.sequences)
        unscored = [sequence.prompt for sequence in plan.sequences if sequence.prompt.is_unscored]
        if unscored and not self.gatherer.is_streamed:
            score_prompts(self.model, unscored)
        strategies = self.run_turns(plan, cache, choice)
        if not all(math.isfinite(logprob) for sequence in plan.sequences for logprob in sequence.logprobs):
            raise RuntimeError("generate(): the model's logits are not finite; check the weights for NaN or inf")
        own = plan.sequences[plan.own]
        output = collect_output(input_ids, own, plan.options)
        return RolloutResult(
            output if plan.options.return_dict else output.sequences,
            num_samples=len(own),
            generated_tokens=sum(len(sequence.tokens) for sequence in own),
            preemptions=sum(strategy.scheduler.num_preemptions for strategy in strategies),
            reused_tokens=sum(strategy.scheduler.kept.num_reused_tokens for strategy in strategies),
            prefill_seconds=sum(strategy.prefill_time.seconds() for strategy in strategies),
            decode_seconds=sum(strategy.decode_time.seconds() for strategy in strategies),
            captures=self.steps.stats,
        )

    def run_turns(
        self, plan: RolloutPlan, cache: ModelCache, choice: Choice | None, tell: Callable[[], None] = _say_nothing
    ) -> list[ContinuousBatch]:
        """Takes all turns of `plan` and returns their strategies. Calls `tell` between turns, unless it streams."""
        is_streamed = self.gatherer.is_streamed
        meets_others = is_streamed or self.model.parallel.size > 1
        start = partial(self.start, plan, cache, choice)
        strategy = self.partners.agree(start) if meets_others else start()
        if is_streamed:
            scoring = ScoringTurns(self.model, self.layers)
            scoring.add(sequence.prompt for sequence in plan.sequences)
            self._turn_together(strategy, scoring)
        while strategy.has_work:
            strategy.step()
            if tell is not _say_nothing:
                self.partners.agree(tell)
        return [strategy]

    def _turn_together(self, strategy: ContinuousBatch, scoring: ScoringTurns) -> None:
        """Takes turns until every process's work is done, because streamed layers are gathered by all together.

        Prompts are scored first; a process without prompts to score takes turns in the meantime.

        An error of one process is raised on all after the turn in which it occurred: until then it gathers with them.
        """
        error: BaseException | None = None

        def take_pass() -> None:
            if not scoring.turn():
                strategy.step()

        with holding_interrupts() as held:
            while True:
                state = _FAILED if error is not None else int(scoring.has_work or strategy.has_work)
                (highest,) = self.partners.highest([state])
                if highest == _FAILED:
                    self.partners.raise_together(error)
                if highest == 0:
                    return
                error = self.pass_over_stream(take_pass) or attempt(held.pass_on)[1]

    def pass_over_stream(self, action: Callable[[], object]) -> BaseException | None:
        """Runs `action`, one pass over the layers, and finishes the pass even after an error.

        Returns that error, or None.
        """
        self.gatherer.begin_pass()
        _, error = attempt(action)
        if error is not None:
            self.gatherer.finish_pass(self.model.layers)
        return error
