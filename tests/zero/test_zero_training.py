"""Training through the engine equals a plain PyTorch loop: every stage, one process and two, every parameter."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hybrid_engine
from hybrid_engine.optim import masters as masters_module
from hybrid_engine.optim.masters import fingerprint
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.training_reference import (
    ADAM,
    batches,
    engine_config,
    relative_error,
    tiny_llama,
    train_engine,
    train_plainly,
    whole_weights,
)

pytestmark = [pytest.mark.long, pytest.mark.torch_versions]

STEPS = 4
FEW = 3  # the first whose learning rate is above zero is the third
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def plain():
    return train_plainly(tiny_llama(), STEPS)


@pytest.fixture(scope="module")
def briefly():
    """The weights of a plain loop of few steps."""
    return train_plainly(tiny_llama(), FEW).weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_process_trains_like_a_plain_loop_at_every_stage(stage, plain):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage))
    result = train_engine(engine, STEPS)
    assert result.losses == pytest.approx(plain.losses, rel=TOLERANCE)
    assert result.norms == pytest.approx(plain.norms, rel=TOLERANCE)
    assert relative_error(result.weights, plain.weights) < TOLERANCE
    assert engine.global_steps == STEPS and engine.global_samples == 8 * STEPS


def test_one_process_wraps_nothing():
    model = tiny_llama()
    parameters = list(model.parameters())
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config(3))
    assert engine.module is model and not engine.sharding.is_sharded and engine.sharding.layers == []
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_every_parameter_moves_exactly_as_without_the_engine(plain):
    start = dict(tiny_llama(tie=False).named_parameters())
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(tie=False), config=engine_config())
    moved = train_engine(engine, STEPS).weights
    expected = train_plainly(tiny_llama(tie=False), STEPS).weights
    assert "lm_head.weight" in moved
    for name in expected:
        assert not torch.equal(moved[name], start[name]), name
    assert relative_error(moved, expected) < TOLERANCE


def test_two_engines_in_one_process_do_not_know_of_each_other(briefly):
    other_alone, *_ = hybrid_engine.initialize(model=tiny_llama(5), config=engine_config(2))
    expected = train_engine(other_alone, FEW)
    first, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(3))
    second, *_ = hybrid_engine.initialize(model=tiny_llama(5), config=engine_config(2))
    for step in range(FEW):
        train_engine(first, 1, first_step=step)
        train_engine(second, 1, first_step=step)
    assert relative_error(whole_weights(first), briefly) < TOLERANCE
    assert all(torch.equal(p, expected.weights[name]) for name, p in second.module.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_steps_fp32_masters_with_gradients_added_up_in_fp32(dtype):
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    precision = {"enabled": True} if name == "bf16" else {"enabled": True, "loss_scale": 256}
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(**{name: precision}))
    train_engine(engine, 3)
    expected = _train_with_masters(tiny_llama(), dtype, 3, scale=1 if name == "bf16" else 256)
    masters = {t.name: t.master.detach() for t in engine.optimizer.parameters}
    assert relative_error(masters, expected) < TOLERANCE
    for name, param in engine.module.named_parameters():
        assert param.dtype == dtype
        assert torch.equal(param, masters[name].to(dtype)), name
    assert all(buffer.dtype == torch.float32 for buffer in engine.module.buffers())


def _train_with_masters(model: nn.Module, dtype: torch.dtype, num_steps: int, scale: int) -> dict[str, torch.Tensor]:
    """A plain loop: the masters step, the model is their rounding, as in `train_plainly` otherwise."""
    for param in model.parameters():
        param.data = param.data.to(dtype)
    masters = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), **ADAM)
    for step, micro_batches in enumerate(batches(num_steps)):
        optimizer.param_groups[0]["lr"] = ADAM["lr"] * max(0, step - 1) / 3
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for tokens in micro_batches:
            (model(input_ids=tokens, labels=tokens).loss.float() / len(micro_batches) * scale).backward()
            for name, param in model.named_parameters():
                sums[name] += param.grad.float() / scale
                param.grad = None
        for name, master in masters.items():
            master.grad = sums[name]
        nn.utils.clip_grad_norm_(masters.values(), 0.5)
        optimizer.step()
        for name, param in model.named_parameters():
            param.data.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


def test_what_is_written_into_bf16_weights_reaches_their_masters_and_the_rest_keeps_its_precision(tmp_path):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(bf16={"enabled": True}))
    engine.module.load_state_dict(_write(tiny_llama()).state_dict())
    train_engine(engine, 3)
    expected = _train_with_masters(_write(tiny_llama()), torch.bfloat16, 3, scale=1)
    masters = {t.name: t.master.detach() for t in engine.optimizer.parameters}
    assert relative_error(masters, expected) < TOLERANCE
    before = {name: master.clone() for name, master in masters.items()}
    embedding = engine.module.model.embed_tokens.weight
    embedding.data[3, 4] = 7.0
    engine.save_checkpoint(tmp_path)
    before["model.embed_tokens.weight"][3, 4] = 7.0
    assert all(torch.equal(masters[name], before[name]) for name in before)
    embedding.data[3, 4] = 8.0
    engine.load_checkpoint(tmp_path)
    assert embedding[3, 4] == 7.0 and all(torch.equal(masters[name], before[name]) for name in before)


def _write_nothing(model):
    """Reads all, as a script that logs norms does."""
    assert all(param.data.norm() > 0 for param in model.parameters())


def _write_through_data(model):
    model.model.embed_tokens.weight.data[3, 4] = 7.0  # the version counter stays
    model.model.norm.weight.data = model.model.norm.weight.data * 2.0


def _write_in_place(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def _write_a_state_dict(model):
    model.load_state_dict(_write(tiny_llama()).state_dict())


@pytest.mark.parametrize(
    ("write", "num_written"),
    [(_write_nothing, 0), (_write_through_data, 2), (_write_in_place, 1), (_write_a_state_dict, None)],
)
def test_values_are_compared_with_masters_elsewhere_of_those_parameters_alone_that_were_written_to(
    write, num_written, monkeypatch
):
    """Without a second device masters are only said to lie apart."""
    engines = [
        hybrid_engine.initialize(model=tiny_llama(), config=engine_config(bf16={"enabled": True}))[0] for _ in range(2)
    ]
    compared, trained, renew = [], [], masters_module.renew_masters

    def noted(pairs):
        compared.append(len(pairs))
        renew(pairs)

    for engine, is_apart in zip(engines, (False, True), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(masters_module, "lies_apart", lambda *pair, is_apart=is_apart: is_apart)
            patch.setattr(masters_module, "renew_masters", noted)
            train_engine(engine, 2)
            write(engine.module)
            train_engine(engine, 2, first_step=2)
        trained.append({t.name: t.master.detach() for t in engine.optimizer.parameters})
    everything = len(trained[0])
    assert compared == [everything] * 4 + [everything, 0, everything if num_written is None else num_written, 0]
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 5, 64, 1003])
def test_a_fingerprint_tells_bits_and_places(dtype, size, monkeypatch):
    monkeypatch.setattr(masters_module, "WORDS_AT_ONCE", 50)
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    shifted = torch.cat((values.new_zeros(3), values))[3:]
    changes = {"same": values.clone(), "elsewhere": shifted, "opposite": -values}
    for place in (0, size - 1):
        changes[f"a bit at {place}"] = torch.nextafter(values, values + 1).where(torch.arange(size) == place, values)
        changes[f"the sign at {place}"] = values.where(torch.arange(size) != place, -values)
    if size > 8:
        places = torch.arange(size)
        changes |= {"turned round": values.flip(0), "moved": values.roll(4), "moved by a block": values.roll(400)}
        changes["two highest bits"] = values.where((places != 3) & (places != 7), -values)
    found = {name: torch.equal(fingerprint(values), fingerprint(other)) for name, other in changes.items()}
    assert found == {name: name in ("same", "elsewhere") for name in changes}


def test_frozen_parameters_have_no_master_no_state_and_do_not_move():
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(tiny_llama(), config)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config(bf16={"enabled": True}))
    after = train_engine(engine, 3).weights
    trained = {t.name for t in engine.optimizer.parameters}
    assert len(engine.optimizer.state) == len(trained) == 8
    for name in before:
        assert ("lora_" in name) == (name in trained)
        if name not in trained:
            assert torch.equal(after[name], before[name].bfloat16()), name


def test_an_optimizer_instance_keeps_its_groups_and_its_scheduler():
    model = tiny_llama()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": 3e-3}]
    optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    reference, reference_optimizer = copy.deepcopy((model, optimizer))
    config = engine_config(gradient_clipping=0, bf16={"enabled": False})
    engine, shim, _, returned = hybrid_engine.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    assert returned is scheduler and shim.inner is optimizer
    train_engine(engine, 3)
    for step, micro_batches in enumerate(batches(3)):
        for group, lr in zip(reference_optimizer.param_groups, (1e-2, 3e-3), strict=True):
            group["lr"] = lr * 0.5**step
        for tokens in micro_batches:
            (reference(input_ids=tokens, labels=tokens).loss / 4).backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
    expected = {name: param.detach() for name, param in reference.named_parameters()}
    assert relative_error(whole_weights(engine), expected) < TOLERANCE
    assert engine.get_lr() == pytest.approx([1e-2 / 8, 3e-3 / 8])


def test_functions_build_the_optimizer_and_the_scheduler():
    model = tiny_llama()
    engine, shim, _, scheduler = hybrid_engine.initialize(
        model=model,
        model_parameters=(p for p in model.parameters()),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
        config=engine_config(),
    )
    train_engine(engine, 1)
    assert isinstance(shim.inner, torch.optim.SGD)
    assert scheduler.get_last_lr() == engine.get_lr() == pytest.approx([0.05])


def _two_processes(rank, world_size):
    """Everything that two processes must show, in one start-up of them."""
    results = {}
    for stage in range(4):
        # Rank 1 begins with other weights: those of rank 0 count.
        config = engine_config(stage, world_size)
        engine, *_ = hybrid_engine.initialize(model=tiny_llama(seed=rank), config=config)
        results["train", stage] = train_engine(engine, STEPS)
        results["layers", stage] = len(engine.sharding.layers)
        with engine.sharding.as_shards():
            results["local", stage] = sum(p.to_local().numel() for p in engine.module.parameters())
        results["between", stage] = _read_between_steps(rank, engine)
        results["written", stage] = _write_before_steps(world_size, stage) if stage < 3 else None
        results["written bf16", stage] = _write_before_steps(world_size, stage, bf16={"enabled": True})
        results["tied"] = engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
        results["stale", stage] = _forward_between_backward_and_step(rank, world_size, stage)
        results["dropped", stage] = _drop_gradients_of_half_a_step(rank, world_size, stage)
        results["lora", stage] = _train_lora(world_size, stage)
        results["lora, written to", stage] = _write_to_the_base(world_size, stage) if stage < 3 else None
        results["bf16", stage] = _train_bf16(rank, world_size, stage)
        results["fp16", stage] = _overflow_on_one_rank(rank, world_size, stage)
        results["nan", stage] = _nan_on_one_rank(rank, world_size, stage)
        results["interrupted", stage] = _interrupted_passes(world_size, stage)
        results["moved", stage] = _moved_by_to(rank, world_size, stage)
    results["evaluates"] = _evaluate_at_stage_3()
    results["gathered"] = _gathered_after_each_pass_at_stage_3()
    results["refused"] = _other_architecture(rank)
    return results


def _interrupted_passes(world_size, stage):
    """An error in a forward and in a backward pass, on all processes, as when memory runs out; then training."""
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage, world_size))
    tokens = torch.arange(12)[None]
    layer = engine.module.model.layers[0]

    def fail(*args):
        raise KeyError("interrupted")

    handle = layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="interrupted"):
        engine(input_ids=tokens, labels=tokens)
    handle.remove()
    loss = engine(input_ids=tokens, labels=tokens).loss
    handle = layer.mlp.register_full_backward_hook(fail)
    loss = engine(input_ids=tokens, labels=tokens).loss
    with pytest.raises(KeyError, match="interrupted"):
        engine.backward(loss)
    handle.remove()
    engine.zero_grad()
    return train_engine(engine, FEW).weights


def _moved_by_to(rank, world_size, stage):
    """What a script finds after `to()`, and where training then leads, also in bf16."""
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage, world_size))
    before = [(type(p), sorted(vars(p))) for p in engine.module.parameters()]
    assert engine.to("cpu") is engine
    after = [(type(p), sorted(vars(p))) for p in engine.module.parameters()]
    return before, after, train_engine(engine, FEW).weights, _train_bf16(rank, world_size, stage, moves=True)


def _read_between_steps(rank, engine):
    """What a script finds that gathers nothing, and reads the state dict on one process only."""
    module = engine.module
    is_plain = [not isinstance(p, DTensor) for p in module.parameters()]
    copied = {name: param.data.cpu().clone() for name, param in module.named_parameters()} if all(is_plain) else {}
    state = module.state_dict() if rank == 0 and copied else {}
    return is_plain, copied, {name: tensor.clone() for name, tensor in state.items()}


def _write_before_steps(world_size, stage, **more):
    """What is written into the weights counts in the next step, as in a plain loop."""
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage, world_size, **more))
    with hybrid_engine.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        _write(engine.module)
    train_engine(engine, FEW)
    with engine.sharding.as_shards():
        return {t.name: full_tensor(t.master).clone() for t in engine.optimizer.parameters}


def _write(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    model.model.norm.weight.data.mul_(2.0)
    return model


def _evaluate_at_stage_3():
    engine, *_ = hybrid_engine.initialize(
        model=tiny_llama(), config={"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    )
    with torch.no_grad():
        logits = [engine(input_ids=torch.arange(12)[None]).logits for _ in range(2)]
    is_sharded_again = all(isinstance(p, DTensor) for p in engine.module.parameters())
    return logits, is_sharded_again


def _gathered_after_each_pass_at_stage_3():
    """The names of whole parameters after a forward pass for a backward pass, after that, and after one without."""
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(3, 2))

    def whole():
        return [name for name, param in engine.module.named_parameters() if not isinstance(param, DTensor)]

    tokens = torch.arange(12)[None]
    loss = engine(input_ids=tokens, labels=tokens).loss
    found = [whole()]
    engine.backward(loss)
    found.append(whole())
    with torch.no_grad():
        engine(input_ids=tokens)
    return [*found, whole()]


def _other_architecture(rank):
    try:
        hybrid_engine.initialize(model=nn.Linear(2 + rank, 2), config={"train_batch_size": 2})
    except ValueError as error:
        return str(error)
    return None


def _forward_between_backward_and_step(rank, world_size, stage):
    """A forward pass without gradients leaves gathered weights behind; the step must not leave them stale."""
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage, world_size))
    for micro_batches in batches(FEW):
        for tokens in micro_batches[rank::world_size]:
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            with torch.no_grad():
                engine(input_ids=tokens)
            engine.step()
            with torch.no_grad():
                logits = engine(input_ids=tokens).logits
    return logits, tokens


def _drop_gradients_of_half_a_step(rank, world_size, stage):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage, world_size))
    tokens = torch.full((2, 12), 3 + rank)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.zero_grad()
    return train_engine(engine, FEW).weights


def _train_lora(world_size, stage):
    model = get_peft_model(tiny_llama(), LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config(stage, world_size))
    return train_engine(engine, FEW).weights


class _GatheredBytes(TorchDispatchMode):
    """Counts what all-gathers give, whole."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            self.num_bytes += sum(tensor.nbytes for tensor in tree_leaves(args[0]))
        return func(*args, **(kwargs or {}))


