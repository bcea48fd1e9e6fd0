"""Linear layers on oneDNN compute what torch's do: values, gradients of all kinds, in every wrapping, or not at all."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import linear as plain_linear
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hybrid_engine
from hybrid_engine.engine.faster_linears import use_faster_linears, use_own_linears
from hybrid_engine.metrics.memory import LiveBytes
from hybrid_engine.ops import cpu_kernels, trained_linear
from hybrid_engine.ops.fixed_shapes import FixedShapes
from tests.support.distributed import run_distributed

IN, OUT = 24, 40
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True, params=[False, True], ids=["MKL as fast", "MKL half as fast"])
def everywhere(request, monkeypatch):
    """Counts the products of oneDNN by rows, which are taken at any size and on any processor."""
    number = [0]
    product = trained_linear.product

    def counted(*arguments):
        number[0] += 1
        return product(*arguments)

    monkeypatch.setattr(cpu_kernels, "is_intel", lambda: False)
    monkeypatch.setattr(cpu_kernels, "mkl_leaves_half", lambda: request.param)
    monkeypatch.setattr(trained_linear, "LEAST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(trained_linear, "product", counted)
    return number


class TwiceUsed(nn.Module):
    """One layer used twice, and one without a bias."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(IN, OUT, bias=False)
        self.square = nn.Linear(OUT, OUT)

    def forward(self, input):
        return self.square(torch.tanh(self.square(self.inner(input))))


def build_model(seed=0):
    torch.manual_seed(seed)
    return TwiceUsed()


def gradients_of(model, input, run=None):
    model.zero_grad()
    output = (model if run is None else run)(input)
    (output * torch.linspace(-1, 2, output.numel()).view_as(output)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), found | ({"input": input.grad} if input.grad is not None else {})


def assert_same(found, expected):
    assert found[1].keys() == expected[1].keys()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(7, IN), (3, 5, IN), (2, 3, 4, IN)])
@pytest.mark.parametrize("trains_weights", [True, False])
@pytest.mark.parametrize("trains_input", [True, False])
def test_values_and_gradients_are_those_of_torch(shape, trains_weights, trains_input, everywhere):
    model = build_model().requires_grad_(trains_weights)
    if not trains_weights:
        model.square.bias.requires_grad_()
    values = torch.randn(shape)
    expected = gradients_of(model, values.clone().requires_grad_(trains_input))
    use_faster_linears(model)
    assert_same(gradients_of(model, values.clone().requires_grad_(trains_input)), expected)
    assert everywhere[0] == (6 if trains_input else 5 if trains_weights else 4)


@pytest.mark.parametrize("lay_out", [lambda x: x.t().contiguous().t(), lambda x: x[::2], lambda x: x.expand(4, -1, -1)])
def test_inputs_may_lie_in_any_way(lay_out, everywhere):
    model, values = build_model(), lay_out(torch.randn(6, IN))
    expected = gradients_of(model, values)
    use_faster_linears(model)
    assert_same(gradients_of(model, values), expected)
    assert everywhere[0] > 0


def test_second_derivatives_are_those_of_torch(everywhere):
    model, values = build_model(), torch.randn(6, IN, requires_grad=True)

    def penalty():
        (slope,) = torch.autograd.grad(model(values).square().sum(), values, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [*model.parameters(), values])

    expected = penalty()
    use_faster_linears(model)
    torch.testing.assert_close(penalty(), expected, rtol=1e-4, atol=1e-4)
    assert everywhere[0] > 0


def test_a_weight_changed_in_place_before_the_backward_pass_is_an_error():
    model = build_model()
    use_faster_linears(model)
    output = model(torch.randn(3, IN)).sum()
    with torch.no_grad():
        model.square.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_what_is_frozen_keeps_no_activations():
    layer = nn.Linear(IN, OUT).requires_grad_(False)
    use_faster_linears(layer)
    output = layer(torch.randn(3, IN, requires_grad=True) * 2)
    kept = [saved for saved in output.grad_fn.saved_tensors if saved is not None]
    assert len(kept) == 1
    assert kept[0].data_ptr() == layer.weight.data_ptr()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again_are_the_same(reentrant, everywhere):
    model, values = build_model(), torch.randn(3, 5, IN, requires_grad=True)
    use_faster_linears(model)
    expected = gradients_of(model, values)
    values.grad = None
    found = gradients_of(model, values, lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert_same(found, expected)


def test_adapters_of_peft_on_such_layers_learn_the_same(everywhere):
    model = build_model()
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["inner", "square"], init_lora_weights=False))
    values = torch.randn(5, IN)
    expected = gradients_of(adapted, values)
    use_faster_linears(adapted)
    assert_same(gradients_of(adapted, values), expected)
    assert everywhere[0] > 0


