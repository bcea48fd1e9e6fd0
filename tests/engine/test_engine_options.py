"""Options of the config that change how the engine trains: each against training without it, or plain PyTorch."""

import json
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainingArguments

import hybrid_engine
from hybrid_engine.config.notices import say_once
from hybrid_engine.zero.sharding import local_tensor
from tests.support.distributed import run_distributed
from tests.support.paths import DATA
from tests.support.training_reference import (
    MICRO_BATCH,
    batches,
    engine_config,
    relative_error,
    tiny_llama,
    train_engine,
    train_plainly,
    whole_weights,
)

pytestmark = pytest.mark.long

STEPS = 4
TOLERANCE = 1e-6
MINIMAL = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


@pytest.fixture(scope="module")
def plain():
    return train_plainly(tiny_llama(), STEPS)


def _linear(**more):
    torch.manual_seed(0)
    return hybrid_engine.initialize(model=nn.Linear(3, 2), config={**MINIMAL, **more})[0]


def _loss(engine):
    return engine(torch.ones(1, 3, dtype=engine.module.weight.dtype)).float().square().sum()


OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": True}}


@pytest.mark.parametrize(
    "more",
    [
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 8.0},
        {"communication_data_type": "bf16"},
        {"zero_optimization": {"stage": 3, **OFFLOAD}},
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"wall_clock_breakdown": True},
        {"gradient_accumulation_dtype": "fp32"},
    ],
)
def test_on_one_process_these_change_no_number(more, plain):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(**more))
    result = train_engine(engine, STEPS)
    assert result.losses == pytest.approx(plain.losses, rel=TOLERANCE)
    assert relative_error(result.weights, plain.weights) < TOLERANCE


@pytest.mark.parametrize(("kind", "reference"), [("Lamb", "FusedLamb"), ("Lion", "FusedLion")])
def test_an_optimizer_of_the_config_steps_like_the_one_that_is_passed(kind, reference):
    params = {"lr": 1e-2, "weight_decay": 0.1}
    config = engine_config(optimizer={"type": kind, "params": params}, bf16={"enabled": True})
    by_config, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
    del config["optimizer"]
    model = tiny_llama()
    cls = getattr(__import__(f"hybrid_engine.ops.{kind.lower()}", fromlist=[reference]), reference)
    by_instance, *_ = hybrid_engine.initialize(
        model=model,
        optimizer=cls(model.parameters(), **params),
        config={**config, "scheduler": None},
        lr_scheduler=lambda inner: by_config.lr_scheduler.__class__(inner, 0.0, None, 3, "linear"),
    )
    ours, theirs = train_engine(by_config, 3).weights, train_engine(by_instance, 3).weights
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("RMSprop", {"lr": 0.1}),
        ("NAdam", {"betas": [0.8, 0.9]}),
        ("Adagrad", {}),
    ],
)
def test_optimizers_and_schedules_of_torch_are_built_from_the_config_by_their_names(kind, params):
    schedule = {"type": "CosineAnnealingLR", "params": {"T_max": 3}}
    engine = _linear(optimizer={"type": kind, "params": params}, scheduler=schedule, gradient_clipping=0)
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(plain.parameters(), **params)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    for _ in range(3):
        engine.backward(_loss(engine))
        engine.step()
        optimizer.zero_grad()
        plain(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(engine.module.weight, plain.weight)
    assert engine.get_lr() == scheduler.get_last_lr()


def test_rates_for_other_groups_than_there_are_are_refused_before_the_model_is_changed():
    model = nn.Linear(3, 2)
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}
    config = {**MINIMAL, "scheduler": schedule, "bf16": {"enabled": True}}
    with pytest.raises(ValueError, match=r"scheduler.params.warmup_max_lr=\[0.1, 0.2\] has 2 rates for 1 parameter"):
        hybrid_engine.initialize(model=model, config=config)
    assert model.weight.dtype == torch.float32
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    engine, *_ = hybrid_engine.initialize(model=model, model_parameters=groups, config=config)
    assert engine.lr_scheduler.max_lrs == [0.1, 0.2]