def _write_to_the_base(world_size, stage):
    """Adapters are trained, the frozen base is written to between two steps; and what each step gathers."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    engine, *_ = hybrid_engine.initialize(model=model, config=engine_config(stage, world_size))
    with _GatheredBytes() as gathered:
        train_engine(engine, 3)
        base, counted = engine.module.base_model.model.model, [gathered.num_bytes]
        base.norm.weight.data.mul_(2.0)
        base.embed_tokens.weight.data = base.embed_tokens.weight.data * 1.5
        with torch.no_grad():
            base.layers[0].mlp.up_proj.weight.mul_(0.5)
        train_engine(engine, 1, first_step=3)
        counted.append(gathered.num_bytes - counted[0])
    adapters = sum(t.param.to_local().nbytes * world_size for t in engine.optimizer.parameters if stage)
    whole = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    train_engine(engine, 1, first_step=4)
    return counted, adapters, whole, whole_weights(engine)


def _bf16_engine(stage, world_size):
    """An engine whose gradients are the same numbers in any order of sums but FSDP2's, which is exact for two ranks.

    One rounding to bf16 that turns out otherwise would grow: so without clipping by a norm, and without tied weights,
    whose gradients torch adds up in bf16 or in fp32 depending on its version.
    """
    config = engine_config(stage, world_size, bf16={"enabled": True}, gradient_clipping=0.0)
    return hybrid_engine.initialize(model=tiny_llama(tie=False), config=config)[0]


def _train_bf16(rank, world_size, stage, moves=False):
    engine = _bf16_engine(stage, world_size)
    if moves:
        engine.to("cpu")
    train_engine(engine, FEW)
    return {t.name: t.master.full_tensor().detach() for t in engine.optimizer.parameters}


def _overflow_on_one_rank(rank, world_size, stage):
    config = engine_config(stage, world_size, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    engine, optimizer, _, scheduler = hybrid_engine.initialize(model=tiny_llama(), config=config)
    before, tokens = whole_weights(engine), torch.full((2, 12), 3)
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss * (float("inf") if rank == 1 else 1.0))
        engine.step()
    unchanged = all(torch.equal(w, before[name]) for name, w in whole_weights(engine).items())
    return unchanged, optimizer.overflow, optimizer.cur_scale, engine.skipped_steps, scheduler.last_epoch


def _nan_on_one_rank(rank, world_size, stage):
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(), config=engine_config(stage, world_size))
    tokens = torch.full((2, 12), 3)
    try:
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss * (float("nan") if rank == 1 else 1.0))
            engine.step()
    except ValueError as error:
        return str(error), train_engine(engine, FEW).weights
    return None


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(_two_processes, 2)


def test_two_processes_train_like_a_plain_loop_at_every_stage(two_ranks, plain):
    for stage in range(4):
        first, second = (results["train", stage] for results in two_ranks)
        losses = [(a + b) / 2 for a, b in zip(first.losses, second.losses, strict=True)]
        assert losses == pytest.approx(plain.losses, rel=TOLERANCE)
        assert first.norms == pytest.approx(plain.norms, rel=TOLERANCE)
        assert relative_error(first.weights, plain.weights) < TOLERANCE
        assert all(torch.equal(first.weights[name], second.weights[name]) for name in plain.weights)


def test_stage_0_replicates_and_the_others_keep_about_half_in_one_group_per_layer(two_ranks):
    whole = sum(p.numel() for p in tiny_llama().parameters())
    for results in two_ranks:
        assert results["local", 0] == whole
        assert all(0.45 * whole < results["local", stage] < 0.55 * whole for stage in (1, 2, 3))
        assert all(results["layers", stage] == 2 for stage in range(4))


def test_below_stage_3_parameters_are_whole_plain_tensors_between_steps(two_ranks):
    for stage in range(3):
        for results in two_ranks:
            is_plain, copied, _ = results["between", stage]
            expected = results["train", stage].weights
            assert all(is_plain) and copied.keys() == expected.keys()
            assert all(torch.equal(copied[name], expected[name]) for name in expected)
        state = two_ranks[0]["between", stage][2]
        assert state.keys() == tiny_llama().state_dict().keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert not any(two_ranks[0]["between", 3][0])


def test_below_stage_3_what_is_written_into_weights_stays_there(two_ranks):
    expected = train_plainly(_write(tiny_llama()), FEW).weights
    for stage in range(3):
        for results in two_ranks:
            assert relative_error(results["written", stage], expected) < TOLERANCE


def test_masters_of_two_processes_follow_what_is_written_into_bf16_weights(two_ranks):
    untouched = _train_with_masters(tiny_llama(), torch.bfloat16, FEW, scale=1)
    expected = _train_with_masters(_write(tiny_llama().bfloat16()), torch.bfloat16, FEW, scale=1)
    for results in two_ranks:
        for stage in range(4):
            distance = relative_error(results["written bf16", stage], expected)
            assert distance < 0.05 * relative_error(untouched, expected)


def test_tied_weights_stay_tied_when_sharded(two_ranks):
    assert all(results["tied"] for results in two_ranks)


def test_a_forward_pass_before_the_step_leaves_no_stale_weights_behind(two_ranks, briefly):
    reference = tiny_llama()
    reference.load_state_dict(briefly, strict=False)
    for stage in range(4):
        logits, tokens = two_ranks[1]["stale", stage]
        with torch.no_grad():
            torch.testing.assert_close(logits, reference(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)


def test_an_evaluation_engine_at_stage_3_holds_only_its_shards_between_forward_passes(two_ranks):
    with torch.no_grad():
        expected = tiny_llama()(input_ids=torch.arange(12)[None]).logits
    for results in two_ranks:
        logits, is_sharded_again = results["evaluates"]
        assert is_sharded_again
        for value in logits:
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


def test_at_stage_3_only_what_a_backward_pass_begins_with_stays_whole_and_only_until_then(two_ranks):
    for results in two_ranks:
        assert results["gathered"] == [["model.embed_tokens.weight", "model.norm.weight"], [], []]


def test_processes_with_different_architectures_are_refused_on_all(two_ranks):
    assert all("the same architecture on every process" in results["refused"] for results in two_ranks)


def test_zero_grad_forgets_the_micro_batches_before_it(two_ranks, briefly):
    for stage in range(4):
        assert relative_error(two_ranks[0]["dropped", stage], briefly) < TOLERANCE


def test_adapters_train_on_two_processes_as_on_one(two_ranks):
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
    expected = train_plainly(model, FEW).weights
    # lora_B starts at zero: its largest entry is about the sum of the learning rates, and errors are in units of it.
    for stage in range(4):
        assert relative_error(two_ranks[0]["lora", stage], expected) < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_of_adapters_gathers_them_alone_and_keeps_what_was_written_to_the_base(two_ranks, stage):
    _, _, after_four, after_five = _write_to_the_base(1, 0)
    for results in two_ranks:
        counted, adapters, whole, last = results["lora, written to", stage]
        assert counted == [3 * adapters, adapters]
        assert relative_error(whole, after_four) < 1e-5 and relative_error(last, after_five) < 1e-5


def test_bf16_masters_of_two_processes_are_those_of_one_because_gradients_are_reduced_and_kept_in_fp32(two_ranks):
    engine = _bf16_engine(stage=0, world_size=1)
    train_engine(engine, FEW)
    expected = {t.name: t.master.detach() for t in engine.optimizer.parameters}
    for stage in range(4):
        assert relative_error(two_ranks[0]["bf16", stage], expected) < TOLERANCE


def test_training_goes_on_after_an_error_in_a_forward_or_backward_pass(two_ranks, briefly):
    for results in two_ranks:
        for stage in range(4):
            assert relative_error(results["interrupted", stage], briefly) < TOLERANCE


def test_an_engine_may_be_moved_and_its_parameters_keep_their_attributes(two_ranks, briefly):
    for stage in range(4):
        for results in two_ranks:
            before, after, weights, bf16_masters = results["moved", stage]
            assert before == after
            assert any("ds_id" in names for _, names in before) == (stage == 3)
            assert relative_error(weights, briefly) < TOLERANCE
            assert relative_error(bf16_masters, results["bf16", stage]) == 0


def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks):
    for results in two_ranks:
        for stage in range(4):
            assert results["fp16", stage] == (True, True, 2.0**7, 1, 0)


def test_a_nan_on_one_rank_is_the_same_error_on_all_and_training_goes_on_as_if_it_had_not_been(two_ranks, briefly):
    for stage in range(4):
        (message, weights), (other_message, _) = (results["nan", stage] for results in two_ranks)
        assert message == other_message
        assert "20 of 20 parameters" in message and "model.embed_tokens.weight" in message
        assert relative_error(weights, briefly) < TOLERANCE
