"""The selective scan of Mamba-1 against its recurrence in fp64, number by number, however sequences are cut."""

import math

import pytest
import torch

from hybrid_engine.ops.selective_scan import ScanInputs, ScanWeights, SelectiveScanOp
from tests.support.batches import decode_of, feed, prefill_of


def slow(inputs, weights, state=None):
    """Outputs `[n, I]` of one sequence and its last state, by the equations and no matrix product."""
    x, dt, b, c = (tensor.double() for tensor in inputs)
    num_channels, size = weights.a_log.shape
    state = [[0.0] * size for _ in range(num_channels)] if state is None else state.tolist()
    outputs = torch.zeros(len(x), num_channels, dtype=torch.float64)
    for t in range(len(x)):
        for i in range(num_channels):
            step = math.log1p(math.exp(float(dt[t, i]) + float(weights.dt_bias[i])))
            for s in range(size):
                decay = math.exp(-math.exp(float(weights.a_log[i, s])) * step)
                state[i][s] = decay * state[i][s] + step * float(x[t, i]) * float(b[t, s])
                outputs[t, i] += state[i][s] * float(c[t, s])
            outputs[t, i] += float(weights.skip[i]) * float(x[t, i])
    return outputs, torch.tensor(state)


def build(op, num_tokens, dtype=torch.float32):
    channels, size = op.state_shape
    inputs = ScanInputs(*(torch.randn(num_tokens, width).to(dtype) for width in (channels, channels, size, size)))
    return inputs, ScanWeights(torch.rand(channels, size).log(), torch.randn(channels), torch.randn(channels))


def test_literal_values():
    """Two tokens of one channel, worked out by hand: dt is 1 and 2, the decay 1/2 and 1/4.

    The first token's x is 3, B is (1, 2) and C is (1, 1): the state is (3, 6), the output 9 + 10 * 3 = 39. The second
    token's x is 1, B is (0, 1) and C is (4, 2): the state is (3/4, 7/2), the output 3 + 7 + 10 = 20.
    """
    op, slots = SelectiveScanOp(1, 2), torch.tensor([0])
    dt = torch.tensor([[math.log(math.expm1(1.0))], [math.log(math.expm1(2.0))]])
    b, c = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, 1.0], [4.0, 2.0]])
    inputs = ScanInputs(torch.tensor([[3.0], [1.0]]), dt, b, c)
    weights = ScanWeights(torch.full((1, 2), math.log(math.log(2.0))), torch.zeros(1), torch.tensor([10.0]))
    states = torch.full((1, 1, 2), torch.nan)
    outputs = op(inputs, weights, states, prefill_of([(0, 2)], slots))
    torch.testing.assert_close(outputs, torch.tensor([[39.0], [20.0]]), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(states.flatten(), torch.tensor([0.75, 3.5]), atol=1e-6, rtol=1e-6)


def test_pieces_of_sequences_equal_the_recurrence_in_fp64():
    torch.manual_seed(0)
    op = SelectiveScanOp(5, 3)
    built = [build(op, length) for length in (20, 2, 5)]
    weights = built[0][1]
    expected = [slow(inputs, weights) for inputs, _ in built]
    states = torch.full((6, *op.state_shape), torch.nan)

    def run(rows, batch):
        return op(ScanInputs(*rows.split((5, 5, 3, 3), 1)), weights, states, batch)

    for outputs in feed([torch.cat(inputs, 1) for inputs, _ in built], run):
        for output, (exact, _) in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output.double(), exact, atol=3e-6 * float(exact.abs().max()), rtol=1e-5)


def test_a_step_writes_its_rows_slots_and_no_others():
    torch.manual_seed(0)
    op, slots = SelectiveScanOp(5, 3), torch.tensor([4, 0, 2])
    inputs, weights = build(op, 3, torch.bfloat16)
    states = torch.randn(5, *op.state_shape)
    before = states.clone()
    output = op(inputs, weights, states, decode_of([7, 9, 1], slots))
    assert output.dtype == torch.bfloat16 and torch.equal(states[[1, 3]], before[[1, 3]])
    for row, slot in enumerate(slots.tolist()):
        exact, state = slow(inputs.part(slice(row, row + 1)), weights, before[slot])
        torch.testing.assert_close(output[row].double(), exact[0], atol=0.05 * float(exact.abs().max()), rtol=0)
        torch.testing.assert_close(states[slot].double(), state.double(), atol=0.03, rtol=0.02)


def test_tensors_that_do_not_fit_are_named():
    op = SelectiveScanOp(5, 3)
    inputs, weights = build(op, 1)
    states, batch = torch.zeros(1, *op.state_shape), decode_of([1], torch.tensor([0]))
    with pytest.raises(ValueError, match="dt"):
        op(inputs._replace(dt=inputs.dt[:, :3]), weights, states, batch)
    with pytest.raises(ValueError, match="states"):
        op(inputs, weights, states.half(), batch)
    with pytest.raises(ValueError, match="names no state slots"):
        op(inputs, weights, states, decode_of([1], None))