def test_adam_without_bias_correction_is_built_from_the_config():
    engine = _linear(optimizer={"type": "Adam", "params": {"lr": 0.1, "bias_correction": False}})
    before = engine.module.bias.detach().clone()
    engine.backward(_loss(engine))
    grad = engine.module.bias.grad.clone()
    engine.step()
    # m = 0.1 g and v = 0.001 g^2 after one step from nothing.
    expected = before - 0.1 * 0.1 * grad / (0.001**0.5 * grad.abs() + 1e-8)
    torch.testing.assert_close(engine.module.bias.detach(), expected)


def test_gradients_may_be_added_up_in_the_parameters_own_dtype():
    config = engine_config(bf16={"enabled": True}, gradient_accumulation_dtype="bf16")
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
    reference = tiny_llama()
    for param in reference.parameters():
        param.data = param.data.bfloat16()
    micro_batches = batches(1)[0]
    for tokens in micro_batches:
        (reference(input_ids=tokens, labels=tokens).loss.float() / len(micro_batches)).backward()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.grad, reference.get_parameter(name).grad), name
    norm = torch.cat([p.grad.float().flatten() for p in reference.parameters()]).norm().item()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-3)
    assert all(p.grad is None for p in engine.parameters())


REAL_FILES = json.loads((DATA / "real_ds_configs.json").read_text())
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize("name", REAL_FILES)
def test_the_files_that_people_have_train(name, tmp_path):
    arguments = TrainingArguments(output_dir=tmp_path, max_steps=9, warmup_steps=1, bf16=True, use_cpu=True)
    config = {key: value for key, value in REAL_FILES[name]["config"].items() if key not in SIZES}
    copies = ("zero_hpz_partition_size", "mics_shard_size")  # there is one process here, so no copies
    zero = config.get("zero_optimization", {})
    if isinstance(zero, dict):
        config["zero_optimization"] = {key: value for key, value in zero.items() if key not in copies}
    model = tiny_llama()
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters())
    engine, *_ = hybrid_engine.initialize(
        args=arguments, model=model, optimizer=optimizer, config={**config, "train_batch_size": 2}
    )
    before = whole_weights(engine)
    for _ in range(3):
        engine.backward(engine(input_ids=batches(1)[0][0], labels=batches(1)[0][0]).loss)
        engine.step()
    # Norms are 1, which a small step in 16 bits does not move.
    matrices = {name: weight for name, weight in whole_weights(engine).items() if weight.dim() == 2}
    assert engine.global_steps == 3 and not any(torch.equal(matrices[name], before[name]) for name in matrices)


def test_fp16_masters_step_the_parameters_themselves():
    fp16 = {"enabled": True, "loss_scale": 8, "fp16_master_weights_and_grads": True}
    engine = _linear(fp16=fp16)
    before = engine.module.bias.detach().clone()
    engine.backward(_loss(engine))
    engine.step()
    assert not any(t.has_master for t in engine.optimizer.parameters)
    assert {v.dtype for s in engine.optimizer.state.values() for k, v in s.items() if k != "step"} == {torch.float16}
    torch.testing.assert_close((before - engine.module.bias).abs(), torch.full((2,), 0.1).half(), rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("more", "scales"),
    [
        ({"loss_scale": 64}, [64, 64, 64, 64]),
        ({"initial_scale_power": 6, "hysteresis": 1}, [64, 32, 32, 16]),
        ({"initial_scale_power": 6, "hysteresis": 2}, [64, 64, 64, 32]),
        ({"initial_scale_power": 6, "hysteresis": 2, "consecutive_hysteresis": True}, [64, 64, 64, 64]),
        ({"initial_scale_power": 6, "hysteresis": 1, "loss_scale_window": 1}, [64, 32, 32, 16]),
        ({"initial_scale_power": 6, "hysteresis": 1, "min_loss_scale": 24}, [64, 32, 32, 24]),
        ({"initial_scale_power": 0, "hysteresis": 1, "min_loss_scale": 0}, [1, 0.5, 0.5, 0.25]),
    ],
)
def test_the_keys_of_fp16_steer_the_loss_scale_of_the_engine(more, scales):
    """A good step and one that overflows, twice; the scales by hand from DeepSpeed's rules."""
    engine = _linear(fp16={"enabled": True, **more})
    seen = []
    for factor in (1.0, float("inf"), 1.0, float("inf")):
        engine.backward(_loss(engine) * factor)
        engine.step()
        seen.append(engine.optimizer.cur_scale)
    assert seen == scales and engine.skipped_steps == 2


