"""The engine's surface: what it counts and returns, what it refuses, and the model it writes."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import hybrid_engine
from tests.support.distributed import run_distributed
from tests.support.training_reference import batches, engine_config, tiny_llama, train_engine

pytestmark = pytest.mark.quick

MINIMAL = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def _linear(config=None, **more):
    torch.manual_seed(0)
    return hybrid_engine.initialize(model=nn.Linear(3, 2), config=config or MINIMAL, **more)[0]


def _loss(engine):
    return engine(torch.ones(1, 3)).square().sum()


def test_initialize_returns_engine_optimizer_dataloader_and_scheduler():
    data = [torch.ones(3) for _ in range(4)]
    config = {**MINIMAL, "scheduler": {"type": "WarmupLR"}}
    engine, optimizer, dataloader, scheduler = hybrid_engine.initialize(
        model=nn.Linear(3, 2), config=config, training_data=data
    )
    assert isinstance(engine, hybrid_engine.ZeroEngine)
    assert (optimizer, dataloader, scheduler) == (engine.optimizer, engine.training_dataloader, engine.lr_scheduler)
    assert len(dataloader) == 4 and next(iter(dataloader)).shape == (1, 3)


def test_without_an_optimizer_the_engine_only_evaluates():
    engine, optimizer, dataloader, scheduler = hybrid_engine.initialize(
        model=nn.Linear(3, 2), config={"train_batch_size": 1}
    )
    assert (optimizer, dataloader, scheduler) == (None, None, None)
    assert engine(torch.ones(1, 3)).shape == (1, 2) and engine.get_global_grad_norm() is None
    with pytest.raises(ValueError, match="only evaluates; pass an optimizer"):
        engine.backward(_loss(engine))
    with pytest.raises(ValueError, match="only evaluates; pass an optimizer"):
        engine.step()


def test_args_name_the_config_as_with_deepspeed(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 3}')

    class Args:
        deepspeed_config = str(path)

    engine, *_ = hybrid_engine.initialize(Args, nn.Linear(1, 1))
    assert engine.train_batch_size() == 3
    with pytest.raises(ValueError, match=r"got config and args\.deepspeed_config"):
        hybrid_engine.initialize(Args, nn.Linear(1, 1), config={})


def test_it_counts_micro_batches_steps_and_samples():
    engine = _linear({**MINIMAL, "train_batch_size": 6, "gradient_accumulation_steps": 3})
    assert (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (2, 3)
    boundaries = []
    for _ in range(6):
        engine.backward(_loss(engine))
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    assert boundaries == [False, False, True] * 2
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (6, 2, 12)


def test_backward_returns_the_loss_that_is_divided_by_the_accumulation_steps_unless_told_not_to():
    engine = _linear({**MINIMAL, "train_batch_size": 4, "gradient_accumulation_steps": 4})
    loss = _loss(engine)
    assert engine.backward(loss).item() == loss.item() / 4
    expected = torch.autograd.grad(_loss(engine), engine.module.weight)[0]
    torch.testing.assert_close(engine.module.weight.grad, expected / 4)
    loss = _loss(engine)
    assert engine.backward(loss, scale_wrt_gas=False) is loss
    torch.testing.assert_close(engine.module.weight.grad, expected * 1.25)


def test_the_gradient_norm_is_the_one_before_clipping_and_without_the_loss_scale():
    for precision in ({}, {"fp16": {"enabled": True, "loss_scale": 64}}):
        engine = _linear({**MINIMAL, "gradient_clipping": 1e-3, **precision})
        loss = engine(torch.ones(1, 3, dtype=engine.config.dtype)).float().square().sum()
        expected = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, [*engine.parameters()], retain_graph=True)]
        )
        engine.backward(loss)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(expected.float().norm().item(), rel=1e-3)


def test_attributes_of_the_module_are_reached_through_the_engine():
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config())
    assert engine.config.train_batch_size == 8
    assert engine.lm_head is engine.module.lm_head and engine.get_input_embeddings() is engine.module.model.embed_tokens
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing


def test_train_and_eval_reach_the_module():
    engine = _linear()
    assert not engine.eval().module.training and engine.train().module.training


def test_the_optimizer_has_what_scripts_read_and_a_scheduler_can_be_built_on_it():
    engine = _linear()
    optimizer = engine.optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine.backward(_loss(engine))
    engine.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert (optimizer.overflow, optimizer.cur_scale, optimizer.loss_scale) == (False, 1.0, 1.0)
    assert set(optimizer.state) == set(engine.parameters())
    other = _linear()
    other.optimizer.load_state_dict(optimizer.state_dict())
    assert other.optimizer.param_groups[0]["lr"] == 0.05
    torch.testing.assert_close(
        other.optimizer.state[other.module.weight]["exp_avg"], optimizer.state[engine.module.weight]["exp_avg"]
    )


def test_an_overflow_in_fp16_skips_the_step_lowers_the_scale_and_keeps_the_schedule():
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}
    engine = _linear({**MINIMAL, "fp16": fp16, "scheduler": {"type": "WarmupLR"}})
    before = [p.clone() for p in engine.parameters()]
    epoch = engine.lr_scheduler.last_epoch
    for factor in (float("inf"), 1.0, float("nan"), 1.0):
        engine.backward(engine(torch.ones(1, 3).half()).float().sum() * factor)
        engine.step()
        if engine.global_steps == 1:
            assert engine.optimizer.overflow and engine.optimizer.cur_scale == 8
            assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), before, strict=True))
    assert engine.optimizer.cur_scale == 4 and engine.skipped_steps == 2 and engine.global_steps == 4
    assert engine.lr_scheduler.last_epoch == epoch + 2
    assert not engine.optimizer.overflow


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_a_non_finite_gradient_names_the_parameters_and_steps_nothing(precision):
    config = {**MINIMAL, "train_batch_size": 2, "gradient_accumulation_steps": 2, **precision}
    model = nn.ModuleDict({f"part{i}": nn.Linear(1, 1) for i in range(8)})
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    before = [p.clone() for p in engine.parameters()]
    ones = torch.ones(1, 1, dtype=engine.config.dtype)
    engine.backward(sum(part(ones) for part in model.values()).sum())
    engine.step()
    engine.backward(sum(model[f"part{i}"](ones) for i in range(2, 6)).sum() * float("nan"))
    with pytest.raises(
        ValueError, match=r"nan.*8 of 16 parameters.*part2\.weight, part2\.bias, part3\.weight"
    ) as error:
        engine.step()
    assert "part4.weight" in str(error.value) and "part4.bias" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), before, strict=True))
    assert (engine.global_steps, engine.micro_steps) == (0, 0)
    assert all(p.grad is None for p in engine.parameters())


def test_step_without_backward_is_an_error():
    engine = _linear()
    with pytest.raises(ValueError, match="call backward"):
        engine.step()
    engine.backward(_loss(engine))
    engine.step()
    with pytest.raises(ValueError, match="call backward"):
        engine.step()
    assert engine.global_steps == 1


def test_backward_refuses_what_is_not_one_number_with_a_gradient():
    engine = _linear()
    with pytest.raises(ValueError, match=r"shape \(1, 2\).*loss\.mean\(\)"):
        engine.backward(engine(torch.ones(1, 3)))
    with pytest.raises(ValueError, match="shape float"):
        engine.backward(1.0)
    with pytest.raises(ValueError, match="requires_grad is False"):
        engine.backward(_loss(engine).detach())
    with pytest.raises(ValueError, match="call backward"):
        engine.step()


def _stepped(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


BF16 = {**MINIMAL, "bf16": {"enabled": True}}
REFUSED = {
    "model=NoneType must be a torch": lambda model: {"model": None, "config": BF16},
    "optimizer=str must be a torch Optimizer or a function": lambda model: {"config": BF16, "optimizer": "AdamW"},
    "lr_scheduler=float must be a torch LRScheduler": lambda model: {"config": BF16, "lr_scheduler": 0.1},
    "got nothing; pass exactly one config": lambda model: {},
    "mpu: it says nothing of the model parallel size": lambda model: {"config": MINIMAL, "mpu": object()},
    "is not a parameter of the model": lambda model: {
        "config": BF16,
        "optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1),
    },
    "entry 1 of a group is a int": lambda model: {"config": BF16, "model_parameters": [model.weight, 2]},
    r"a group with \['lr'\] has no \"params\"": lambda model: {"config": BF16, "model_parameters": [{"lr": 0.1}]},
    "none of the 2 parameters.*requires_grad_": lambda model: {"model": model.requires_grad_(False), "config": BF16},
    "no optimizer to schedule": lambda model: {
        "config": {"train_batch_size": 1, "bf16": {"enabled": True}, "scheduler": {"type": "WarmupLR"}}
    },
    "it schedules another optimizer": lambda model: {
        "config": BF16,
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1), 1),
    },
    "it has stepped before": lambda model: {"config": BF16, "optimizer": _stepped(model)},
    "has no length and index": lambda model: {"config": BF16, "training_data": iter([1])},
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_cannot_be_trained_is_refused_and_the_model_is_as_it_was(pattern):
    model = nn.Linear(3, 2)
    arguments = {"model": model, **REFUSED[pattern](model)}
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match=pattern):
        hybrid_engine.initialize(**arguments)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p.dtype == torch.float32 for p in parameters)


def test_steps_per_print_prints_one_line_each_so_many_steps(capsys):
    engine = _linear({**MINIMAL, "steps_per_print": 2})
    for _ in range(5):
        engine.backward(_loss(engine))
        engine.step()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step=2", "step=4"]
    assert "loss=" in lines[0] and "lr=[0.1]" in lines[0] and "grad_norm=" in lines[0]


def test_the_report_gives_the_bytes_of_parameters_masters_and_state():
    model = nn.Linear(256, 256, bias=False)
    config = {**MINIMAL, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(1, 256).bfloat16()).sum())
    engine.step()
    report = engine.report()
    assert "stage 3, rank 0 of 1" in report and "bfloat16" in report and "unwrapped" in report
    assert "parameters: 128.0 KiB" in report and "masters: 256.0 KiB" in report and "state: 512.0 KiB (AdamW)" in report


def _models(tie, with_adapters):
    torch.manual_seed(0)
    model = tiny_llama(tie=tie)
    if not with_adapters:
        return model
    # Not the initialisation of zeros: an adapter that does nothing could not be lost.
    config = LoraConfig(r=3, use_rslora=True, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(model, config)
    model.add_adapter("idle", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    return model


def _train_and_export(rank, world_size, folder):
    """Logits of the live engine and of the folder it wrote, for tied and untied heads, with and without adapters."""
    results = {}
    for tie in (True, False):
        for with_adapters in (True, False):
            engine, *_ = hybrid_engine.initialize(
                model=_models(tie, with_adapters), config=engine_config(3, world_size)
            )
            train_engine(engine, 3)
            before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            path = engine.save_16bit_model(folder / f"{tie}_{with_adapters}")
            kept = all(torch.equal(_local(p), _local(before[n])) for n, p in engine.module.named_parameters())
            tokens = batches(1)[0][0]
            with torch.no_grad():
                live = engine.eval()(input_ids=tokens).logits
            results[tie, with_adapters] = (path, tokens, live, kept)
    return results


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_saved_model_loads_with_from_pretrained_and_computes_the_same(tmp_path, world_size):
    ranks = [_train_and_export(0, 1, tmp_path)] if world_size == 1 else run_distributed(_train_and_export, 2, tmp_path)
    for results in ranks:
        for (tie, with_adapters), (path, tokens, live, kept) in results.items():
            assert kept, "saving changed the live weights"
            loaded = AutoModelForCausalLM.from_pretrained(path)
            assert type(loaded).__name__ == "LlamaForCausalLM" and not hasattr(loaded, "peft_config")
            assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tie
            with torch.no_grad():
                logits = loaded(input_ids=tokens).logits
            tolerance = 1e-6 if with_adapters else 0
            torch.testing.assert_close(logits, live, rtol=tolerance, atol=tolerance)
            assert sorted(p.name for p in path.iterdir()) == [
                "config.json",
                "generation_config.json",
                "model.safetensors",
            ]


def test_a_module_that_is_not_of_transformers_is_saved_as_a_state_dict(tmp_path):
    engine = _linear({**MINIMAL, "bf16": {"enabled": True}})
    engine.save_16bit_model(tmp_path)
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert state.keys() == engine.module.state_dict().keys() and state["weight"].dtype == torch.bfloat16
    assert all(torch.equal(tensor, engine.module.state_dict()[name]) for name, tensor in state.items())


def test_a_file_name_asks_for_a_state_dict_of_a_model_of_transformers(tmp_path):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(3))
    engine.save_16bit_model(tmp_path, "model.bin")
    loaded = tiny_llama(seed=1)
    loaded.load_state_dict(torch.load(tmp_path / "model.bin", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), engine.parameters(), strict=True))


def test_a_stage_3_model_is_not_gathered_for_saving_where_the_config_forbids_it(tmp_path, caplog):
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    engine = _linear({**MINIMAL, "zero_optimization": zero})
    assert engine.save_16bit_model(tmp_path) is False and not list(tmp_path.iterdir())
    assert "stage3_gather_16bit_weights_on_model_save is false" in caplog.text
