"""Every optimizer of torch and of the config, on two processes, against a plain loop on one."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import hybrid_engine
from hybrid_engine.config.optimizer import OPTIMIZER_PARAMS, TORCH_OPTIMIZERS
from hybrid_engine.ops.adam import FusedAdam
from hybrid_engine.ops.lamb import FusedLamb
from hybrid_engine.ops.lion import FusedLion
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed

pytestmark = [pytest.mark.long, pytest.mark.torch_versions]

STEPS = 3
MICRO_BATCH = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FOREACH, SINGLE, FUSED = {"foreach": True}, {"foreach": False}, {"fused": True}
# Each class, arguments that reach its branches, and the implementations it has.
TABLE = [
    (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}, [FOREACH, SINGLE, FUSED]),
    (optim.AdamW, {}, [FOREACH, SINGLE, FUSED]),
    (optim.AdamW, {"lr": torch.tensor(1e-2)}, [SINGLE, FUSED]),
    (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}, [FOREACH, SINGLE, FUSED]),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}, [FOREACH, SINGLE, FUSED]),
    (optim.Adadelta, {}, [FOREACH, SINGLE]),
    (optim.Adamax, {}, [FOREACH, SINGLE]),
    (optim.ASGD, {"t0": 1}, [FOREACH, SINGLE]),
    (optim.NAdam, {}, [FOREACH, SINGLE]),
    (optim.RAdam, {}, [FOREACH, SINGLE]),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}, [FOREACH, SINGLE]),
    (optim.Rprop, {}, [FOREACH, SINGLE]),
    (optim.Adafactor, {}, [FOREACH, SINGLE]),
    (optim.Muon, {}, [{}]),
    (FusedAdam, {"bias_correction": False}, [{}]),
    (FusedLamb, {"weight_decay": 0.1}, [{}]),
    (FusedLion, {"weight_decay": 0.1}, [{}]),
]
CASES = [(kind, {"lr": 1e-2, **given, **how}) for kind, given, hows in TABLE for how in hows]
FIRST_CASES = [[kind for kind, _ in CASES].index(kind) for kind, _, _ in TABLE]
"""The first of each class is tried everywhere, its other implementations where they may differ."""
WHERE = [(0, "bf16"), (1, "fp32"), (2, "fp16"), (3, "bf16")]
WHERE_ALSO = [(0, "bf16"), (3, "bf16")]
NOT_STEPPED = {"LBFGS", "SparseAdam", "Optimizer"}
"""Those that are refused, and the base of all."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Tiny(nn.Module):
    """Sizes that leave uneven shards, and none of the last bias on rank 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def stepped_parameters(model, kind):
    """All of them; Muon steps matrices only."""
    return [param for param in model.parameters() if kind is not optim.Muon or param.ndim == 2]


def loss_of(model, rank, step, dtype):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return model(torch.randn(MICRO_BATCH, 3, generator=generator).to(dtype)).float().square().mean()


def train_plainly(kind, options, dtype):
    """fp32 masters after STEPS steps on the mean of two processes' gradients."""
    model = Tiny().to(dtype)
    params = stepped_parameters(model, kind)
    masters = [nn.Parameter(param.detach().float().clone()) for param in params]
    optimizer = kind(masters, **copy.deepcopy(options))
    for step in range(STEPS):
        gradients = [torch.autograd.grad(loss_of(model, rank, step, dtype), params) for rank in range(2)]
        for master, first, second in zip(masters, *gradients, strict=True):
            master.grad = (first.float() + second.float()) / 2
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return [master.detach() for master in masters]


def config_of(stage, precision, **more):
    precisions = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    }
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        **precisions[precision],
        **more,
    }


def train(engine, precision):
    for step in range(STEPS):
        engine.backward(loss_of(engine, dist.get_rank(), step, DTYPES[precision]))
        engine.step()
    return [full_tensor(trained.master).clone() for trained in engine.optimizer.parameters]


def train_engine(kind, options, stage, precision):
    model = Tiny()
    engine, *_ = hybrid_engine.initialize(
        model=model,
        optimizer=lambda groups: kind(groups, **copy.deepcopy(options)),
        model_parameters=stepped_parameters(model, kind),
        config=config_of(stage, precision),
    )
    return train(engine, precision)


def train_by_config(kind, params, stage, precision):
    config = config_of(stage, precision, optimizer={"type": kind, "params": params})
    return train(hybrid_engine.initialize(model=Tiny(), config=config)[0], precision)


def train_filled_adagrad(stage, precision):
    """An optimizer that was built on the model before, and has its state since then."""
    model = Tiny()
    optimizer = optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1)
    return train(
        hybrid_engine.initialize(model=model, optimizer=optimizer, config=config_of(stage, precision))[0], precision
    )