def test_auto_cast_casts_floating_inputs_to_fp16_and_no_others():
    class Echo(nn.Linear):
        def forward(self, x, *, index, more):
            return super().forward(x), index, more["y"]

    fp16 = {"enabled": True, "auto_cast": True}
    engine, *_ = hybrid_engine.initialize(model=Echo(3, 2), config={**MINIMAL, "fp16": fp16})
    out, index, y = engine(torch.ones(1, 3), index=torch.arange(2), more={"y": torch.ones(1)})
    assert out.dtype == y.dtype == torch.float16 and index.dtype == torch.int64


def test_bf16_skips_a_step_that_is_not_finite_where_the_config_says_so():
    engine = _linear(bf16={"enabled": True, "check_grad_overflow": True})
    before = engine.module.weight.detach().clone()
    engine.backward(_loss(engine) * float("nan"))
    engine.step()
    assert engine.skipped_steps == 1 and torch.equal(engine.module.weight, before) and not engine.was_step_applied()


def test_what_the_forward_pass_saves_is_kept_by_the_cpu_where_the_device_is_another(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "hybrid_engine.engine.zero_engine.save_on_cpu", lambda **options: asked.append(options) or nullcontext()
    )
    for is_on in (False, True):
        engine = _linear(activation_checkpointing={"cpu_checkpointing": is_on})
        engine.device = torch.device("cuda")
        _loss(engine)
    assert asked == [{"pin_memory": True}]


def test_a_seed_makes_what_follows_reproducible_and_orders_the_data():
    data = list(range(32))
    engines = [
        hybrid_engine.initialize(model=nn.Linear(3, 2), config={**MINIMAL, "seed": seed}, training_data=data)
        for seed in (5, 5, 6)
    ]
    orders = [torch.stack(list(loader)).tolist() for _, _, loader, _ in engines]
    assert orders[0] == orders[1] != orders[2]
    draws = []
    for _ in range(2):
        _linear(seed=5)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)


def test_wall_clock_breakdown_prints_the_milliseconds_of_the_three_parts(capsys):
    engine = _linear(wall_clock_breakdown=True, steps_per_print=2)
    for _ in range(4):
        engine.backward(_loss(engine))
        engine.step()
    lines = [line for line in capsys.readouterr().out.splitlines() if " ms: " in line]
    assert [line.split()[0] for line in lines] == ["step=2", "step=4"]
    for line in lines:
        parts = dict(part.split("=") for part in line.split(" ms: ")[1].split())
        assert list(parts) == ["forward", "backward", "step"] and all(float(ms) > 0 for ms in parts.values())


def test_the_profiler_counts_the_operations_of_one_micro_batch(tmp_path):
    path = tmp_path / "deep" / "flops.txt"
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    profiler = {"enabled": True, "profile_step": 1, "output_file": str(path)}
    engine, *_ = hybrid_engine.initialize(model=model, config={**MINIMAL, "flops_profiler": profiler})
    for step in range(3):
        assert path.exists() == (step == 2)
        engine.backward(engine(torch.ones(5, 8)).sum())
        engine.step()
    # A product of [5, 8] and [8, 16] is 2 * 5 * 8 * 16; its backward pass is one for the weight. The second layer's
    # also is one for its input.
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    assert f"{2 * first + 3 * second} operations" in path.read_text() and "Sequential" in path.read_text()
    assert f"{3 * second:,}  Sequential.1" in path.read_text()


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, ["Sequential", "Sequential.0", "Sequential.0.0", "Sequential.1"]),
        ({"module_depth": 1}, ["Sequential", "Sequential.0", "Sequential.1"]),
        ({"module_depth": 0}, ["Sequential"]),
        ({"detailed": False}, ["Sequential"]),
        ({"detailed": False, "top_modules": 2}, ["Sequential", "Sequential.1"]),
    ],
)
def test_the_profilers_table_shows_the_modules_that_are_asked_for_and_is_printed(options, shown, capsys):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 9))
    engine, *_ = hybrid_engine.initialize(
        model=model, config={**MINIMAL, "flops_profiler": {"enabled": True, "profile_step": 0, **options}}
    )
    engine.backward(engine(torch.ones(1, 2)).sum())
    head, *table = capsys.readouterr().out.splitlines()
    assert "flops_profiler: step 0" in head and sorted(line.split()[1] for line in table) == shown