def test_tensors_of_other_kinds_run_as_torch_runs_them(everywhere):
    model = build_model()
    use_faster_linears(model)
    values = torch.randn(5, IN)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(values).dtype == torch.bfloat16
    with FixedShapes():
        model(values)
    with FlopCounterMode(display=False) as counter:
        model(values)
    assert counter.get_total_flops() == 2 * 5 * (IN * OUT + 2 * OUT * OUT)
    assert model.to(torch.bfloat16)(values.bfloat16()).dtype == torch.bfloat16
    assert model.to("meta")(values.to("meta", torch.bfloat16)).is_meta
    assert everywhere[0] == 0


def test_a_pass_whose_memory_is_measured_computes_the_same_bits(everywhere):
    model, values = build_model(), torch.randn(5, IN)
    use_faster_linears(model)
    expected = gradients_of(model, values)
    with LiveBytes():
        found = gradients_of(model, values)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert everywhere[0] == 10


def test_a_compiled_module_runs_as_torch_compiles_it(everywhere):
    model, values = build_model(), torch.randn(5, IN)
    expected = gradients_of(model, values)
    use_faster_linears(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(gradients_of(model, values, compiled), expected)
    assert everywhere[0] == 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_torch_func_pass_through(everywhere):
    layer = nn.Linear(IN, OUT)
    values = torch.randn(4, 3, IN)

    def loss(row):
        return layer(row).square().sum()

    expected = torch.func.vmap(torch.func.grad(loss))(values)
    use_faster_linears(layer)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(values), expected, rtol=1e-4, atol=1e-4)


def forward_by(name):
    """How the layer is called with one of its parameters, or with its input, as a function of that and of the layer."""

    def call(layer, values, input):
        return torch.func.functional_call(layer, {name: values}, (input,)) if name != "input" else layer(values)

    return call


def dual_gradient(layer, input):
    """The tangent of a gradient whose layer ran before any level of derivatives that go forward."""
    given = input.clone().requires_grad_()
    output = layer(given)
    with forward_ad.dual_level():
        above = forward_ad.make_dual(torch.ones_like(output), torch.linspace(0, 1, output.numel()).view_as(output))
        (gradient,) = torch.autograd.grad(output, given, above)
        return forward_ad.unpack_dual(gradient).tangent