def error_of(train_once, *args):
    try:
        train_once(*args)
    except ValueError as error:
        return str(error)
    return ""


class Normalised(optim.SGD):
    """Somebody's optimizer, with an operation that torch has no sharded form of."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.sub_(torch.linalg.matrix_exp(param.grad.view(-1, 1) @ param.grad.view(1, -1))[0, 0])


def try_everything(rank, world_size):
    results = {}
    for index, (kind, options) in enumerate(CASES):
        for stage, precision in WHERE if index in FIRST_CASES else WHERE_ALSO:
            results[index, stage, precision] = train_engine(kind, options, stage, precision)
    for kind in (*OPTIMIZER_PARAMS, *TORCH_OPTIMIZERS):
        results["config", kind] = train_by_config(kind, {"lr": 1e-2}, 3, "bf16")
    for stage in (0, 2, 3):
        results["filled", stage] = train_filled_adagrad(stage, "bf16")
    results["refused"] = error_of(train_engine, Normalised, {"lr": 1e-2}, 3, "fp32")
    return results


@pytest.fixture(scope="module")
def results():
    return run_distributed(try_everything, 2)


def name_of(case):
    kind, options = case
    return "-".join([kind.__name__, *[key for key in ("foreach", "fused") if options.get(key)]])


def test_the_table_holds_every_optimizer_that_torch_has():
    classes = {name for name, value in vars(optim).items() if isinstance(value, type)}
    assert classes - NOT_STEPPED == {kind.__name__ for kind, _ in CASES if hasattr(optim, kind.__name__)}


@pytest.mark.parametrize("index", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_two_processes_step_like_one_at_every_stage_and_in_every_precision(results, index):
    kind, options = CASES[index]
    for precision, dtype in DTYPES.items():
        expected = train_plainly(kind, options, dtype)
        for weights in [value for key, value in results[0].items() if key[0] == index and key[-1] == precision]:
            # Norms of whole tensors are added up in another order; the others step the very same numbers.
            torch.testing.assert_close(weights, expected, rtol=1e-6, atol=2e-7 if kind is FusedLamb else 1e-8)


@pytest.mark.parametrize("kind", TORCH_OPTIMIZERS)
def test_optimizers_of_the_config_step_like_torchs_on_two_processes(results, kind):
    expected = train_plainly(getattr(optim, kind), {"lr": 1e-2}, torch.bfloat16)
    torch.testing.assert_close(results[0]["config", kind], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "reference", "options"),
    [
        ("Adam", optim.AdamW, {"weight_decay": 0.0}),
        ("AdamW", optim.AdamW, {"weight_decay": 0.0}),
        ("Lamb", FusedLamb, {}),
        ("Lion", FusedLion, {}),
    ],
)
def test_deepspeeds_optimizers_of_the_config_step_on_two_processes_as_on_one(results, kind, reference, options):
    expected = train_plainly(reference, {"lr": 1e-2, **options}, torch.bfloat16)
    torch.testing.assert_close(results[0]["config", kind], expected, rtol=1e-6, atol=2e-7)


def test_an_optimizer_that_fills_its_state_when_it_is_built_keeps_it(results):
    expected = train_plainly(optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}, torch.bfloat16)
    for stage in (0, 2, 3):
        torch.testing.assert_close(results[0]["filled", stage], expected, rtol=1e-6, atol=1e-8)


def test_what_torch_cannot_step_on_shards_is_refused_by_name_on_every_process(results):
    for result in results:
        assert result["refused"].startswith("optimizer=Normalised cannot step sharded parameters")
        assert "AdamW" in result["refused"]


@pytest.mark.parametrize("given", [optim.SparseAdam, lambda params: optim.SparseAdam(list(params))])
def test_sparse_adam_is_refused_by_name(given):
    model = Tiny()
    optimizer = given if isinstance(given, type) else given(model.parameters())
    with pytest.raises(ValueError, match="SparseAdam") as error:
        hybrid_engine.initialize(model=model, optimizer=optimizer, config=config_of(0, "fp32"))
    assert "Adam" in str(error.value) and "sparse=False" in str(error.value)


def test_an_optimizer_that_has_stepped_is_refused_where_its_state_would_not_fit():
    model = Tiny()
    optimizer = optim.AdamW(model.parameters())
    loss_of(model, 0, 0, torch.float32).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="optimizer: it has stepped before"):
        hybrid_engine.initialize(model=model, optimizer=optimizer, config=config_of(0, "bf16"))