def test_the_profiler_never_profiles_step_minus_1(capsys):
    model = nn.Linear(2, 2)
    profiler = {"enabled": True, "profile_step": -1}
    engine, *_ = hybrid_engine.initialize(model=model, config={**MINIMAL, "flops_profiler": profiler})
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    assert "flops_profiler" not in capsys.readouterr().out


def test_csv_monitor_writes_a_file_for_each_quantity_by_samples(tmp_path):
    csv_monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = _linear(csv_monitor=csv_monitor, fp16={"enabled": True, "initial_scale_power": 4}, train_batch_size=4)
    losses = []
    for _ in range(3):
        loss = _loss(engine)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert engine.monitor.enabled
    engine.monitor.write_events([("mine", 2.5, 7)])
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "job").iterdir()}
    assert files["Train_Samples_train_loss.csv"][0] == "step,Train/Samples/train_loss"
    rows = [line.split(",") for line in files["Train_Samples_train_loss.csv"][1:]]
    assert [int(step) for step, _ in rows] == [4, 8, 12]
    assert [float(value) for _, value in rows] == pytest.approx(losses)
    assert files["Train_Samples_lr.csv"][1] == "4,0.1" and files["Train_Samples_loss_scale.csv"][1] == "4,16.0"
    assert files["mine.csv"] == ["step,mine", "7,2.5"]


class Service:
    """What wandb, Comet and TensorBoard log to; remembers each call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))


def _install(monkeypatch, name, **members):
    """A package in place of one that is not installed."""
    package = ModuleType(name)
    package.__spec__ = ModuleSpec(name, None)
    package.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, package)


def test_trackers_are_accelerates_and_get_what_the_config_says(monkeypatch, tmp_path):
    """accelerate's own classes, over packages with the functions and names of arguments that it calls."""
    asked, services = [], {name: Service() for name in ("tensorboard", "wandb", "comet")}

    def write_summaries(log_dir):
        asked.append(log_dir)
        return services["tensorboard"]

    def init(*, project, entity, group):
        asked.append((project, entity, group))
        return services["wandb"]

    def start(*, project_name, workspace, online):
        asked.append((project_name, workspace, online))
        return services["comet"]

    _install(monkeypatch, "tensorboard")
    summaries = SimpleNamespace(SummaryWriter=write_summaries)
    monkeypatch.setattr(torch.utils, "tensorboard", summaries, raising=False)
    _install(monkeypatch, "wandb", init=init)
    _install(monkeypatch, "comet_ml", start=start, __version__="3.47.0")
    engine = _linear(
        tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        wandb={"enabled": True, "project": "p", "group": "g", "team": "t"},
        comet={"enabled": True, "project": "c", "workspace": "w", "online": False, "experiment_name": "mine"},
    )
    assert asked == [str(tmp_path / "job"), ("p", "t", "g"), ("c", "w", False)]
    engine.monitor.write_events([("a", 1.0, 2)])
    assert services["tensorboard"].calls == [("add_scalar", "a", 1.0, 2), ("flush",)]
    assert services["wandb"].calls == [("log", {"a": 1.0}, 2)]
    assert services["comet"].calls == [("set_name", "mine"), ("set_step", 2), ("log_metric", "a", 1.0, 2)]


