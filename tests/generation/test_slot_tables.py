"""What the host sends before a decode step: the cells that changed, so that the device's tables equal their image."""

import random

import torch

from hybrid_engine.generation import decode
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.decode import SlotTables
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.scheduler import Scheduler

FORTY = GenerationOptions(max_new_tokens=40)
SLOTS, COLUMNS, BLOCK = 256, 20, 64


def running(count, tables, num_tokens=100):
    """Sequences that run in slots of their own, their tables sent."""
    blocks_each = -(-num_tokens // BLOCK)
    rows = []
    for slot in range(count):
        blocks = [slot * COLUMNS + i for i in range(blocks_each)]
        rows.append(Sequence(Prompt([1] * (num_tokens - 1)), slot, FORTY, 7 * slot, [2], blocks=blocks, slot=slot))
    tables.send(rows, rows)
    return rows


def build_tables():
    return SlotTables(SLOTS, COLUMNS, trash_block=SLOTS * COLUMNS, vocab=9, device=torch.device("cpu"))


def record_sends(monkeypatch):
    """Numbers sent by each copy from now on."""
    sent, send = [], decode.send_to_device
    monkeypatch.setattr(
        decode, "send_to_device", lambda values, device: (sent.append(values.numel()), send(values, device))[1]
    )
    return sent


def test_a_turn_sends_the_cells_that_changed_and_nothing_else(monkeypatch):
    tables = build_tables()
    rows = running(SLOTS, tables)
    sent = record_sends(monkeypatch)
    tables.send(rows, [])
    assert sent == [], "nothing changed"
    rows[3].blocks.append(5000)
    tables.send(rows, [rows[3]])
    assert sent == [2 * (6 + COLUMNS)], "one slot, each cell with its place"
    assert tables.blocks[3, : len(rows[3].blocks)].tolist() == rows[3].blocks
    tables.send(rows[:-1], [])
    assert sent[1:] == [2 * SLOTS], "which rows decode"
    assert tables.rows.tolist() == [*range(SLOTS - 1), SLOTS], "the last one is nobody's"


def test_a_cleared_table_is_restored_by_its_rows_alone():
    tables = build_tables()
    running(8, tables)
    before = tables._on_device.clone()
    with tables.cleared():
        assert set(tables.rows.tolist()) == {SLOTS}
    assert torch.equal(tables._on_device, before)


def test_after_every_turn_of_a_rollout_the_device_holds_what_the_sequences_say():
    rng = random.Random(0)
    sequences = [Sequence(Prompt([1] * rng.randint(1, 30)), row, FORTY, key=rng.getrandbits(60)) for row in range(40)]
    lengths = [rng.randint(1, 40) for _ in sequences]
    scheduler = Scheduler(sequences, max_running=8, num_blocks=40, block_size=8, max_prefill_tokens=64)
    tables = SlotTables(8, 10, trash_block=40, vocab=9, device=torch.device("cpu"))

    def draw(rows):
        for row in rows:
            row.tokens.append(0)
            if len(row.tokens) == lengths[row.row]:
                scheduler.finish(row, "stop")

    while scheduler.has_work:
        admission = scheduler.admit()
        draw(admission.sequences)
        if admission.prefills:
            continue
        scheduler.grow()
        rows = scheduler.rows
        if not rows:
            continue
        tables.send(rows, scheduler.take_changed())
        slots = [row.slot for row in rows]
        assert tables.rows[: len(rows)].tolist() == slots
        expected = [[len(row) - 1 for row in rows], [len(row.tokens) for row in rows], [row.key for row in rows]]
        assert tables.numbers[:3, slots].tolist() == expected
        assert tables.numbers[3].tolist() == [1] * 8 + [0]
        for row in rows:
            assert tables.blocks[row.slot, : len(row.blocks)].tolist() == row.blocks
        assert tables.longest() == max(map(len, rows))
        tables.numbers[:2, slots] += 1  # the step's own doing
        tables.advance()
        draw(rows)
    assert scheduler.num_preemptions > 0