FORWARD = {
    **{f"jvp by the {name}": name for name in ("input", "weight", "bias")},
    "jvp of vmap": lambda layer, input: torch.func.jvp(torch.func.vmap(layer), (input,), (input,)),
    "hessian": lambda layer, input: torch.func.hessian(lambda x: layer(x).tanh().sum())(input),
    "jvp of grad": lambda layer, input: torch.func.jvp(
        torch.func.grad(lambda x: layer(x).tanh().sum()), (input,), (input,)
    ),
    "a level within the backward pass": dual_gradient,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", FORWARD)
def test_derivatives_that_go_forward_are_those_of_torch(kind, everywhere):
    layer, input = nn.Linear(IN, OUT), torch.randn(3, 2, IN)
    compute = FORWARD[kind]
    if isinstance(compute, str):
        values = {"input": input, **dict(layer.named_parameters())}[compute].detach()
        call, tangent = forward_by(compute), torch.randn_like(values)

        def compute(layer, input):
            return torch.func.jvp(lambda values: call(layer, values, input), (values,), (tangent,))

    expected = compute(layer, input)
    use_faster_linears(layer)
    torch.testing.assert_close(compute(layer, input), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("shape", [(3, IN), (2, 3, IN)])
def test_gradients_that_come_in_batches_are_those_of_torch(shape, everywhere):
    layer, input = nn.Linear(IN, OUT), torch.randn(shape, requires_grad=True)
    above = torch.randn(4, *shape[:-1], OUT)

    def compute():
        return torch.autograd.grad(layer(input), (input, *layer.parameters()), above, is_grads_batched=True)

    expected = compute()
    use_faster_linears(layer)
    torch.testing.assert_close(compute(), expected, rtol=1e-4, atol=1e-4)
    assert everywhere[0]


def test_small_products_and_wrong_shapes_are_left_to_torch(monkeypatch, everywhere):
    model = build_model()
    use_faster_linears(model)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.randn(3, IN + 1))
    monkeypatch.setattr(trained_linear, "LEAST_MULTIPLICATIONS", 10**6)
    model(torch.randn(3, IN))
    assert everywhere[0] == 0


def test_layers_are_given_back_as_they_were_and_others_are_not_touched():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = nn.ModuleList([nn.Linear(IN, OUT), Doubled(IN, OUT), nn.Linear(IN, OUT)])
    model[2].forward = own = lambda input: input
    use_faster_linears(model)
    use_faster_linears(model)
    assert "forward" in vars(model[0])
    assert "forward" not in vars(model[1])
    assert model[2].forward is own
    use_own_linears(model)
    assert "forward" not in vars(model[0])
    assert model[2].forward is own


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_with_weights_of_its_own(copied):
    model, values = build_model(), torch.randn(3, IN)
    use_faster_linears(model)
    twin, expected = copied(model), model(values)
    with torch.no_grad():
        model.square.weight.zero_()
    torch.testing.assert_close(twin(values), expected)


ZEN_4, ZEN_5, XEON = "AuthenticAMD\ncpu family\t: 25", "AuthenticAMD\ncpu family\t: 26", "GenuineIntel\ncpu family\t: 6"


@pytest.mark.parametrize(("processor", "expected"), [(ZEN_4, (0, 0)), (ZEN_5, (0, 1)), (XEON, (1, 0)), ("arm", (0, 0))])
def test_mkl_leaves_half_on_amds_processors_from_zen_5_on(processor, expected):
    assert cpu_kernels.Processor.of(f"vendor_id\t: {processor}\nflags\t\t: fpu avx512f\n")[:2] == expected


@pytest.mark.parametrize("size", [0, 10**9], ids=["large", "small"])
def test_what_torch_compiles_reads_no_file(size, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(trained_linear, "LEAST_MULTIPLICATIONS", size)
    model, values = build_model(), torch.randn(5, IN)
    expected = model(values)
    use_faster_linears(model)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(values), expected)
    torch.testing.assert_close(torch.export.export(model, (values,), strict=True).module()(values), expected)


@pytest.mark.parametrize("lay_out", [lambda x: x, lambda x: x.t().contiguous().t(), lambda x: x[::2].repeat(2, 1)])
@pytest.mark.parametrize("num_rows", [2, 64, 101 * 2])
def test_a_product_over_rows_is_the_gradient_of_a_weight(lay_out, num_rows):
    left, right = lay_out(torch.randn(num_rows, OUT)), lay_out(torch.randn(num_rows, IN))
    found = cpu_kernels.product_over_rows(left, right)
    torch.testing.assert_close(found.double(), left.double().t() @ right.double(), rtol=1e-5, atol=1e-5)


def train(rank, world_size, stage):
    trained_linear.LEAST_MULTIPLICATIONS, cpu_kernels.is_intel = 0, lambda: False
    losses = {}
    for is_plain in (False, True):
        config = {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
        if is_plain:
            use_own_linears(engine.module)
        values = torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(3))
        losses[is_plain] = []
        for _ in range(3):
            loss = engine(values).square().mean()
            engine.backward(loss)
            engine.step()
            losses[is_plain].append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_trains_by_them_at_every_stage(stage):
    for losses in run_distributed(train, 2, stage):
        assert losses[False] == pytest.approx(losses[True], rel=1e-4)
        assert losses[False][0] > losses[False][-1]


def test_the_engine_puts_them_into_its_module(everywhere):
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
    engine.backward(engine(torch.randn(2, IN)).square().mean())
    assert everywhere[0] == 5
    torch.testing.assert_close(
        engine.module.inner(torch.ones(1, IN)), plain_linear(torch.ones(1, IN), engine.module.inner.weight)
    )