def test_a_tracker_without_its_package_is_refused_before_the_model_is_changed(monkeypatch):
    from hybrid_engine.metrics import observer

    monkeypatch.setattr(observer.importlib.util, "find_spec", lambda name: None)
    model = nn.Linear(3, 2)
    config = {**MINIMAL, "wandb": {"enabled": True}, "bf16": {"enabled": True}}
    with pytest.raises(ValueError, match=r"wandb\.enabled=true needs the package wandb"):
        hybrid_engine.initialize(model=model, config=config)
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["csv_monitor", "tensorboard"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_model_is_changed(tmp_path, monkeypatch, name):
    from hybrid_engine.metrics import observer

    monkeypatch.setattr(observer.importlib.util, "find_spec", lambda name: object())
    (tmp_path / "file").write_text("mine")
    _assert_refused(rf"{name}\.output_path=.*file' cannot be written", name, output_path=str(tmp_path / "file"))


def test_a_folder_in_place_of_the_profilers_file_is_refused_before_the_model_is_changed(tmp_path):
    _assert_refused(r"flops_profiler.output_file=.* is a folder", "flops_profiler", output_file=str(tmp_path))


def test_processes_that_do_not_divide_are_refused_before_the_model_is_changed():
    message = "hybrid_engine.inference_tp_size=2 must divide the number of processes 1"
    _assert_refused(message, "hybrid_engine", tiny_llama(), inference_tp_size=2)


def _assert_refused(message, name, model=None, **block):
    model = model or nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        hybrid_engine.initialize(
            model=model, config={**MINIMAL, name: {"enabled": True, **block}, "bf16": {"enabled": True}}
        )
    assert all(param.dtype == torch.float32 for param in model.parameters())


def test_a_function_that_builds_no_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"optimizer\(...\)=list must be a torch Optimizer"):
        hybrid_engine.initialize(model=nn.Linear(3, 2), optimizer=lambda groups: groups, config={"train_batch_size": 1})


def test_boundaries_may_be_set_by_hand(plain):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config())
    for micro_batches in batches(STEPS):
        for index, tokens in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    weights = dict(engine.module.named_parameters())
    assert relative_error({name: p.detach() for name, p in weights.items()}, plain.weights) < TOLERANCE
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    assert engine.global_steps == STEPS + 1 and engine.was_step_applied()


def test_a_loss_may_be_left_undivided_and_its_graph_kept():
    engine = _linear(train_batch_size=2, gradient_accumulation_steps=2)
    loss = _loss(engine)
    engine.backward(loss, retain_graph=True, scale_wrt_gas=False)
    expected = torch.autograd.grad(loss, engine.module.weight)[0]
    torch.testing.assert_close(engine.module.weight.grad, expected)


