"""One decode step for the whole batch, on buffers with fixed addresses, so that a GPU can replay it as one graph.

Every running sequence has a slot. Tables on the device hold the data of each slot, and a step receives only the slots
of its rows:

    numbers  [6, C+1]   position and draw index of the token to feed, noise key, 1 for a live slot, the state slot, and
                        the shift of positions for rotary embedding
    blocks   [C+1, n]   block table
    tokens   [C+1]      the token drawn last, which only the device knows
    seen     [C+1, V]   tokens of prompt and response; allocated once a sequence has a repetition penalty
    counts   [C+1, V]   tokens of the response; allocated once a sequence has a presence or frequency penalty

The step advances positions itself, and the host advances its image of them. While the same rows run on the same blocks,
the host sends nothing; otherwise one copy carries the slots of the rows and the changed cells of the tables. When rows
leave and enter, their keys and values do not move. Slot C belongs to no sequence: it pads a batch to its bucket, is
never live, and its block and its state slot are the last ones of the workspace.

A step draws by one set of options. If a row has other options, all rows of the turn are drawn after the step from its
logits, each by its own options.

C slots, S rows, n blocks per sequence, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

import numpy as np
import torch

from hybrid_engine.containers.cache import ModelCache
from hybrid_engine.containers.device import send_to_device
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.containers.moe import routing_dtype
from hybrid_engine.generation.core import PENDING, CaptureStats, Draw, Drawn, RolloutPlan, Sequence
from hybrid_engine.generation.recorders import (
    FedRows,
    FunctionRecorder,
    Layers,
    PlainSteps,
    StepGraphs,
    StepRecorder,
    StepTapes,
    batch_bucket,
)
from hybrid_engine.generation.sampling import DrawnRows, MixedRows, RowState, send_to_host
from hybrid_engine.ops import Batch, DecodeBatch, MixedBatch, PrefillBatch, SampleOp

_POSITION, _DRAW, _KEY, _LIVE, _STATE, _SHIFT = range(6)


class SlotTables:
    """The tables on the device and their image on the host.

    Args:
        num_slots: C.
        num_columns: n.
        trash_block: block that padding rows write to; any block if there are no padding rows.
        vocab: V.
        trash_state: state slot that padding rows write to, as `trash_block`.
    """

    def __init__(
        self,
        num_slots: int,
        num_columns: int,
        trash_block: int,
        vocab: int,
        device: torch.device,
        trash_state: int = 0,
    ):
        self.num_slots, self.num_columns, self.vocab = num_slots, num_columns, vocab
        shapes = {"rows": (num_slots,), "numbers": (_SHIFT + 1, num_slots + 1), "blocks": (num_slots + 1, num_columns)}
        size = sum(torch.Size(shape).numel() for shape in shapes.values())
        self._image = np.zeros(size, dtype=np.int64)
        self._rows, self._numbers, self._blocks = (
            part.numpy() for part in _views(torch.from_numpy(self._image), shapes)
        )
        self._rows.fill(num_slots)
        self._numbers[_LIVE, :num_slots] = 1
        self._numbers[_STATE] = trash_state
        self._blocks.fill(trash_block)
        places, numbers, blocks = (part.numpy() for part in _views(torch.arange(size), shapes))
        self._places_of_rows = places
        self._places_of_slot = np.concatenate((numbers.T, blocks), axis=1)  # [C+1, 6+n], in the image
        self._on_device = torch.from_numpy(self._image).to(device, copy=True)
        self.rows, self.numbers, self.blocks = _views(self._on_device, shapes)
        self._sent: list[int] = []  # the slots in `rows` on the device
        self._slots: np.ndarray = np.zeros(0, dtype=np.int64)  # `_sent` as an array
        self.tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.seen: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None

    def send(self, sequences: list[Sequence], changed: list[Sequence]) -> bool:
        """Makes `sequences` the rows of the next step, in this order, with one copy at most; returns whether it copied.

        `changed` are the sequences that started or whose blocks changed.
        """
        return self._send_rows([sequence.slot for sequence in sequences], [s for s in changed if s.slot >= 0])

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Inside, no row belongs to a sequence; on exit, the rows are those of before."""
        slots = self._sent
        self._send_rows([], [])
        yield
        self._send_rows(slots, [])

    def _send_rows(self, slots: list[int], changed: list[Sequence]) -> bool:
        places = []
        if slots != self._sent:
            self._sent, self._slots = slots, np.array(slots, dtype=np.int64)
            self._rows[: len(slots)] = self._slots
            self._rows[len(slots) :] = self.num_slots
            places.append(self._places_of_rows)
        if changed:
            written = {self._write(sequence) for sequence in changed}
            places.append(self._places_of_slot[list(written)].ravel())
        if places:
            where = np.concatenate(places)
            cells = send_to_device(torch.from_numpy(np.stack((where, self._image[where]))), self._on_device.device)
            self._on_device.index_copy_(0, cells[0], cells[1])
        return bool(places)

    def _write(self, sequence: Sequence) -> int:
        """Writes a sequence into the image; returns its slot."""
        slot, blocks = sequence.slot, sequence.blocks
        self._numbers[:_LIVE, slot] = len(sequence) - 1, len(sequence.tokens), sequence.key
        self._numbers[_STATE, slot] = sequence.state_slot
        images = sequence.prompt.images
        self._numbers[_SHIFT, slot] = 0 if images is None else images.shift
        self._blocks[slot, : len(blocks)] = blocks
        return slot

    def advance(self) -> None:
        """Advances the host's image after a step, as the device has advanced its own numbers."""
        self._numbers[_POSITION][self._slots] += 1
        self._numbers[_DRAW][self._slots] += 1

    def longest(self) -> int:
        """Number of tokens of the longest row, including the one to feed."""
        return int(self._numbers[_POSITION][self._slots].max()) + 1

    def are_rows_in_place(self) -> bool:
        """Whether the first block of row i is block i."""
        return bool((self._blocks[self._slots, 0] == np.arange(len(self._slots))).all())

    def note_seen(self) -> None:
        """Allocates `seen`; from now on it is filled for the sequences that enter."""
        self.seen = torch.zeros(self.num_slots + 1, self.vocab, dtype=torch.bool, device=self.tokens.device)

    def enter(self, sequence: Sequence) -> None:
        """Marks the tokens of a sequence that starts in `seen` and `counts`; its first token is drawn after that."""
        rules = sequence.options.rules
        if self.counts is None and (rules.presence_penalty or rules.frequency_penalty):
            self.counts = torch.zeros(self.num_slots + 1, self.vocab, dtype=torch.int32, device=self.tokens.device)
        if self.counts is not None:
            said = send_to_device(torch.tensor(sequence.tokens, dtype=torch.int64), self.counts.device)
            self.counts[sequence.slot] = torch.bincount(said, minlength=self.vocab)
        if self.seen is None and sequence.options.repetition_penalty != 1.0:
            self.note_seen()
        if self.seen is not None:
            known = send_to_device(torch.tensor(sequence.prompt.tokens + sequence.tokens), self.seen.device)
            self.seen[sequence.slot].fill_(False).index_fill_(0, known, True)


