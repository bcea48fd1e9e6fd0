"""The state space of Mamba-2 against its recurrence in fp64, token by token, however sequences are cut."""

import math

import pytest
import torch

from hybrid_engine.ops.state_space import SpaceWeights, StateSpaceOp
from tests.support.batches import decode_of, feed, prefill_of


def slow(op, mixed, dt, weights, state=None):
    """Outputs `[n, H, P]` of one sequence and its last state, in fp64, by the equations and no matrix product."""
    mixed, dt = mixed.double(), dt.double()
    inner, group = op.num_heads * op.head_dim, op.num_heads // op.num_groups
    state = torch.zeros(op.state_shape, dtype=torch.float64) if state is None else state.double().clone()
    outputs = torch.zeros(len(mixed), op.num_heads, op.head_dim, dtype=torch.float64)
    for t in range(len(mixed)):
        for head in range(op.num_heads):
            x = mixed[t, head * op.head_dim : (head + 1) * op.head_dim]
            first = inner + head // group * op.state_size
            b = mixed[t, first : first + op.state_size]
            first += op.num_groups * op.state_size
            c = mixed[t, first : first + op.state_size]
            step = math.log1p(math.exp(float(dt[t, head] + weights.dt_bias[head].double())))
            step = min(max(step, op.dt_limits[0]), op.dt_limits[1])
            decay = math.exp(-math.exp(float(weights.a_log[head])) * step)
            state[head] = decay * state[head] + step * torch.outer(x, b)
            outputs[t, head] = state[head] @ c + float(weights.skip[head]) * x
    return outputs, state


def build(op, num_tokens, dtype=torch.float32):
    mixed, dt = torch.randn(num_tokens, sum(op.widths)).to(dtype), torch.randn(num_tokens, op.num_heads).to(dtype)
    weights = SpaceWeights(torch.rand(op.num_heads).log(), torch.randn(op.num_heads), torch.randn(op.num_heads))
    return mixed, dt, weights


def test_literal_values(way):
    """Two tokens of one head, worked out by hand: dt is 1 and 2, the decay 1/2 and 1/4.

    The first token's x is 3, B is (1, 2) and C is (1, 1): the state is (3, 6), the output 9 + 10 * 3 = 39. The second
    token's x is 1, B is (0, 1) and C is (4, 2): the state is (3/4, 7/2), the output 3 + 7 + 10 = 20.
    """
    op = StateSpaceOp(1, 1, 1, 2)
    mixed = torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0], [1.0, 0.0, 1.0, 4.0, 2.0]])
    dt = torch.tensor([[math.log(math.expm1(1.0))], [math.log(math.expm1(2.0))]])
    weights = SpaceWeights(torch.tensor([math.log(math.log(2.0))]), torch.zeros(1), torch.tensor([10.0]))
    states, slots = torch.full((1, 1, 1, 2), torch.nan), torch.tensor([0])
    outputs = op(mixed, dt, weights, states, prefill_of([(0, 2)], slots))
    torch.testing.assert_close(outputs, torch.tensor([[39.0], [20.0]]), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(states.flatten(), torch.tensor([0.75, 3.5]), atol=1e-6, rtol=1e-6)
    op(mixed[:1], dt[:1], weights, states, prefill_of([(0, 1)], slots))
    again = op(mixed[1:], dt[1:], weights, states, decode_of([1], slots))
    torch.testing.assert_close(again, outputs[1:], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    "op",
    [StateSpaceOp(4, 8, 2, 16), StateSpaceOp(1, 5, 1, 3), StateSpaceOp(6, 4, 1, 32, (0.1, 0.7))],
    ids=["groups", "one head", "limits"],
)
def test_pieces_of_sequences_equal_the_recurrence_in_fp64(way, op):
    built = [build(op, length) for length in (70, 2, 5)]
    weights = built[0][2]
    expected = [slow(op, mixed, dt, weights) for mixed, dt, _ in built]
    states = torch.full((6, *op.state_shape), torch.nan)

    def run(rows, batch):
        return op(rows[:, : -op.num_heads], rows[:, -op.num_heads :], weights, states, batch)

    for outputs in feed([torch.cat(tensors[:2], 1) for tensors in built], run):
        for output, (exact, _) in zip(outputs, expected, strict=True):
            tolerance = 3e-6 * float(exact.abs().max())
            torch.testing.assert_close(output.double(), exact.flatten(1), atol=tolerance, rtol=1e-5)
    torch.testing.assert_close(states[4].double(), expected[0][1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [StateSpaceOp(2, 24, 1, 150), StateSpaceOp(2, 3, 2, 5)], ids=["wide", "narrow"])
def test_compiled_bits_are_the_same_however_sequences_are_cut(compiled, op, dtype):
    torch.manual_seed(0)
    built = [build(op, length, dtype) for length in (30, 2, 5)]
    states, kept = torch.zeros(6, *op.state_shape), []

    def run(rows, batch):
        return op(rows[:, : -op.num_heads], rows[:, -op.num_heads :], built[0][2], states, batch)

    for outputs in feed([torch.cat(tensors[:2], 1) for tensors in built], run):
        kept.append([*outputs, states[[4, 1, 3]]])
    for cut in kept[1:]:
        assert all(map(torch.equal, cut, kept[0]))


def test_a_step_writes_its_rows_slots_and_no_others(way):
    op, slots = StateSpaceOp(4, 8, 2, 16), torch.tensor([4, 0, 2])
    mixed, dt, weights = build(op, 3, torch.bfloat16)
    states = torch.randn(5, *op.state_shape)
    before = states.clone()
    output = op(mixed.t().contiguous().t(), dt, weights, states, decode_of([7, 9, 1], slots))
    assert output.dtype == torch.bfloat16 and torch.equal(states[[1, 3]], before[[1, 3]])
    for row, slot in enumerate(slots.tolist()):
        exact, state = slow(op, mixed[row : row + 1], dt[row : row + 1], weights, before[slot])
        torch.testing.assert_close(
            output[row].double(), exact[0].flatten(), atol=0.02 * float(exact.abs().max()), rtol=0
        )
        torch.testing.assert_close(states[slot].double(), state, atol=0.03, rtol=0.02)


def test_tensors_that_do_not_fit_are_named(way):
    op = StateSpaceOp(4, 8, 2, 16)
    mixed, dt, weights = build(op, 1)
    states = torch.zeros(1, *op.state_shape)
    batch = decode_of([1], torch.tensor([0]))
    with pytest.raises(ValueError, match="dt"):
        op(mixed, dt[:, :3], weights, states, batch)
    with pytest.raises(ValueError, match="states"):
        op(mixed, dt, weights, states.half(), batch)
    with pytest.raises(ValueError, match="names no state slots"):
        op(mixed, dt, weights, states, decode_of([1], None))
    with pytest.raises(ValueError, match="num_heads=3 must be a multiple of num_groups=2"):
        StateSpaceOp(3, 8, 2, 16)
