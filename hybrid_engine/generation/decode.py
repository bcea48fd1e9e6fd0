"""One decode step for the whole batch, on buffers with fixed addresses, so that a GPU can replay it as one graph.

Every running sequence has a slot. Tables on the device hold the data of each slot, and a step receives only the slots
of its rows:

    numbers  [4, C+1]   position and draw index of the token to feed, noise key, and 1 for a live slot
    blocks   [C+1, n]   block table
    tokens   [C+1]      the token drawn last, which only the device knows
    seen     [C+1, V]   tokens of prompt and response; allocated once a sequence has a repetition penalty
    counts   [C+1, V]   tokens of the response; allocated once a sequence has a presence or frequency penalty

The step advances positions itself, and the host advances its image of them. While the same rows run on the same blocks,
the host sends nothing; otherwise one copy carries the slots of the rows and the changed cells of the tables. When rows
leave and enter, their keys and values do not move. Slot C belongs to no sequence: it pads a batch to its bucket, is
never live, and its block is the last one of the workspace.

A step draws by one set of options. If a row has other options, all rows of the turn are drawn after the step from its
logits, each by its own options.

C slots, S rows, n blocks per sequence, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from hybrid_engine.containers.device import record_event, send_to_device
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.model import InferenceModel
from hybrid_engine.generation.core import PENDING, Sequence
from hybrid_engine.generation.recorders import StepGraphs, StepTapes, batch_bucket, context_bucket
from hybrid_engine.generation.sampling import DrawnRows, MixedRows, RowState
from hybrid_engine.ops import Batch, DecodeBatch, MixedBatch, PrefillBatch, SampleOp

_POSITION, _DRAW, _KEY, _LIVE = range(4)


class SlotTables:
    """The tables on the device and their image on the host.

    Args:
        num_slots: C.
        num_columns: n.
        trash_block: block that padding rows write to; any block if there are no padding rows.
        vocab: V.
    """

    def __init__(self, num_slots: int, num_columns: int, trash_block: int, vocab: int, device: torch.device):
        self.num_slots, self.num_columns, self.vocab = num_slots, num_columns, vocab
        shapes = {"rows": (num_slots,), "numbers": (4, num_slots + 1), "blocks": (num_slots + 1, num_columns)}
        size = sum(torch.Size(shape).numel() for shape in shapes.values())
        self._image = np.zeros(size, dtype=np.int64)
        self._rows, self._numbers, self._blocks = (
            part.numpy() for part in _views(torch.from_numpy(self._image), shapes)
        )
        self._rows.fill(num_slots)
        self._numbers[_LIVE, :num_slots] = 1
        self._blocks.fill(trash_block)
        places, numbers, blocks = (part.numpy() for part in _views(torch.arange(size), shapes))
        self._places_of_rows = places
        self._places_of_slot = np.concatenate((numbers.T, blocks), axis=1)  # [C+1, 4+n], in the image
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

    def clear(self) -> None:
        """Empties the tables: no row belongs to a sequence."""
        self._send_rows([], [])

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


class Drawn(NamedTuple):
    """The tokens drawn for the rows of a turn."""

    tokens: list[int]
    logprobs: list[float]
    ends: list[int]  # the rows whose token ends their sequence
    tops: list[list[tuple[int, float]]] | None = None  # likeliest tokens of each row; None if no row requests them


@dataclass(frozen=True)
class Draw:
    """Drawn tokens on their way to the host; `read()` waits for them."""

    read: Callable[[], Drawn]


def send_to_host(results: torch.Tensor, tops: torch.Tensor | None = None) -> Draw:
    """Returns a Draw of `results [3, S]` fp64 and `tops [2, S, k]`; the device may overwrite them at once."""

    def drawn(values: torch.Tensor, tops: torch.Tensor | None) -> Drawn:
        tokens, logprobs, ends = values.numpy()
        likeliest = None
        if tops is not None:
            ids, of_ids = tops
            pairs = zip(ids.long().tolist(), of_ids.tolist(), strict=True)
            likeliest = [list(zip(*row, strict=True)) for row in pairs]
        return Drawn(tokens.astype(np.int64).tolist(), logprobs.tolist(), ends.nonzero()[0].tolist(), likeliest)

    if not results.is_cuda:
        copied = results.clone()
        return Draw(lambda: drawn(copied, tops))
    sent, sent_tops = _to_pinned(results), None if tops is None else _to_pinned(tops)
    event = record_event(results.device)

    def read() -> Drawn:
        event.synchronize()
        return drawn(sent, sent_tops)

    return Draw(read)


def _to_pinned(values: torch.Tensor) -> torch.Tensor:
    """Returns pinned host memory that holds `values` once the device has executed the copy."""
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values, non_blocking=True)


class DecodeStep:
    """Model, sampler, stop check and next positions, as one function of the contents of the tables.

    Args:
        sample: sampler, used if every row has its options.
        graphs: graphs of recorded steps; None: each step is launched as usual.
        tapes: tapes of the forward passes of steps that are not recorded.
    """

    def __init__(
        self,
        model: InferenceModel,
        sample: SampleOp,
        tables: SlotTables,
        kv: torch.Tensor,
        graphs: StepGraphs | None = None,
        tapes: StepTapes | None = None,
    ):
        self.model, self.sample, self.tables, self.kv, self.graphs = model, sample, tables, kv, graphs
        self._tapes = tapes
        self._ends = torch.tensor(sample.options.eos_token_ids, dtype=torch.int64, device=kv.device)
        self._results = torch.zeros(3, tables.num_slots, dtype=torch.float64, device=kv.device)
        if sample.options.repetition_penalty != 1.0:
            tables.note_seen()  # before a graph holds the address
        self._mixed: MixedRows | None = None  # rows of the last step if their options differ from `sample`'s
        self._logits = torch.empty(0)  # logits that a graph writes for mixed rows
        self._tops: torch.Tensor | None = None  # likeliest tokens of the last draw

    def run(
        self, sequences: list[Sequence], changed: list[Sequence], layers: Callable[[], Iterable[InferenceLayer]]
    ) -> Draw:
        """Feeds each sequence's newest token and draws the next one; `changed` is that of `SlotTables.send`."""
        tables = self.tables
        if tables.send(sequences, changed):
            self._mixed = self._mix(sequences)
        context = tables.longest()
        if self.graphs is None:
            logits = self._run_unrecorded(len(sequences), context, layers)
        else:
            step = self._step if self._mixed is None else self._step_to_logits
            num_rows = batch_bucket(len(sequences))
            reach = context_bucket(context, tables.num_columns * self.kv.shape[4])
            kind = (num_rows, reach, self._mixed is None)
            if not self.graphs.has(kind):
                tables.clear()
                self.graphs.record(kind, lambda: step(num_rows, reach, False, layers))
                tables.send(sequences, [])
            self.graphs.replay(kind)
            logits = self._logits
        tables.advance()
        if self._mixed is not None:
            slots = tables.rows[: len(sequences)]
            numbers = tables.numbers.index_select(1, slots)
            drawn_before = numbers[_DRAW] - 1
            self._draw_mixed(self._mixed, logits[: len(sequences)], slots, numbers[_KEY], drawn_before)
        return send_to_host(self._results[:, : len(sequences)], None if self._mixed is None else self._tops)

    def run_beside(
        self,
        prefill: PrefillBatch,
        sequences: list[Sequence],
        changed: list[Sequence],
        layers: Callable[[], Iterable[InferenceLayer]],
    ) -> tuple[Draw, torch.Tensor]:
        """`run` with `prefill` in the same pass, never recorded; returns the draw and the prefill's logits `[R, V]`."""
        tables, num_rows = self.tables, len(sequences)
        if tables.send(sequences, changed):
            self._mixed = self._mix(sequences)
        slots = tables.rows[:num_rows]
        numbers = tables.numbers.index_select(1, slots)
        context = tables.longest()
        decode = self._batch(slots, numbers, context, self._is_identity(context))
        logits = self.model.forward(MixedBatch(decode=decode, prefill=prefill), self.kv, layers())
        self._draw_by(self._mixed, logits[:num_rows], slots, numbers[_KEY], numbers[_DRAW])
        self._advance(slots, numbers)
        tables.advance()
        return send_to_host(self._results[:, :num_rows], self._tops), logits[num_rows:]

    def draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Draw:
        """Draws the first token of sequences that start, from `logits [S, V]` fp32 of a prefill."""
        for sequence in sequences:
            self.tables.enter(sequence)
        numbers = [[s.slot for s in sequences], [s.key for s in sequences], [len(s.tokens) for s in sequences]]
        slots, keys, draws = send_to_device(torch.tensor(numbers, dtype=torch.int64), logits.device)
        self._draw_by(self._mix(sequences), logits, slots, keys, draws)
        return send_to_host(self._results[:, : len(sequences)], self._tops)

    def _mix(self, sequences: list[Sequence]) -> MixedRows | None:
        """Returns MixedRows for the sequences, or None if all of them have the options of `sample`."""
        kinds = {id(sequence.options): sequence.options for sequence in sequences}
        if all(options.is_plain and options.sampling == self.sample.options for options in kinds.values()):
            return None
        return MixedRows(sequences, self.model.vocab_size, self.kv.device, is_exact=self.sample.is_exact)

    def _forward(
        self,
        slots: torch.Tensor,
        numbers: torch.Tensor,
        context: int,
        is_identity: bool,
        layers: Callable[[], Iterable[InferenceLayer]],
    ) -> torch.Tensor:
        """Returns the logits `[S, V]` after the newest tokens of `slots [S]`; `numbers [4, S]` are theirs."""
        return self.model.forward(self._batch(slots, numbers, context, is_identity), self.kv, layers())

    def _batch(self, slots: torch.Tensor, numbers: torch.Tensor, context: int, is_identity: bool) -> DecodeBatch:
        return DecodeBatch(
            tokens=self.tables.tokens[slots],
            positions=numbers[_POSITION],
            block_tables=self.tables.blocks[slots, : -(-context // self.kv.shape[4])],
            context=context,
            is_identity=is_identity,
        )

    def _run_unrecorded(
        self, num_rows: int, context: int, layers: Callable[[], Iterable[InferenceLayer]]
    ) -> torch.Tensor:
        """Runs a step without a graph, with its forward pass from a tape if possible; returns the logits."""
        tables = self.tables
        slots = tables.rows[:num_rows]
        numbers = tables.numbers.index_select(1, slots)
        if self._tapes is None:
            logits = self._forward(slots, numbers, context, self._is_identity(context), layers)
        else:
            logits = self._tapes.run(
                (
                    num_rows,
                    *(id(cos) for cos, _ in self.model.angles.tables.values()),
                ),  # position tables may be rebuilt
                lambda: self._forward(slots, numbers, context, self._is_identity(context), layers),
                lambda: self._forward_of_rows(num_rows, layers),
            )
        if self._mixed is None:
            self._draw(logits, slots, numbers[_KEY], numbers[_DRAW])
        self._advance(slots, numbers)
        return logits

    def _is_identity(self, context: int) -> bool:
        return context <= self.kv.shape[4] and self.tables.are_rows_in_place()

    def _forward_of_rows(self, num_rows: int, layers: Callable[[], Iterable[InferenceLayer]]) -> torch.Tensor:
        """`_forward` in a form valid for any rows and lengths; it reads only tables, weights and cache."""
        slots = self.tables.rows[:num_rows]
        numbers = self.tables.numbers.index_select(1, slots)
        return self._forward(slots, numbers, self.tables.num_columns * self.kv.shape[4], False, layers)

    def _step(
        self, num_rows: int, context: int, is_identity: bool, layers: Callable[[], Iterable[InferenceLayer]]
    ) -> None:
        """The function that a graph records: nothing here may depend on a number that only the device knows."""
        slots = self.tables.rows[:num_rows]
        numbers = self.tables.numbers.index_select(1, slots)
        logits = self._forward(slots, numbers, context, is_identity, layers)
        self._draw(logits, slots, numbers[_KEY], numbers[_DRAW])
        self._advance(slots, numbers)

    def _step_to_logits(
        self, num_rows: int, context: int, is_identity: bool, layers: Callable[[], Iterable[InferenceLayer]]
    ) -> None:
        """`_step` without the draw, which is not part of the graph if rows are mixed."""
        slots = self.tables.rows[:num_rows]
        numbers = self.tables.numbers.index_select(1, slots)
        logits = self._forward(slots, numbers, context, is_identity, layers)
        if len(self._logits) == 0:
            self._logits = logits.new_empty(self.tables.num_slots, logits.shape[1])
        self._logits[:num_rows] = logits
        self._advance(slots, numbers)

    def _advance(self, slots: torch.Tensor, numbers: torch.Tensor) -> None:
        self.tables.numbers[: _DRAW + 1].index_add_(1, slots, numbers[_LIVE].expand(_DRAW + 1, -1))

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
        self._tops = drawn.tops
        for row, values in enumerate(drawn[:3]):
            self._results[row, : len(slots)] = values

    def record(
        self, rows: Iterable[int], contexts: Iterable[int], layers: Callable[[], Iterable[InferenceLayer]]
    ) -> None:
        """Records the steps for these numbers of rows and context lengths that are not recorded yet."""
        assert self.graphs is not None
        capacity = self.tables.num_columns * self.kv.shape[4]
        reaches = {context_bucket(context, capacity) for context in contexts}
        for num_rows in sorted({batch_bucket(number) for number in rows}):
            for reach in sorted(reaches):
                kind = (num_rows, reach, True)
                if not self.graphs.has(kind):
                    self.tables.clear()
                    self.graphs.record(kind, partial(self._step, num_rows, reach, False, layers))


class TurnModel(Protocol):
    """The model interface that the turns of a rollout need."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the logits."""

    @property
    def recompute_length(self) -> int | None:
        """See `InferenceModel.recompute_length`."""

    def forward(self, batch: Batch, kv: torch.Tensor, layers: Iterable[InferenceLayer]) -> torch.Tensor:
        """Returns the logits of `batch`. See `InferenceModel.forward`."""


Choice = Callable[[list[Sequence], torch.Tensor], Drawn]
"""`(rows, logits [S, V] fp32) -> Drawn`: the next token of each row and which rows it ends.

If processes share the model, each of them calls it with the same logits, and it must return the same on all.
"""


class OpenStep:
    """Replaces a DecodeStep in rollouts without forks (one sample of each prompt) and without lag."""

    graphs = None

    def __init__(self, model: TurnModel, kv: torch.Tensor, choice: Choice):
        self.model, self.kv, self.choice = model, kv, choice

    def run(
        self, sequences: list[Sequence], changed: list[Sequence], layers: Callable[[], Iterable[InferenceLayer]]
    ) -> Draw:
        """Feeds each sequence's newest token and draws the next one; `changed` is not used."""
        newest = [sequence.tokens[-1] for sequence in sequences]
        assert PENDING not in newest, "a token must be known before it is fed"
        context, size = max(map(len, sequences)), self.kv.shape[4]
        num_columns = -(-context // size)
        blocks = [(row.blocks + [row.blocks[0]] * num_columns)[:num_columns] for row in sequences]
        numbers = torch.tensor([newest, [len(row) - 1 for row in sequences]])
        tokens, positions = send_to_device(numbers, self.kv.device)
        in_place = num_columns == 1 and all(row.blocks[0] == place for place, row in enumerate(sequences))
        batch = DecodeBatch(
            tokens=tokens,
            positions=positions,
            block_tables=send_to_device(torch.tensor(blocks), self.kv.device),
            context=context,
            is_identity=in_place,
        )
        return self.draw(sequences, self.model.forward(batch, self.kv, layers()))

    def draw(self, sequences: list[Sequence], logits: torch.Tensor) -> Draw:
        """Draws the next token of each sequence from `logits [S, V]` fp32."""
        drawn = self.choice(sequences, logits)
        return Draw(lambda: drawn)