def _views(flat: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> list[torch.Tensor]:
    parts = flat.split([torch.Size(shape).numel() for shape in shapes.values()])
    return [part.view(shape) for part, shape in zip(parts, shapes.values(), strict=True)]


class DecodeStep:
    """Model, sampler, stop check and next positions, as one function of the contents of the tables.

    Args:
        sample: sampler, used if every row has its options.
        recorder: runs the steps; None: as they are written.
        records_routing: whether the experts that tokens take are recorded.
    """

    def __init__(
        self,
        model: InferenceModel,
        sample: SampleOp,
        tables: SlotTables,
        cache: ModelCache,
        recorder: StepRecorder | None = None,
        records_routing: bool = False,
    ):
        self.records_routing = records_routing
        self.model, self.sample, self.tables, self.cache = model, sample, tables, cache
        self.recorder: StepRecorder = PlainSteps() if recorder is None else recorder
        self.capacity = tables.num_columns * cache.block_size
        self._ends = torch.tensor(sample.options.eos_token_ids, dtype=torch.int64, device=cache.device)
        self._results = torch.zeros(3, tables.num_slots, dtype=torch.float64, device=cache.device)
        if sample.options.repetition_penalty != 1.0:
            tables.note_seen()  # before a graph holds the address
        self._mixed: MixedRows | None = None  # rows of the last step if their options differ from `sample`'s
        self._tops: torch.Tensor | None = None  # likeliest tokens of the last draw
        self._supports: torch.Tensor | None = None  # what the last draw's tokens were drawn from
        self._routes: torch.Tensor | None = None  # [C, L, k]: experts of the tokens that the last step fed
        if records_routing:
            mixtures = model.mixtures
            shape = tables.num_slots, len(mixtures), mixtures[0].gating.top_k
            dtype = routing_dtype(max(mixture.num_experts for mixture in mixtures))
            self._routes = torch.zeros(shape, dtype=dtype, device=cache.device)

    def run(self, sequences: list[Sequence], changed: list[Sequence], layers: Layers) -> Draw:
        """Feeds each sequence's newest token and draws the next one; `changed` is that of `SlotTables.send`."""
        tables, num_rows = self.tables, len(sequences)
        if tables.send(sequences, changed):
            self._mixed = self._mix(sequences)
        logits = self.recorder.run(self, num_rows, tables.longest(), self._mixed is None, layers)
        tables.advance()
        if self._mixed is None:
            return send_to_host(self._results[:, :num_rows], routes=self._fed_routes(num_rows))
        slots = tables.rows[:num_rows]
        numbers = tables.numbers.index_select(1, slots)
        drawn_before = numbers[_DRAW] - 1
        self._draw_mixed(self._mixed, logits[:num_rows], slots, numbers[_KEY], drawn_before)
        return send_to_host(self._results[:, :num_rows], self._tops, self._supports, self._fed_routes(num_rows))

    def _fed_routes(self, num_rows: int) -> torch.Tensor | None:
        return None if self._routes is None else self._routes[:num_rows]

    def _note_routes(self, num_rows: int) -> None:
        if self._routes is not None:
            self._routes[:num_rows].copy_(self.model.taken_experts(num_rows))

    def run_beside(
        self, prefill: PrefillBatch, sequences: list[Sequence], changed: list[Sequence], layers: Layers
    ) -> tuple[Draw, torch.Tensor]:
        """`run` with `prefill` in the same pass, never recorded; returns the draw and the prefill's logits `[R, V]`."""
        tables, num_rows = self.tables, len(sequences)
        if tables.send(sequences, changed):
            self._mixed = self._mix(sequences)
        rows, context = self.feed(num_rows), tables.longest()
        decode = self._batch(rows, context, self.is_identity(context))
        logits = self.model.forward(MixedBatch(decode=decode, prefill=prefill), self.cache, layers())
        self._note_routes(num_rows)
        self._draw_by(self._mixed, logits[:num_rows], rows.slots, rows.numbers[_KEY], rows.numbers[_DRAW])
        self._advance(rows)
        tables.advance()
        draw = send_to_host(self._results[:, :num_rows], self._tops, self._supports, self._fed_routes(num_rows))
        return draw, logits[num_rows:]

    def draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Draw:
        """Draws the first token of sequences that start, from `logits [S, V]` fp32 of a prefill."""
        for sequence in sequences:
            self.tables.enter(sequence)
        numbers = [[s.slot for s in sequences], [s.key for s in sequences], [len(s.tokens) for s in sequences]]
        slots, keys, draws = send_to_device(torch.tensor(numbers, dtype=torch.int64), logits.device)
        self._draw_by(self._mix(sequences), logits, slots, keys, draws)
        return send_to_host(self._results[:, : len(sequences)], self._tops, self._supports)

    @property
    def can_be_recorded(self) -> bool:
        """See `InferenceModel.can_be_recorded`."""
        return self.model.can_be_recorded

    @property
    def position_tables(self) -> tuple[int, ...]:
        """Identities of the model's position tables, which may be built again."""
        return tuple(id(cos) for cos, _ in self.model.angles.tables.values())

    def feed(self, num_rows: int) -> FedRows:
        """Reads the first `num_rows` rows of the tables."""
        slots = self.tables.rows[:num_rows]
        return FedRows(slots, self.tables.numbers.index_select(1, slots))

    def is_identity(self, context: int) -> bool:
        """Whether each row's only block has the number of the row, for rows of up to `context` tokens."""
        return context <= self.cache.block_size and self.tables.are_rows_in_place()

    def forward(self, rows: FedRows, context: int, is_identity: bool, layers: Layers) -> torch.Tensor:
        """Returns the logits `[S, V]` after the newest tokens of `rows`, which have up to `context` tokens."""
        logits = self.model.forward(self._batch(rows, context, is_identity), self.cache, layers())
        self._note_routes(len(rows.slots))
        return logits

    def finish(self, rows: FedRows, logits: torch.Tensor, draws: bool) -> None:
        """Draws the rows' next tokens by the options of `sample` if `draws`, and advances the rows."""
        if draws:
            self._draw(logits, rows.slots, rows.numbers[_KEY], rows.numbers[_DRAW])
        self._advance(rows)

    def _batch(self, rows: FedRows, context: int, is_identity: bool) -> DecodeBatch:
        return DecodeBatch(
            tokens=self.tables.tokens[rows.slots],
            positions=rows.numbers[_POSITION],
            block_tables=self.tables.blocks[rows.slots, : -(-context // self.cache.block_size)],
            context=context,
            is_identity=is_identity,
            state_slots=rows.numbers[_STATE] if self.cache.num_slots else None,
            shifts=rows.numbers[_SHIFT] if self.model.has_axes else None,
        )

    def _advance(self, rows: FedRows) -> None:
        self.tables.numbers[: _DRAW + 1].index_add_(1, rows.slots, rows.numbers[_LIVE].expand(_DRAW + 1, -1))

    def _mix(self, sequences: list[Sequence]) -> MixedRows | None:
        """Returns MixedRows for the sequences, or None if all of them have the options of `sample`."""
        kinds = {id(sequence.options): sequence.options for sequence in sequences}
        if all(options.is_plain and options.sampling == self.sample.options for options in kinds.values()):
            return None
        return MixedRows(sequences, self.model.vocab_size, self.cache.device, is_exact=self.sample.is_exact)

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, draws: torch.Tensor) -> None:
        tokens, logprobs = self.sample(logits, keys, draws, self.tables.seen, slots)
        self._note(slots, DrawnRows(tokens, logprobs, (tokens[:, None] == self._ends).any(1)))

    def _draw_by(
        self,
        mixed: MixedRows | None,
        logits: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        draws: torch.Tensor,
    ) -> None:
        if mixed is None:
            self._draw(logits, slots, keys, draws)
        else:
            self._draw_mixed(mixed, logits, slots, keys, draws)

    def _draw_mixed(
        self, mixed: MixedRows, logits: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, draws: torch.Tensor
    ) -> None:
        seen, counts = (None if table is None else table[slots] for table in (self.tables.seen, self.tables.counts))
        self._note(slots, mixed.draw(logits, RowState(keys, draws, seen, counts)))

    def _note(self, slots: torch.Tensor, drawn: DrawnRows) -> None:
        self.tables.tokens[slots] = drawn.tokens
        if self.tables.seen is not None:
            # A plain True would be copied from the host, which a graph cannot hold.
            self.tables.seen[slots, drawn.tokens] = torch.ones_like(drawn.tokens, dtype=torch.bool)
        if self.tables.counts is not None:
            self.tables.counts[slots, drawn.tokens] += 1
        self._tops, self._supports = drawn.tops, drawn.supports
        for row, values in enumerate(drawn[:3]):
            self._results[row, : len(slots)] = values


class SteppedModel(Protocol):
    """The model interface that the steps of a rollout need."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the logits."""

    @property
    def recompute_length(self) -> int | None:
        """See `InferenceModel.recompute_length`."""

    def forward(self, batch: Batch, cache: ModelCache, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Returns the logits of `batch`. See `InferenceModel.forward`."""


Choice = Callable[[list[Sequence], torch.Tensor], Drawn]
"""`(rows, logits [S, V] fp32) -> Drawn`: the next token of each row and which rows it ends.

If processes share the model, each of them calls it with the same logits, and it must return the same on all.
"""


class OpenStep:
    """Replaces a DecodeStep in rollouts without forks (one sample of each prompt) and without lag."""

    def __init__(self, model: SteppedModel, cache: ModelCache, choice: Choice, records_routing: bool = False):
        self.model, self.cache, self.choice, self.records_routing = model, cache, choice, records_routing

    def run(self, sequences: list[Sequence], changed: list[Sequence], layers: Layers) -> Draw:
        """Feeds each sequence's newest token and draws the next one; `changed` is not used."""
        newest = [sequence.tokens[-1] for sequence in sequences]
        assert PENDING not in newest, "a token must be known before it is fed"
        context, size = max(map(len, sequences)), self.cache.block_size
        num_columns = -(-context // size)
        blocks = [(row.blocks + [row.blocks[0]] * num_columns)[:num_columns] for row in sequences]
        numbers = torch.tensor([newest, [len(row) - 1 for row in sequences], [row.state_slot for row in sequences]])
        tokens, positions, state_slots = send_to_device(numbers, self.cache.device)
        in_place = num_columns == 1 and all(row.blocks[0] == place for place, row in enumerate(sequences))
        batch = DecodeBatch(
            tokens=tokens,
            positions=positions,
            block_tables=send_to_device(torch.tensor(blocks), self.cache.device),
            context=context,
            is_identity=in_place,
            state_slots=state_slots if self.cache.num_slots else None,
            shifts=self._shifts(sequences),
        )
        logits = self.model.forward(batch, self.cache, layers())
        draw = self.draw(sequences, logits)
        if not self.records_routing:
            return draw
        assert isinstance(self.model, InferenceModel)
        routes = self.model.taken_experts(len(sequences)).cpu()
        return Draw(lambda: draw.read()._replace(routes=routes))

    def _shifts(self, sequences: list[Sequence]) -> torch.Tensor | None:
        shifts = [0 if row.prompt.images is None else row.prompt.images.shift for row in sequences]
        return send_to_device(torch.tensor(shifts), self.cache.device) if any(shifts) else None

    def draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Draw:
        """Draws the next token of each sequence from `logits [S, V]` fp32."""
        drawn = self.choice(sequences, logits)
        return Draw(lambda: drawn)


# Number of kinds of rollout (sampling options, slots, workspace, addresses) whose steps are kept: training, evaluation
# and one change of each. A step's graphs keep the memory of its intermediate results.
MAX_KEPT = 4


_everywhere: "WeakSet[DecodeSteps]" = WeakSet()


def drop_recorded_steps() -> None:
    """Drops the recorded steps of all engines in this process, before the process groups they use are destroyed."""
    for steps in list(_everywhere):
        steps.drop()


class DecodeSteps:
    """Builds the step of a rollout, or returns the one that an earlier rollout of the same kind left.

    Args:
        max_tokens: length of the longest sequence that a kept step must serve.
        recorder: records graphs (`CudaGraphs`); None: steps are launched as usual and not kept.
        has_tapes: whether steps that are not recorded may be played from a tape within a rollout (recorders.py).
    """

    def __init__(
        self, model: InferenceModel, max_tokens: int, recorder: FunctionRecorder | None, has_tapes: bool = False
    ):
        self.model, self.max_tokens, self.recorder, self.has_tapes = model, max_tokens, recorder, has_tapes
        self.stats = CaptureStats()
        self._kept: dict[tuple, DecodeStep] = {}  # least recently used first
        _everywhere.add(self)

    def for_rollout(self, plan: RolloutPlan, cache: ModelCache, is_streamed: bool) -> DecodeStep:
        """Returns the step of `plan` on the workspace `cache`; weights must be bound as the rollout will read them."""
        step = self._step(plan, cache, is_streamed)
        self.stats = step.recorder.begin_rollout()
        return step

    def _step(self, plan: RolloutPlan, cache: ModelCache, is_streamed: bool) -> DecodeStep:
        if self.recorder is None or is_streamed:
            can_note = self.has_tapes and not is_streamed and self.model.parallel.size == 1
            recorder = StepTapes(len(self.model.attentions)) if can_note else PlainSteps()
            return self._build(plan, cache, plan.max_running, plan.num_columns, recorder)
        num_slots, num_columns = batch_bucket(plan.max_running), -(-self.max_tokens // plan.block_size)
        addresses = (cache.data_ptr(), *self.model.addresses())
        self._forget([key for key in self._kept if key[-1] != addresses])
        key = (plan.sampling, num_slots, num_columns, cache.shape, plan.records_routing, addresses)
        step = self._kept.pop(key, None) or self._build(plan, cache, num_slots, num_columns, StepGraphs(self.recorder))
        self._keep(key, step)
        return step

    def _keep(self, key: tuple, step: DecodeStep) -> None:
        self._kept[key] = step
        self._forget(list(self._kept)[:-MAX_KEPT])

    def _forget(self, keys: list[tuple]) -> None:
        """Drops these steps at once: their graphs, and a workspace that no longer exists, take memory."""
        had_graphs = self._has_graphs
        for key in keys:
            del self._kept[key]
        if self.recorder is not None and had_graphs and not self._has_graphs:
            self.recorder.renew()

    @property
    def _has_graphs(self) -> bool:
        return any(step.recorder.num_recorded for step in self._kept.values())

    @property
    def num_kept(self) -> int:
        """Number of kept steps."""
        return len(self._kept)

    def drop(self) -> None:
        """Drops every step with its graphs and their memory."""
        self._kept.clear()
        if self.recorder is not None:
            self.recorder.renew()

    def _build(
        self, plan: RolloutPlan, cache: ModelCache, num_slots: int, num_columns: int, recorder: StepRecorder
    ) -> DecodeStep:
        tables = SlotTables(
            num_slots, num_columns, cache.num_blocks - 1, self.model.vocab_size, cache.device, cache.num_slots - 1
        )
        sample = SampleOp(plan.sampling, is_exact=self.model.runs_module)
        return DecodeStep(self.model, sample, tables, cache, recorder, plan.records_routing)