class Critic(nn.Module):
    """A value model whose second entry is a method, as DeepSpeed-Chat's has; its head is in no layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def forward_value(self, x):
        return self.forward(x)[..., 0]


MOMENTUM = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
DIVISIONS = {
    "before": {"prescale_gradients": True},
    "in halves": {"gradient_predivide_factor": 2.0},
    "far too early": {"gradient_predivide_factor": 2.0**45},
}


def _sums_at_the_limit_of_fp16(stage, more):
    """Whether a step with a gradient of 40000 on each process was skipped, and its norm."""
    fp16 = {"enabled": True, "loss_scale": 1}
    config = {**MINIMAL, "train_batch_size": 2, "zero_optimization": {"stage": stage}, "fp16": fp16, **more}
    engine, *_ = hybrid_engine.initialize(model=nn.Linear(3, 2), config={**config, "communication_data_type": "fp16"})
    engine.backward(engine(torch.ones(1, 3).half()).float().sum() * 40_000)
    engine.step()
    return engine.skipped_steps, engine.get_global_grad_norm()


def _two_processes(rank, world_size, folder):
    results = {}
    variants = {
        "hpz": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        "mics": {"zero_optimization": {"stage": 3, "mics_shard_size": 1}},
        "offload": {"zero_optimization": {"stage": 3, **OFFLOAD}},
    }
    for stage in (0, 1, 3):
        variants["prescale", stage] = {"zero_optimization": {"stage": stage}, "prescale_gradients": True}
        variants["predivide", stage] = {"zero_optimization": {"stage": stage}, "gradient_predivide_factor": 4.0}
        variants["lamb", stage] = {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        }
        variants["momentum", stage] = {"zero_optimization": {"stage": stage}, "optimizer": MOMENTUM}
    variants["bf16 reduction"] = {"zero_optimization": {"stage": 2}, "communication_data_type": "bf16"}
    for name, more in variants.items():
        config = {**engine_config(0, world_size), **more}
        engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
        results[name] = train_engine(engine, STEPS)
        results["mesh", name] = (engine.sharding.mesh.mesh_dim_names, tuple(engine.sharding.mesh.shape))
    for name, zero in (("nothing", {}), ("everything", OFFLOAD)):
        config = engine_config(0, world_size, bf16={"enabled": True}, zero_optimization={"stage": 3, **zero})
        engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
        results["bf16", name] = train_engine(engine, STEPS)
    results["limit"] = {
        (name, stage): _sums_at_the_limit_of_fp16(stage, more) for name, more in DIVISIONS.items() for stage in (0, 2)
    }
    for stage in (0, 2, 3):
        results["fp16", stage] = _scales_in_fp16(rank, world_size, stage)
    results["no_sync"] = [
        _train_without_sync(rank, world_size, stage, counts) for stage in (0, 1) for counts in (False, True)
    ]
    results["no_sync refused"] = _refusal(lambda: _train_without_sync(rank, world_size, 3, False))
    torch.manual_seed(0)
    engine, *_ = hybrid_engine.initialize(
        model=Critic(), config={**MINIMAL, "train_batch_size": 2, "zero_optimization": {"stage": 3}}
    )
    value = engine.forward_value(torch.ones(1, 3))
    engine.backward(value.sum())
    engine.step()
    results["value"] = value.detach(), engine.forward_value(torch.ones(1, 3)).detach()
    results["tags"] = _refusal(lambda: _save_with_other_tags(rank, folder, "Fail"))
    results["warned"] = str(_save_with_other_tags(rank, folder, "Ignore"))
    return results


def _scales_in_fp16(rank, world_size, stage):
    """The loss scale, the skipped steps and the schedule after each of six steps, the fourth not finite on rank 1."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage, world_size, fp16=fp16))
    seen = []
    for step, micro_batches in enumerate(batches(6)):
        for tokens in micro_batches[rank::world_size]:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss * (float("inf") if (step, rank) == (3, 1) else 1.0))
            engine.step()
        seen.append((engine.optimizer.cur_scale, engine.skipped_steps, engine.lr_scheduler.last_epoch))
    return seen


