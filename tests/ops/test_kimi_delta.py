"""Kimi's delta rule against its recurrence in fp64, head by head, however sequences are cut."""

import math

import pytest
import torch

from hybrid_engine.ops.kimi_delta import KimiDecay, KimiDeltaOp, KimiInputs
from tests.support.batches import decode_of, feed, prefill_of


def slow(op, inputs, weights, state=None):
    """Outputs `[n, H D]` of one sequence and its last state, by the equations, a channel at a time."""
    mixed, f, b = (tensor.double() for tensor in inputs)
    heads, dim = op.num_heads, op.head_dim
    state = torch.zeros(op.state_shape, dtype=torch.float64) if state is None else state.double().clone()
    outputs = torch.zeros(len(mixed), heads * dim, dtype=torch.float64)
    for t in range(len(mixed)):
        for head in range(heads):
            here = slice(head * dim, (head + 1) * dim)
            q, k, v = (part[here] for part in mixed[t].chunk(3))
            q, k = (x / math.sqrt(float(x @ x) + 1e-6) for x in (q, k))
            beta = 1 / (1 + math.exp(-float(b[t, head])))
            for channel in range(dim):
                place = head * dim + channel
                rate = math.log1p(math.exp(float(f[t, place]) + float(weights.dt_bias[place])))
                state[head, channel] *= math.exp(-math.exp(float(weights.a_log[head])) * rate)
            state[head] += torch.outer(k, beta * (v - k @ state[head]))
            outputs[t, here] = q @ state[head] / math.sqrt(dim)
    return outputs, state


def build(op, num_tokens, dtype=torch.float32):
    width = op.num_heads * op.head_dim
    inputs = KimiInputs(*(torch.randn(num_tokens, size).to(dtype) for size in (3 * width, width, op.num_heads)))
    return inputs, KimiDecay(torch.rand(op.num_heads).log(), torch.randn(width))


def test_literal_values():
    """Two tokens of one head of one number, worked out by hand: q and k are 1, beta is 1/2, the decay 1/2.

    The first value is 4: the state and the output are 2. The second is 3: of the state 1 is left, and 1 + (3 - 1) / 2
    is 2 again.
    """
    op, slots = KimiDeltaOp(1, 1), torch.tensor([0])
    inputs = KimiInputs(torch.tensor([[9.0, 9.0, 4.0], [9.0, 9.0, 3.0]]), torch.zeros(2, 1), torch.zeros(2, 1))
    weights, states = KimiDecay(torch.zeros(1), torch.zeros(1)), torch.full((1, 1, 1, 1), torch.nan)
    outputs = op(inputs, weights, states, prefill_of([(0, 2)], slots))
    torch.testing.assert_close(outputs, torch.full((2, 1), 2.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(states.flatten(), torch.tensor([2.0]), atol=1e-5, rtol=0)


def test_pieces_of_sequences_equal_the_recurrence_in_fp64():
    torch.manual_seed(0)
    op = KimiDeltaOp(2, 5)
    built = [build(op, length) for length in (20, 2, 5)]
    weights = built[0][1]
    expected = [slow(op, inputs, weights) for inputs, _ in built]
    states = torch.full((6, *op.state_shape), torch.nan)

    def run(rows, batch):
        return op(KimiInputs(*rows.split((30, 10, 2), 1)), weights, states, batch)

    for outputs in feed([torch.cat(inputs, 1) for inputs, _ in built], run):
        for output, (exact, _) in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output.double(), exact, atol=3e-6 * float(exact.abs().max()), rtol=1e-5)


def test_a_step_writes_its_rows_slots_and_no_others():
    torch.manual_seed(0)
    op, slots = KimiDeltaOp(2, 5), torch.tensor([4, 0, 2])
    inputs, weights = build(op, 3)
    states = torch.randn(5, *op.state_shape)
    before = states.clone()
    output = op(inputs, weights, states, decode_of([7, 9, 1], slots))
    assert torch.equal(states[[1, 3]], before[[1, 3]])
    for row, slot in enumerate(slots.tolist()):
        exact, state = slow(op, inputs.part(slice(row, row + 1)), weights, before[slot])
        torch.testing.assert_close(output[row].double(), exact[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[slot].double(), state, atol=1e-5, rtol=1e-5)


def test_tensors_that_do_not_fit_are_named():
    op = KimiDeltaOp(2, 5)
    inputs, weights = build(op, 1)
    states, batch = torch.zeros(1, *op.state_shape), decode_of([1], torch.tensor([0]))
    with pytest.raises(ValueError, match="f has shape"):
        op(inputs._replace(f=inputs.f[:, :3]), weights, states, batch)
    with pytest.raises(ValueError, match="states"):
        op(inputs, weights, states.half(), batch)
    with pytest.raises(ValueError, match="names no state slots"):
        op(inputs, weights, states, decode_of([1], None))
