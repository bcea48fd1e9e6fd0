"""Mixture-of-experts ops: references against transformers' own blocks, kernels against the references."""

import itertools

import pytest
import torch

from hybrid_engine.containers.moe import MoEBlock
from hybrid_engine.ops.dispatch import IS_INTERPRETED
from hybrid_engine.ops.expert_gemm import ExpertGemmOp, max_tiles
from hybrid_engine.ops.expert_sum import ExpertSumOp
from hybrid_engine.ops.moe_gating import ExpertGroups, ExpertRouting, MoEGatingOp
from hybrid_engine.ops.moe_res_matmul import MoEResMatmulOp
from tests.support.models_moe import FAMILIES, build_block, run_block

pytestmark = pytest.mark.long

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMULAS = [
    ("softmax_then_topk", True), ("softmax_then_topk", False), ("topk_then_softmax", True), ("sigmoid_then_topk", True),
]  # fmt: skip
FORMS = {  # layout, activation, biases
    "mixtral": ("halves", "silu", False),
    "gpt-oss": ("interleaved", "clamped_swiglu", True),
    "megatron": ("plain", "gelu_new", True),
    "gelu-gated": ("halves", "gelu", True),
    "relu": ("plain", "relu", False),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned(monkeypatch):
    """torch.empty gives NaN, or the most negative integer."""
    empty = torch.empty

    def poison(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

    monkeypatch.setattr(torch, "empty", poison)


def error(actual, expected):
    return float((actual.double() - expected.double()).abs().max())


def assert_within_own_error(kernel, reference, exact):
    """The kernel is as near to fp64 as the reference is in that dtype, up to a small factor."""
    assert kernel.dtype == reference.dtype
    assert kernel.shape == reference.shape
    # The interpreter cuts bf16 off where the hardware rounds: errors of one sign, which add up over five roundings.
    factor = 16 if IS_INTERPRETED and reference.dtype == torch.bfloat16 else 3
    bound = factor * error(reference, exact) + 1e-6 * float(exact.abs().max())
    assert error(kernel, exact) <= bound


def naive_routing(logits, top_k, scoring, normalizes, bias=None, groups=None):
    """Row after row in Python: the experts by score, the lower of two equal ones first."""
    weights, experts = [], []
    for row in logits.double().tolist():
        scores = torch.tensor(row, dtype=torch.float64)
        scores = scores.softmax(0) if scoring == "softmax_then_topk" else scores
        scores = 1 / (1 + (-scores).exp()) if scoring == "sigmoid_then_topk" else scores
        choice = [float(scores[x]) + (0.0 if bias is None else float(bias[x])) for x in range(len(row))]
        is_open = [True] * len(row)
        if groups is not None:
            size = len(row) // groups.num_groups
            values = [
                sum(sorted(choice[g * size : (g + 1) * size])[-groups.num_best :]) for g in range(groups.num_groups)
            ]
            open_groups = sorted(range(len(values)), key=lambda g: (-values[g], g))[: groups.num_open]
            is_open = [x // size in open_groups for x in range(len(row))]
        best = sorted(filter(is_open.__getitem__, range(len(row))), key=lambda x: (-choice[x], x))[:top_k]
        chosen = scores[best]
        if scoring == "topk_then_softmax":
            chosen = chosen.softmax(0)
        elif normalizes:
            chosen = chosen / chosen.sum()
        weights.append(chosen)
        experts.append(best)
    return torch.stack(weights), torch.tensor(experts)


def check_order(routing, num_experts):
    flat = routing.experts.flatten().tolist()
    assert routing.order.tolist() == sorted(range(len(flat)), key=lambda pair: (flat[pair], pair))
    assert routing.offsets.tolist() == [sum(x < e for x in flat) for e in range(num_experts + 1)]


@pytest.mark.parametrize("way", ["reference", "kernel"])
@pytest.mark.parametrize("scoring,normalizes", FORMULAS)
@pytest.mark.parametrize("num_tokens,num_experts,top_k", [(1, 4, 1), (63, 5, 3), (100, 8, 2), (7, 60, 4), (3, 4, 4)])
def test_gating_equals_a_python_loop(kernels, poisoned, way, scoring, normalizes, num_tokens, num_experts, top_k):
    op = MoEGatingOp(num_experts, top_k, scoring, normalizes)
    logits = torch.randn(2 * num_tokens, num_experts, 2, device=kernels)[::2, :, 1]
    routing = op(logits) if way == "kernel" else op.reference(logits)
    weights, experts = naive_routing(logits.cpu(), top_k, scoring, normalizes)
    assert torch.equal(routing.experts.cpu(), experts)
    torch.testing.assert_close(routing.weights.cpu().double(), weights, atol=1e-6, rtol=1e-6)
    check_order(routing, num_experts)


GROUPINGS = {  # experts, top_k, groups, whether a bias chooses
    "a bias": (9, 3, None, True),
    "groups of two best": (24, 4, ExpertGroups(6, 3, 2), False),
    "groups of one best": (20, 3, ExpertGroups(4, 2, 1), False),
    "groups and a bias": (32, 8, ExpertGroups(8, 4, 2), True),
    "all groups are open": (8, 2, ExpertGroups(2, 2, 2), True),
}


@pytest.mark.parametrize("way", ["reference", "kernel"])
@pytest.mark.parametrize("scoring", ["softmax_then_topk", "sigmoid_then_topk"])
@pytest.mark.parametrize("name", GROUPINGS)
def test_choice_by_groups_and_a_bias_equals_a_python_loop(kernels, poisoned, way, scoring, name):
    num_experts, top_k, groups, has_bias = GROUPINGS[name]
    op = MoEGatingOp(num_experts, top_k, scoring, groups=groups, factor=2.5)
    logits = torch.randn(37, num_experts, device=kernels)
    bias = torch.randn(2 * num_experts, device=kernels)[::2] / 4 if has_bias else None
    routing = op(logits, bias) if way == "kernel" else op.reference(logits, bias)
    weights, experts = naive_routing(logits.cpu(), top_k, scoring, True, bias, groups)
    assert torch.equal(routing.experts.cpu(), experts)
    torch.testing.assert_close(routing.weights.cpu().double(), 2.5 * weights, atol=1e-6, rtol=1e-6)
    check_order(routing, num_experts)
    plain, _ = naive_routing(logits.cpu(), top_k, scoring, True)
    assert name == "all groups are open" or not torch.allclose(2.5 * plain, 2.5 * weights)


def test_equal_groups_are_opened_from_the_first_one_on(kernels):
    op = MoEGatingOp(8, 4, "sigmoid_then_topk", groups=ExpertGroups(4, 2, 2))
    for routing in (op(torch.zeros(3, 8, device=kernels)), op.reference(torch.zeros(3, 8, device=kernels))):
        assert routing.experts.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about the row of NaN
@pytest.mark.parametrize("scoring", ["softmax_then_topk", "topk_then_softmax"])
def test_equal_scores_go_to_the_lower_expert_and_no_expert_is_chosen_twice(kernels, scoring):
    op = MoEGatingOp(6, 4, scoring)
    logits = torch.tensor([[0.0] * 6, [1, 2, 1, 2, 1, 2], [-0.0, 0.0, -0.0, 0, 9, 0], [torch.nan] * 6], device=kernels)
    for routing in (op(logits), op.reference(logits)):
        assert routing.experts[:3].tolist() == [[0, 1, 2, 3], [1, 3, 5, 0], [4, 0, 1, 2]]
        assert sorted(set(routing.experts[3].tolist())) == sorted(routing.experts[3].tolist())
        check_order(routing, 6)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("fp32_weights", [True, False])
def test_gating_kernel_rounds_weights_where_the_reference_does(kernels, dtype, fp32_weights):
    op = MoEGatingOp(8, 2, fp32_weights=fp32_weights)
    logits = torch.randn(33, 8, device=kernels, dtype=dtype)
    routing, reference, exact = op(logits), op.reference(logits), op.reference(logits.double())
    assert torch.equal(routing.experts, reference.experts)
    assert routing.weights.dtype == (torch.float32 if fp32_weights else dtype)
    assert_within_own_error(routing.weights, reference.weights, exact.weights)


def expert_tensors(form, num_experts, hidden, size, device, storage="[out, in]"):
    layout, _, has_bias = FORMS[form]
    columns = size if layout == "plain" else 2 * size

    def weight(rows, cols):
        if storage == "[out, in]":
            return (torch.randn(num_experts, cols, rows, device=device) / rows**0.5).transpose(1, 2)
        if storage == "[in, out]":
            return torch.randn(num_experts, rows, cols, device=device) / rows**0.5
        return (torch.randn(num_experts, 2 * rows, 2 * cols, device=device) / rows**0.5)[:, ::2, ::2]

    up, down = weight(hidden, columns), weight(size, hidden)
    if not has_bias:
        return [up, None, down, None]
    return [up, torch.randn(num_experts, columns, device=device), down, torch.randn(num_experts, hidden, device=device)]


def cast(tensors, dtype):
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def check_expert_gemm(form, num_tokens, top_k, dtype, device, storage="[out, in]", num_experts=5, hidden=40, size=24):
    op = ExpertGemmOp(FORMS[form][1], FORMS[form][0], limit=1.0)
    tensors = cast(expert_tensors(form, num_experts, hidden, size, device, storage), dtype)
    routing = MoEGatingOp(num_experts, top_k).reference(torch.randn(num_tokens, num_experts, device=device))
    input = torch.randn(2 * num_tokens, hidden, device=device, dtype=dtype)[::2]
    routing = routing._replace(weights=routing.weights.to(dtype))
    double = routing._replace(weights=routing.weights.double())
    exact = op.reference(input.double(), double, *cast(tensors, torch.float64))
    assert_within_own_error(op(input, routing, *tensors), op.reference(input, routing, *tensors), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_expert_gemm_kernel_equals_the_reference_to_its_own_error(kernels, poisoned, form, dtype):
    check_expert_gemm(form, 23, 2, dtype, kernels)


@pytest.mark.parametrize("num_tokens,top_k", [(1, 1), (1, 4), (63, 3), (100, 1)])
def test_expert_gemm_kernel_takes_any_number_of_tokens(kernels, poisoned, num_tokens, top_k):
    check_expert_gemm("mixtral", num_tokens, top_k, torch.float32, kernels)


@pytest.mark.parametrize("storage", ["[in, out]", "strided"])
@pytest.mark.parametrize("form", ["gpt-oss", "gelu-gated"])
def test_expert_gemm_kernel_takes_any_strides(kernels, form, storage):
    check_expert_gemm(form, 9, 2, torch.float32, kernels, storage, num_experts=3, hidden=71, size=70)


def test_expert_gemm_runs_when_all_tokens_choose_one_expert(kernels, poisoned):
    tensors = expert_tensors("mixtral", 4, 16, 8, kernels)
    op, input = ExpertGemmOp("silu"), torch.randn(50, 16, device=kernels)
    logits = torch.tensor([0.0, 0.0, 5.0, 0.0], device=kernels).expand(50, 4)
    routing = MoEGatingOp(4, 1)(logits)
    assert routing.offsets.tolist() == [0, 0, 0, 50, 50]
    gate, up = (input @ tensors[0][2]).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ tensors[2][2]
    torch.testing.assert_close(op(input, routing, *tensors)[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_no_token_gives_empty_outputs(kernels):
    tensors = expert_tensors("mixtral", 4, 16, 8, kernels)
    routing = MoEGatingOp(4, 2)(torch.empty(0, 4, device=kernels))
    assert routing.offsets.tolist() == [0] * 5
    outputs = ExpertGemmOp("silu")(torch.empty(0, 16, device=kernels), routing, *tensors)
    assert outputs.shape == (0, 2, 16)
    assert ExpertSumOp()(outputs, outputs.dtype).shape == (0, 16)


def test_there_are_as_many_tiles_as_the_worst_spread_of_pairs_needs():
    needed = {}
    for counts in itertools.product(range(10), repeat=3):
        tiles = sum(-(-count // 4) for count in counts)
        needed[sum(counts)] = max(tiles, needed.get(sum(counts), 0))
    for num_pairs in range(1, 10):
        assert max_tiles(num_pairs, 3, 4) == needed[num_pairs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize(
    "others", [(), ("shared",), ("shared", "shared_logit"), ("shared", "shared_logit", "residual")]
)
def test_expert_sum_kernel_equals_the_reference_to_its_own_error(kernels, poisoned, dtype, top_k, others):
    outputs = torch.randn(17, top_k, 100, device=kernels, dtype=dtype)
    sides = {
        name: torch.randn(17, 1 if name == "shared_logit" else 100, device=kernels, dtype=dtype) for name in others
    }
    op = ExpertSumOp()
    exact = op.reference(outputs.double(), torch.float64, **{name: side.double() for name, side in sides.items()})
    kernel, reference = op(outputs, dtype, **sides), op.reference(outputs, dtype, **sides)
    assert_within_own_error(kernel, reference, exact)
    assert_within_own_error(op(outputs.float(), dtype, **sides), op.reference(outputs.float(), dtype, **sides), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", [(1, 1), (63, 100), (3, 1500)])
def test_residual_experts_are_mixed_by_their_coefficients(kernels, poisoned, dtype, rows, width):
    residual, output = torch.randn(2, rows, width, device=kernels).to(dtype)
    coef = torch.randn(rows, 2, device=kernels).softmax(-1).to(dtype)
    exact = torch.stack([
        residual[n].double() * coef[n, 0].double() + output[n].double() * coef[n, 1].double() for n in range(rows)
    ])  # fmt: skip
    op = MoEResMatmulOp()
    assert_within_own_error(op(residual, coef, output), op.reference(residual, coef, output), exact)


@pytest.mark.parametrize("way", ["reference", "kernel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_equals_the_row_in_a_batch(kernels, monkeypatch, family, way):
    if way == "reference":
        monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "1")
    layer, config, policy = build_block(family)
    block = MoEBlock(policy, layer.to(kernels), config, "layer 0")
    block.bind()
    hidden = torch.randn(21, config.hidden_size, device=kernels)
    together = block.forward(hidden)
    # A library's product of one row may add up in another order than that of many: a few units of fp32's rounding.
    rounding = 16 * torch.finfo(torch.float32).eps * float(together.abs().max()) if way == "reference" else 1e-6
    for row in (0, 20):
        torch.testing.assert_close(block.forward(hidden[row : row + 1])[0], together[row], atol=rounding, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_block_on_kernels_equals_transformers_own(kernels, family):
    layer, config, policy = build_block(family)
    block = MoEBlock(policy, layer.to(kernels), config, "layer 0")
    block.bind()
    hidden = torch.randn(21, config.hidden_size, device=kernels)
    expected = run_block(layer, hidden)
    torch.testing.assert_close(block.forward(hidden), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


def test_bad_input_is_named_before_a_launch(kernels):
    gating = MoEGatingOp(4, 2)
    with pytest.raises(ValueError, match=r"router logits has shape \[3, 5\]; expected \[any, 4\]"):
        gating(torch.randn(3, 5, device=kernels))
    for arguments, message in [((4, 5), "top_k=5 must be from 1 to num_experts=4"), ((4, 0), "top_k=0")]:
        with pytest.raises(ValueError, match=message):
            MoEGatingOp(*arguments)
    for groups, message in [
        (ExpertGroups(3, 1, 1), "num_groups=3 must divide num_experts=4"),
        (ExpertGroups(2, 1, 3), "num_best=3 must be from 1 to the 2 experts of a group"),
        (ExpertGroups(4, 1, 1), "num_open=1 must be from 1 to num_groups=4, with top_k=2 experts"),
    ]:
        with pytest.raises(ValueError, match=message):
            MoEGatingOp(4, 2, groups=groups)
    with pytest.raises(ValueError, match=r"bias of the choice has shape \[3\]; expected \[4\]"):
        gating(torch.randn(3, 4, device=kernels), torch.randn(3, device=kernels))
    with pytest.raises(ValueError, match="scoring='sigmoid' must be one of softmax_then_topk"):
        MoEGatingOp(4, 2, "sigmoid")
    with pytest.raises(ValueError, match="layout='columns' must be one of plain"):
        ExpertGemmOp("silu", "columns")
    with pytest.raises(ValueError, match="activation='tanh' must be one of silu"):
        ExpertGemmOp("tanh")
    with pytest.raises(ValueError, match="needs a gate"):
        ExpertGemmOp("clamped_swiglu", "plain")
    up, _, down, _ = expert_tensors("mixtral", 4, 16, 8, kernels)
    routing, input, op = (
        gating(torch.randn(3, 4, device=kernels)),
        torch.randn(3, 16, device=kernels),
        ExpertGemmOp("silu"),
    )
    for arguments, message in [
        ((input, routing, up[:, :, 1:], None, down, None), r"up has shape \[4, 16, 15\]; expected \[4, 16, 16\]"),
        ((input, routing, up, None, down[:3], None), r"down has shape \[3, 8, 16\]; expected \[4, any, 16\]"),
        ((input, routing, up, None, down.half(), None), r"down is torch.float16; expected torch.float32"),
        ((input, routing, up, up[0], down, None), r"up_bias has shape \[16, 16\]; expected \[4, 16\]"),
        ((input[:2], routing, up, None, down, None), r"routing weights has shape \[3, 2\]; expected \[2, any\]"),
        ((input.half(), routing._replace(weights=routing.weights.bfloat16()), up.half(), None, down.half(), None),
         "routing weights are torch.bfloat16; expected torch.float16 or torch.float32"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            op(*arguments)
    with pytest.raises(ValueError, match="shared_logit weighs a shared expert"):
        ExpertSumOp()(torch.randn(3, 2, 8), torch.float32, shared_logit=torch.randn(3, 1))
    with pytest.raises(ValueError, match=r"residual has shape \[2, 8\]; expected \[3, 8\]"):
        ExpertSumOp()(torch.randn(3, 2, 8), torch.float32, residual=torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"coef has shape \[3, 1\]; expected \[3, 2\]"):
        MoEResMatmulOp()(torch.randn(3, 8), torch.randn(3, 1), torch.randn(3, 8))


def test_more_experts_than_the_kernel_takes_run_on_the_reference_and_say_so(kernels, caplog):
    routing = MoEGatingOp(1500, 2)(torch.randn(2, 1500, device=kernels))
    assert isinstance(routing, ExpertRouting)
    assert "1500 experts" in caplog.text