class Communication(TorchDispatchMode):
    """Counts torch.distributed's collectives that run inside."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation.namespace in ("c10d", "_c10d_functional")
        return operation(*args, **(kwargs or {}))


def _train_without_sync(rank, world_size, stage, counts_by_engine):
    """The weights, and the collectives of the backward passes inside and after no_sync().

    Scripts add up gradients under an engine that accumulates none itself, or say where a step ends.
    """
    config = engine_config(stage, world_size)
    if not counts_by_engine:
        config |= {"train_batch_size": MICRO_BATCH * world_size, "gradient_accumulation_steps": 1}
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
    inside, after = Communication(), Communication()
    for micro_batches in batches(STEPS):
        *first, last = micro_batches[rank::world_size]
        factor = 1.0 if counts_by_engine else 1 / (len(first) + 1)
        with engine.no_sync():
            for tokens in first:
                loss = engine(input_ids=tokens, labels=tokens).loss
                with inside:
                    engine.backward(loss * factor)
        if counts_by_engine:
            engine.set_gradient_accumulation_boundary(True)
        loss = engine(input_ids=last, labels=last).loss
        with after:
            engine.backward(loss * factor)
        engine.step()
    return whole_weights(engine), inside.count, after.count


def _save_with_other_tags(rank, folder, validation):
    config = {**MINIMAL, "train_batch_size": 2, "checkpoint": {"tag_validation": validation}}
    engine, *_ = hybrid_engine.initialize(model=nn.Linear(3, 2), config=config)
    return engine.save_checkpoint(folder, f"tag{rank}")


def _refusal(action):
    try:
        action()
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_distributed(_two_processes, 2, tmp_path_factory.mktemp("tags"))


def test_on_two_processes_meshes_divisions_and_offloading_change_no_number(two_ranks, plain):
    for name in ("hpz", "mics", "offload", *((kind, s) for kind in ("prescale", "predivide") for s in (0, 1, 3))):
        for results in two_ranks:
            assert relative_error(results[name].weights, plain.weights) < TOLERANCE, name


def test_offloading_changes_no_bit_of_training_in_bf16(two_ranks):
    for results in two_ranks:
        nothing, everything = results["bf16", "nothing"], results["bf16", "everything"]
        assert nothing.losses == everything.losses
        assert all(torch.equal(everything.weights[name], nothing.weights[name]) for name in nothing.weights)


def _train_and_generate(zero):
    """On one process: the weights after three steps, tokens, and where masters and parameters lie."""
    config = engine_config(zero_optimization={"stage": 3, **zero}, hybrid_engine={"enabled": True})
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
    for micro_batches in batches(3):
        for tokens in micro_batches:
            tokens = tokens.to(engine.device)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    weights = {name: weight.cpu() for name, weight in whole_weights(engine).items()}
    masters = {local_tensor(trained.master).device.type for trained in engine.optimizer.parameters}
    params = {local_tensor(param).device.type for param in engine.module.parameters()}
    prompts = batches(1)[0][0].to(engine.device)
    return weights, engine.eval().generate(prompts, max_new_tokens=6, do_sample=False).tolist(), masters, params


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="without a GPU everything lies in the CPU's memory anyway")
def test_offloading_from_a_gpu_changes_no_number_and_keeps_masters_and_parameters_in_the_cpus_memory():
    kept, kept_tokens, *kept_on = _train_and_generate({})
    offloaded, offloaded_tokens, *offloaded_on = _train_and_generate(OFFLOAD)
    assert kept_on == [{"cuda"}, {"cuda"}] and offloaded_on == [{"cpu"}, {"cpu"}]
    # Adam's kernels of the CPU and of the GPU round differently.
    assert relative_error(offloaded, kept) < 1e-5
    assert offloaded_tokens == kept_tokens and len(kept_tokens[0]) > 12


def test_the_loss_scale_grows_and_halves_and_a_step_is_skipped_on_every_process_alike(two_ranks):
    """DeepSpeed's rule by hand: a window of 2 counts from the second step, and anew from the one after an overflow."""
    scales = [256, 256, 512, 256, 256, 256]
    for results in two_ranks:
        for stage in (0, 2, 3):
            assert results["fp16", stage] == list(zip(scales, [0, 0, 0, 1, 1, 1], [1, 2, 3, 3, 4, 5], strict=True))


def test_a_copy_of_the_model_on_fewer_processes_is_a_mesh_of_two_axes(two_ranks):
    assert two_ranks[0]["mesh", "mics"] == (("replicate", "fsdp"), (2, 1))
    assert two_ranks[0]["mesh", "hpz"] == (("fsdp",), (2,))


def test_lamb_takes_the_norms_of_whole_tensors_where_they_are_sharded(two_ranks):
    lamb = {"type": "Lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(optimizer=lamb))
    expected = train_engine(engine, STEPS).weights
    for stage in (0, 1, 3):
        assert relative_error(two_ranks[1]["lamb", stage].weights, expected) < 1e-5


def test_gradients_that_are_divided_before_they_are_added_up_do_not_overflow(two_ranks):
    """40000 and 40000 are more than fp16 holds (65504); the norm is that of eight gradients of 40000."""
    for results in two_ranks:
        for stage in (0, 2):
            for name in ("before", "in halves"):
                assert results["limit"][name, stage] == (0, pytest.approx(40_000 * 8**0.5, rel=1e-3))
        # 40000 / 2^45 is less than fp16 holds, so it was divided by that before.
        assert results["limit"]["far too early", 2] == (0, 0.0)


def test_torchs_optimizers_step_shards_like_the_whole(two_ranks):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(optimizer=MOMENTUM))
    expected = train_engine(engine, STEPS).weights
    for stage in (0, 1, 3):
        assert relative_error(two_ranks[0]["momentum", stage].weights, expected) < TOLERANCE


