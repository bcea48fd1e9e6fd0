"""Annotations of ops: what they say, and that every split that the library claims gives what the whole op gives."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from hybrid_engine.extensions.parallelize.graph.annotations import parse
from hybrid_engine.extensions.parallelize.graph.library import view_texts
from hybrid_engine.extensions.parallelize.graph.register_op import register_op, verify_op

pytestmark = pytest.mark.quick

aten = torch.ops.aten


def test_an_annotation_says_where_operands_results_and_gradients_lie():
    product = parse("m k+, n k+, n + -> m n", [2, 2, 1])
    assert product.candidates == ("m", "k", "n")
    assert product.input_placements("m") == (Shard(0), Replicate(), Replicate())
    assert product.gradient_placements("m") == (Shard(0), Partial(), Partial())
    assert product.output_placements("n") == (Shard(1),)
    assert product.input_placements("k") == (Shard(1), Shard(1), Partial())
    assert product.output_placements("k") == (Partial(),)
    assert product.gradient_placements("k") == (Shard(1), Shard(1), Replicate())


def test_fused_dimensions_are_split_along_their_first_name_alone():
    heads = parse("b (h d) -> b h d", [2])
    assert heads.candidates == ("b", "h")
    assert heads.sizes([[2, 12]], {"h": 3}) == {"b": 2, "h": 3, "d": 4}
    with pytest.raises(ValueError, match=r"\['h', 'd'\].*keywords"):
        heads.sizes([[2, 12]], {})


def test_a_star_stands_for_the_leading_dimensions():
    annotation = parse("* k+, n k+ -> * n", [4, 2])
    assert annotation.candidates == ("*0", "*1", "*2", "k", "n")
    assert annotation.output_placements("*1") == (Shard(1),)


@pytest.mark.parametrize(
    ("text", "num_dims", "match"),
    [
        ("m k", [2], "one '->'"),
        ("m k -> m", [2], "'k' is missing in a result"),
        ("m k+ -> m k", [2], "summed over"),
        ("m k+ -> m", [2, 2], "1 operands, the op has 2"),
        ("m k! -> m", [2], "is no token"),
        ("m+, m^ -> ", [1, 1], "marks 'm' with"),
        ("* m, * m n -> * m", [2, 4], "does not fit"),
    ],
)
def test_a_wrong_annotation_is_refused_by_what_is_wrong(text, num_dims, match):
    with pytest.raises(ValueError, match=match):
        parse(text, num_dims)


@pytest.mark.parametrize(
    ("before", "after", "texts"),
    [
        ([2, 12], [2, 3, 4], ("a (b c)", "a b c")),
        ([2, 8, 4, 8], [2, 8, 32], ("a b c d", "a b (c d)")),
        ([2, 1, 8], [16], ("a 1 b", "(a b)")),
        ([3, 4, 6], [3, 6, 4], ("a in1^ in2^", "a out1^ out2^")),
        ([0, 4], [4, 0], ("in0^ in1^", "out0^ out1^")),
    ],
)
def test_a_view_keeps_the_factors_that_both_shapes_have(before, after, texts):
    assert view_texts(before, after)[:2] == texts


INDEX = torch.tensor([[0, 3, 1, 2], [5, 0, 2, 4]])
LIBRARY = [
    (aten.linear, [(2, 4, 6), (8, 6), (8,)], (), {"*0", "*1", "k", "n"}),
    (aten.linear, [(4, 6), (8, 6), None], (), {"*0", "k", "n"}),
    (aten.addmm, [(8,), (4, 6), (6, 8)], (), {"m", "k", "n"}),
    (aten.matmul, [(2, 4, 6), (2, 6, 8)], (), {"a", "m", "k", "n"}),
    (aten.matmul, [(4, 6), (6,)], (), {"*0", "k"}),
    (aten.bmm, [(2, 4, 6), (2, 6, 8)], (), {"b", "m", "k", "n"}),
    (aten.add.Tensor, [(2, 4), (4,)], (), {"a", "b", "+"}),
    (aten.mul.Tensor, [(2, 4), (1, 4)], (), {"a", "b", "+"}),
    (aten.mul.Tensor, [(4,), (2, 4)], (), {"a", "b", "+"}),
    (aten.gelu, [(2, 4)], (), {"a", "b"}),
    (aten.where.self, [INDEX > 2, (2, 4), (1, 1)], (), {"a", "b"}),
    (aten.layer_norm, [(2, 4, 6)], ([6],), {"*0", "*1"}),
    (aten.rms_norm, [(2, 4, 6)], ([6],), {"*0", "*1"}),
    (aten.softmax.int, [(2, 4)], (-1,), {"a"}),
    (aten.embedding, [(8, 6), INDEX], (), {"v", "e", "*0", "*1"}),
    (aten.cross_entropy_loss, [(4, 8), INDEX[0]], (None, 2), {"m"}),
    (aten.nll_loss_nd, [(4, 8), INDEX[0]], (None, 2, 3), {"m", "c"}),
    (aten.nll_loss_nd, [(4, 8), INDEX[0]], (None, 0), {"m", "c"}),
    (aten.embedding, [(8, 6), INDEX], (2,), {"v", "e", "*0", "*1"}),
    (aten.log_softmax.int, [(2, 4)], (-1,), {"a"}),
    (aten.mse_loss, [(2, 4), (2, 4)], (2,), {"a", "b"}),
    (aten.sum.dim_IntList, [(2, 4)], ([1],), {"a", "b"}),
    (aten.mean.dim, [(2, 4)], ([-1], True), {"a"}),
    (aten.amax, [(2, 4)], ([1],), {"a"}),
    (aten.view, [(2, 24)], ([2, 4, 6],), {"a", "b", "+"}),
    (aten.reshape, [(2, 4, 6)], ([8, 6],), {"a", "c", "+"}),
    (aten.squeeze.dim, [(2, 1, 4)], (1,), {"a", "b", "+"}),
    (aten.transpose.int, [(2, 4, 6)], (0, 2), {"a", "b", "c", "+"}),
    (aten.permute, [(2, 4, 6)], ([2, 0, 1],), {"a", "b", "c", "+"}),
    (aten.expand, [(2, 1, 4)], ([2, 6, 4],), {"a", "b", "c"}),
    (aten.slice.Tensor, [(2, 4)], (1, 1, 3), {"a", "+"}),
    (aten.select.int, [(2, 4)], (1, 1), {"a", "+"}),
    (aten.split.Tensor, [(2, 4)], (2, 1), {"a", "+"}),
    (aten.gather, [(2, 6)], (1, INDEX), {"a"}),
    (aten.topk, [(2, 4)], (2,), {"a"}),
    (aten.roll, [(2, 4)], ([1],), set()),
    (aten.roll, [(2, 4)], ([1], [-1]), {"a"}),
    (aten.conv2d, [(2, 4, 6, 6), (8, 4, 3, 3), (8,)], (), {"n", "c", "o"}),
    (aten.max_pool2d, [(2, 4, 6, 6)], ([2, 2],), {"a", "b"}),
]


@pytest.mark.parametrize(("op", "shapes", "args", "names"), LIBRARY, ids=[str(case[0]) for case in LIBRARY])
def test_every_split_that_the_library_claims_gives_what_the_whole_op_gives(op, shapes, args, names):
    assert set(verify_op(op, shapes, *args)) == names


def test_tensors_of_different_sizes_are_joined_whole_along_that_dimension_alone():
    first, second = (torch.randn(2, size, dtype=torch.float64, requires_grad=True) for size in (4, 6))
    assert verify_op(aten.cat, [], [first, second], 1) == ["a", "+"]


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        (aten.isin.Tensor_Tensor, [torch.arange(24.0).view(4, 6), torch.arange(6.0)]),
        (aten.type_as, [(2, 4), (3, 5, 6)]),
        (aten.squeeze, [(2, 1, 4)]),  # half of the first dimension would be dropped as well
    ],
    ids=str,
)
def test_an_op_whose_parts_are_no_parts_of_the_result_is_not_split(op, operands):
    assert verify_op(op, operands) == []


@pytest.mark.parametrize(("is_causal", "names"), [(True, {"a", "b"}), (False, {"a", "b", "l"})])
def test_attention_is_split_by_samples_heads_and_where_nothing_is_masked_queries(is_causal, names):
    shapes = [(2, 4, 6, 8)] * 3
    assert set(verify_op(aten.scaled_dot_product_attention, shapes, None, 0.0, is_causal)) == names


def test_grouped_attention_is_split_by_the_heads_of_keys_and_values():
    shapes = [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)]
    names = verify_op(aten.scaled_dot_product_attention, shapes, None, 0.0, True, enable_gqa=True)
    assert set(names) == {"a", "h"}


@register_op("b (h d), h -> b (h d)")
def scale_heads(x: Tensor, scales: Tensor, h: int) -> Tensor:
    return (x.view(x.shape[0], h, -1) * scales[:, None]).flatten(1)


@register_op("m k -> m k")
def wrong_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def test_a_registered_op_is_split_with_the_keyword_that_sizes_it():
    assert verify_op(scale_heads, [(4, 12), (6,)], 6) == ["b", "h"]


def test_a_wrong_annotation_is_found_by_running_it():
    with pytest.raises(ValueError, match=r"split along 'k'.*result 0 differs.*mark k with \^"):
        verify_op(wrong_softmax, [(4, 6)])


def test_an_op_without_annotation_is_named_with_how_to_register_it():
    with pytest.raises(ValueError, match=r'op cdist has no annotation.*register_op\("a\^ b\^, a\^ b\^ -> ...'):
        verify_op(aten.cdist, [(4, 6), (4, 6)])


def test_a_function_without_type_hints_is_refused():
    with pytest.raises(ValueError, match=r"no type hints for \['x'\]"):
        register_op("m -> m")(lambda x: x)
