"""The gated delta rule against its recurrence in fp64, token by token, however sequences are cut."""

import math
import shutil

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from hybrid_engine.ops import cpu_kernels, dispatch
from hybrid_engine.ops.gated_delta import DecayWeights, DeltaInputs, GatedDeltaOp
from tests.support.batches import decode_of, feed, prefill_of

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler cc")


def slow(op, inputs, weights, state=None):
    """Outputs `[n, V, Dv]` of one sequence and its last state, in fp64, by the equations of the paper and no matrix."""
    key_width, group = op.num_key_heads * op.key_dim, op.num_value_heads // op.num_key_heads
    mixed, a, b = (x.double() for x in inputs)
    state = torch.zeros(op.state_shape, dtype=torch.float64) if state is None else state.double()
    outputs = torch.zeros(len(mixed), op.num_value_heads, op.value_dim, dtype=torch.float64)
    for t in range(len(mixed)):
        for head in range(op.num_value_heads):
            key = slice(head // group * op.key_dim, (head // group + 1) * op.key_dim)
            q, k = mixed[t, :key_width][key], mixed[t, key_width : 2 * key_width][key]
            v = mixed[t, 2 * key_width :][head * op.value_dim : (head + 1) * op.value_dim]
            q, k = (x / math.sqrt(float(x @ x) + 1e-6) for x in (q, k))
            step = float(a[t, head] + weights.dt_bias[head].double())
            decay = math.exp(-math.exp(float(weights.a_log[head])) * math.log1p(math.exp(step)))
            beta = op.beta_scale / (1 + math.exp(-float(b[t, head])))
            forgets = torch.eye(op.key_dim, dtype=torch.float64) - beta * torch.outer(k, k)
            state[head] = decay * forgets @ state[head] + beta * torch.outer(k, v)
            outputs[t, head] = state[head].t() @ q / math.sqrt(op.key_dim)
    return outputs, state


def build(op, num_tokens, dtype=torch.float32):
    width = 2 * op.num_key_heads * op.key_dim + op.num_value_heads * op.value_dim
    inputs = [torch.randn(num_tokens, size).to(dtype) for size in (width, op.num_value_heads, op.num_value_heads)]
    weights = DecayWeights(torch.rand(op.num_value_heads).log(), torch.randn(op.num_value_heads))
    return DeltaInputs(*inputs), weights


def test_literal_values(way):
    """Two tokens of one head of two key and one value dimensions, worked out by hand.

    a_log and dt_bias make the decay 1/2, b makes beta 3/4. The first key is (0, 1), its value 4: the state becomes
    (0, 3). The second key is (3, 4) / 5, its value 1, and it recalls 3/2 * 4/5 = 6/5: the state becomes
    (0, 3/2) + (3, 4) / 5 * 3/4 * (1 - 6/5) = (-9, 138) / 100. The query (1, 0) reads the first, over sqrt(2).
    """
    op = GatedDeltaOp(1, 1, 2, 1)
    mixed = torch.tensor([[0.0, 2e3, 0.0, 1e3, 4.0], [7e3, 0.0, 3e3, 4e3, 1.0]])
    logits = torch.full((2, 1), math.log(3.0))
    weights = DecayWeights(torch.tensor([math.log(math.log(2.0))]), torch.tensor([math.log(math.e - 1)]))
    states = torch.zeros(1, 1, 2, 1)
    inputs, slots = DeltaInputs(mixed, torch.zeros(2, 1), logits), torch.tensor([0])
    outputs = op(inputs, weights, states, prefill_of([(0, 2)], slots))
    expected = torch.tensor([[3.0], [-0.09]]) / math.sqrt(2)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(states.flatten(), torch.tensor([-0.09, 1.38]), atol=1e-6, rtol=1e-6)
    op(inputs.part(slice(1)), weights, states, prefill_of([(0, 1)], slots))
    again = op(inputs.part(slice(1, None)), weights, states, decode_of([1], slots))
    torch.testing.assert_close(again, expected[1:], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(states.flatten(), torch.tensor([-0.09, 1.38]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("heads", "dims", "beta_scale"), [((1, 2), (16, 40), 1.0), ((2, 2), (5, 3), 2.0)])
def test_pieces_of_sequences_equal_the_recurrence_in_fp64(way, heads, dims, beta_scale):
    op = GatedDeltaOp(*heads, *dims, beta_scale)
    lengths = (70, 2, 5)
    built = [build(op, length) for length in lengths]
    weights = built[0][1]
    expected = [slow(op, inputs, weights) for inputs, _ in built]
    widths = [x.shape[1] for x in built[0][0]]
    states = torch.full((6, *op.state_shape), torch.nan)

    def run(rows, batch):
        return op(DeltaInputs(*rows.split(widths, 1)), weights, states, batch)

    for outputs in feed([torch.cat(inputs, 1) for inputs, _ in built], run):
        for output, (exact, _) in zip(outputs, expected, strict=True):
            tolerance = 2e-6 * float(exact.abs().max())
            torch.testing.assert_close(output.double(), exact.flatten(1), atol=tolerance, rtol=1e-5)
    torch.testing.assert_close(states[4].double(), expected[0][1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(16, 150), (5, 3)])
def test_compiled_bits_are_the_same_however_sequences_are_cut(compiled, dims, dtype):
    torch.manual_seed(0)
    op = GatedDeltaOp(1, 2, *dims)
    built = [build(op, length, dtype) for length in (30, 2, 5)]
    weights, widths = built[0][1], [x.shape[1] for x in built[0][0]]
    states, kept = torch.full((6, *op.state_shape), torch.nan), []

    def run(rows, batch):
        return op(DeltaInputs(*rows.split(widths, 1)), weights, states, batch)

    for outputs in feed([torch.cat(inputs, 1) for inputs, _ in built], run):
        kept.append([*outputs, states[[4, 1, 3]]])
    for cut in kept[1:]:
        assert all(map(torch.equal, cut, kept[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_writes_its_rows_slots_and_no_others(way, dtype):
    op, slots = GatedDeltaOp(2, 4, 16, 150), torch.tensor([4, 0, 2])
    inputs, weights = build(op, 3, dtype)
    inputs = DeltaInputs(*(x.t().contiguous().t() for x in inputs))  # by columns
    states = torch.randn(5, *op.state_shape)
    before = states.clone()
    output = op(inputs, weights, states, decode_of([7, 9, 1], slots))
    assert output.dtype == dtype
    assert torch.equal(states[[1, 3]], before[[1, 3]])
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    for row, slot in enumerate(slots.tolist()):
        exact, state = slow(op, inputs.part(slice(row, row + 1)), weights, before[slot])
        scale = tolerance * float(exact.abs().max())
        torch.testing.assert_close(output[row].double(), exact[0].flatten(), atol=scale, rtol=tolerance)
        torch.testing.assert_close(states[slot].double(), state, atol=tolerance, rtol=tolerance)


def test_in_bf16_it_rounds_where_transformers_rounds(way):
    op, num_tokens = GatedDeltaOp(2, 4, 16, 32), 70
    inputs, weights = build(op, num_tokens, torch.bfloat16)
    q, k, v = inputs.mixed.split((32, 32, 128), 1)
    decay = -weights.a_log.float().exp() * torch.nn.functional.softplus(inputs.a.float() + weights.dt_bias)
    expected, state = qwen.torch_chunk_gated_delta_rule(
        *(x.view(1, num_tokens, -1, dim) for x, dim in ((q, 16), (k, 16), (v, 32))),
        g=decay[None], beta=inputs.b.sigmoid()[None], output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    states = torch.zeros(1, *op.state_shape)
    output = op(inputs, weights, states, prefill_of([(0, num_tokens)], torch.tensor([0])))
    unit = 2**-6 if way == "kernel" and dispatch.IS_INTERPRETED else 2**-8  # the interpreter cuts bf16 off
    torch.testing.assert_close(output, expected[0].flatten(1), atol=unit * float(expected.abs().max()), rtol=unit)
    torch.testing.assert_close(states, state, atol=5e-2 if unit > 2**-8 else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 30.0])
def test_equal_keys_and_long_sequences_stay_exact(way, decay):
    """All keys of a sequence are equal, where powers of the system would overflow, or all is forgotten at once."""
    op = GatedDeltaOp(1, 1, 16, 8)
    num_tokens = 80 if way == "kernel" else 300
    inputs, weights = build(op, num_tokens)
    inputs.mixed[:, :32] = inputs.mixed[0, :32]
    inputs.b.fill_(9.0)
    inputs.a.fill_(decay)
    exact, state = slow(op, inputs, weights)
    states = torch.zeros(1, *op.state_shape)
    output = op(inputs, weights, states, prefill_of([(0, num_tokens)], torch.tensor([0])))
    torch.testing.assert_close(output.double(), exact.flatten(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[0].double(), state, atol=1e-5, rtol=1e-5)


def test_padding_after_a_prefill_gives_zeros_and_changes_no_state(way):
    op, batch = GatedDeltaOp(1, 2, 8, 8), prefill_of([(0, 3), (0, 2)], torch.tensor([0, 1]))
    inputs, weights = build(op, 9)
    states, again = torch.zeros(2, 2, *op.state_shape)
    padded = op(inputs, weights, states, batch)
    assert torch.equal(padded[:5], op(inputs.part(slice(5)), weights, again, batch))
    assert torch.equal(again, states) and not padded[5:].any()


@needs_compiler
def test_the_compiled_function_runs_where_it_can(monkeypatch):
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    called, call = [], cpu_kernels.call
    monkeypatch.setattr(cpu_kernels, "call", lambda name, *rest: (called.append(name), call(name, *rest)))
    op = GatedDeltaOp(1, 2, 8, 8)
    inputs, weights = build(op, 2)
    op(inputs, weights, torch.zeros(2, *op.state_shape), decode_of([1, 1], torch.tensor([1, 0])))
    assert called == ["delta_rule"]
    with pytest.raises(ValueError, match="its slot does not exist"):
        op(inputs, weights, torch.zeros(2, *op.state_shape), decode_of([1, 1], torch.tensor([-1, 0])))


def test_bad_input_is_named(way):
    op, batch = GatedDeltaOp(1, 2, 8, 8), decode_of([1], torch.tensor([0]))
    inputs, weights = build(op, 1)
    states = torch.zeros(1, *op.state_shape)
    for bad, message in [
        ((inputs._replace(mixed=inputs.mixed[:, 1:]), weights, states), r"mixed has shape \[1, 31\]; expected"),
        ((inputs._replace(a=inputs.a[:, :1]), weights, states), r"a has shape \[1, 1\]; expected \[1, 2\]"),
        ((inputs, weights._replace(a_log=torch.zeros(3)), states), r"a_log has shape \[3\]; expected \[2\]"),
        ((inputs, weights, states.bfloat16()), "states is torch.bfloat16; expected torch.float32"),
        ((inputs, weights, states[:, :, :4]), r"states has shape \[1, 2, 4, 8\]; expected \[any, 2, 8, 8\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            op(*bad, batch)
    with pytest.raises(ValueError, match="num_value_heads=3 must be a multiple of num_key_heads=2"):
        GatedDeltaOp(2, 3, 8, 8)