def test_gradients_are_reduced_in_the_dtype_that_is_asked_for(two_ranks, plain):
    error = relative_error(two_ranks[0]["bf16 reduction"].weights, plain.weights)
    assert 1e-5 < error < 0.1


def test_no_sync_reduces_only_at_the_end_and_is_refused_where_gradients_are_sharded(two_ranks, plain):
    for weights, num_inside, num_after in two_ranks[0]["no_sync"]:
        assert relative_error(weights, plain.weights) < TOLERANCE
        assert num_inside == 0 and num_after >= STEPS
    assert "zero_optimization.stage=3 keeps only shards" in two_ranks[0]["no_sync refused"]


def test_methods_named_forward_gather_the_parameters_like_forward(two_ranks):
    torch.manual_seed(0)
    critic = Critic()
    optimizer = torch.optim.AdamW(critic.parameters(), lr=0.1, weight_decay=0.0)
    before = critic.forward_value(torch.ones(1, 3))
    before.sum().backward()
    optimizer.step()
    after = critic.forward_value(torch.ones(1, 3))
    for results in two_ranks:
        torch.testing.assert_close(results["value"], (before.detach(), after.detach()), rtol=1e-5, atol=1e-6)


def test_different_tags_are_warned_of_unless_the_config_says_otherwise(monkeypatch, caplog):
    from hybrid_engine.checkpoint import saving

    monkeypatch.setattr(saving, "gather_objects", lambda tag: ["a", tag])
    assert saving.choose_tag("b", _linear().config.checkpoint.tag_validation) == "a"
    assert "different tags, ['a', 'b']" in caplog.text and "that of rank 0 is used" in caplog.text


def test_processes_with_different_tags_fail_or_use_that_of_rank_0(two_ranks):
    for results in two_ranks:
        assert "different tags, ['tag0', 'tag1']" in results["tags"]
        assert results["warned"].endswith("tag0")


def _four_processes(rank, world_size):
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(0, 4, zero_optimization=zero))
    local = sum(p.to_local().numel() for p in engine.module.parameters())
    return engine.sharding.mesh.shape, local, train_engine(engine, 2)


def test_four_processes_in_two_copies_shard_inside_and_replicate_across():
    expected = train_plainly(tiny_llama(), 2)
    whole = sum(p.numel() for p in tiny_llama().parameters())
    for shape, local, training in run_distributed(_four_processes, 4):
        assert tuple(shape) == (2, 2) and 0.45 * whole < local < 0.55 * whole
        assert training.norms == pytest.approx(expected.norms, rel=TOLERANCE)
        assert relative_error(training.weights, expected.weights) < TOLERANCE


@pytest.mark.parametrize(("block", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_model_in_16_bits_that_becomes_fp32_is_said_with_the_remedy(caplog, block, dtype):
    say_once.cache_clear()
    engine = hybrid_engine.initialize(model=nn.Linear(2, 2).to(dtype), config=MINIMAL)[0]
    assert engine.module.weight.dtype == torch.float32
    assert f"Linear: 2 of its parameters are in {block}" in caplog.text
    assert f'write "{block}": {{"enabled": true}}' in caplog.text


def test_nothing_is_said_of_a_model_that_keeps_its_dtype_or_is_cast_to_the_configs(caplog):
    say_once.cache_clear()
    for model, more in (
        (nn.Linear(2, 2), {}),
        (nn.Linear(2, 2).bfloat16(), {"bf16": {"enabled": True}}),
        (nn.Linear(2, 2), {"bf16": {"enabled": True}}),
    ):
        hybrid_engine.initialize(model=model, config={**MINIMAL, **more})
    assert "of its parameters are in" not in caplog.text
