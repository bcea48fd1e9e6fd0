"""Training scripts as DeepSpeed's tutorials, Megatron's and OpenRLHF's loops write them, in one process."""

import argparse
import json
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hybrid_engine as deepspeed
from tests.support.distributed import free_port
from tests.support.fresh_python import run_python

pytestmark = pytest.mark.long

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.8, 0.999]}}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class MegatronSchedule:
    """As Megatron's: an object of no class of torch, stepped by samples."""

    def __init__(self, optimizer):
        self.optimizer, self.num_steps = optimizer, 0

    def step(self, increment):
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 1.0 / self.num_steps

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


class Mpu:
    """Megatron's description of model parallelism, as far as DeepSpeed asks it."""

    def __init__(self, size):
        self.size = size

    def get_model_parallel_world_size(self):
        return self.size


def test_a_classifier_in_the_style_of_the_cifar_tutorial_learns():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args(["--deepspeed"])
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = [(x, int(x[:3].argmax())) for x in inputs]
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=data, config=CONFIG
    )
    device = deepspeed.accelerator.get_accelerator().device_name(engine.local_rank)
    epochs = []
    for _ in range(8):
        losses = []
        for batch in loader:
            loss = nn.CrossEntropyLoss()(engine(batch[0].to(device)), batch[1].to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        epochs.append(sum(losses) / len(losses))
    assert epochs[-1] < 0.5 * epochs[0] and engine.global_samples == 8 * 48 and optimizer is engine.optimizer


def test_a_schedule_of_megatrons_steps_by_samples_and_is_saved(tmp_path):
    def build():
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        return deepspeed.initialize(
            model=net,
            optimizer=optimizer,
            args=SimpleNamespace(local_rank=0),
            lr_scheduler=MegatronSchedule(optimizer),
            mpu=Mpu(1),
            config={"train_batch_size": 4},
            dist_init_required=False,
        )

    engine, _, _, schedule = build()
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 4)).square().mean())
        engine.step(lr_kwargs={"increment": 4})
    assert engine.get_lr() == [1 / 8] and schedule.num_steps == 8
    engine.save_checkpoint(tmp_path)
    resumed, _, _, schedule = build()
    resumed.load_checkpoint(tmp_path)
    assert schedule.num_steps == 8 and resumed.get_lr() == [1 / 8]


def test_a_schedule_on_another_optimizer_or_without_the_methods_is_refused():
    schedule = MegatronSchedule(torch.optim.SGD(Net().parameters(), lr=1.0))
    with pytest.raises(ValueError, match="it schedules another optimizer"):
        deepspeed.initialize(model=Net(), config=CONFIG, lr_scheduler=schedule)
    with pytest.raises(ValueError, match="lr_scheduler=object must be a torch LRScheduler"):
        deepspeed.initialize(model=Net(), config=CONFIG, lr_scheduler=object())


def test_model_and_sequence_parallelism_are_refused_and_their_absence_is_not():
    for arguments in ({"mpu": Mpu(1)}, {"mesh_param": (1, 1)}):
        assert deepspeed.initialize(model=Net(), config=CONFIG, **arguments)[0].optimizer is not None
    with pytest.raises(ValueError, match=r"mpu: it says \[2\] of the model parallel size, which must be 1"):
        deepspeed.initialize(model=Net(), config=CONFIG, mpu=Mpu(2))
    with pytest.raises(ValueError, match=r"mesh_param=\(1, 2\) asks for sequence parallelism"):
        deepspeed.initialize(model=Net(), config=CONFIG, mesh_param=(1, 2))


@pytest.mark.parametrize(
    ("is_file", "arguments"),
    [
        (False, lambda config: {"config": config}),
        (True, lambda path: {"config": path}),
        (True, lambda path: {"config": str(path)}),
        (False, lambda config: {"config_params": config}),
        (True, lambda path: {"config_params": str(path)}),
        (True, lambda path: {"args": SimpleNamespace(deepspeed_config=str(path))}),
        (True, lambda path: {"args": SimpleNamespace(deepscale_config=str(path))}),
    ],
)
def test_initialize_takes_the_config_in_each_of_deepspeeds_ways(tmp_path, is_file, arguments):
    config, path = {**CONFIG, "gradient_clipping": 0.25}, tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    engine = deepspeed.initialize(model=Net(), **arguments(path if is_file else config))[0]
    assert (engine.train_batch_size(), engine.gradient_clipping()) == (4, 0.25)
    assert engine.optimizer.param_groups[0]["betas"] == (0.8, 0.999)


def test_batches_of_the_training_data_are_made_by_the_function_that_is_passed():
    def collate(samples):
        return {"x": torch.tensor(samples), "num": len(samples)}

    _, _, loader, _ = deepspeed.initialize(model=Net(), training_data=list(range(8)), collate_fn=collate, config=CONFIG)
    batches = list(loader)
    assert [batch["num"] for batch in batches] == [4, 4]
    assert sorted(torch.cat([batch["x"] for batch in batches]).tolist()) == list(range(8))


ALONE = """
import sys, torch
import hybrid_engine as deepspeed
model = torch.nn.Linear(2, 2)
required = {"required": True, "forbidden": False}.get(sys.argv[1])
engine, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 1}, dist_init_required=required)
if sys.argv[1] in ("launched", "required"):
    torch.distributed.barrier()
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
else:
    assert not torch.distributed.is_initialized()
"""


@pytest.mark.parametrize("case", ["launched", "required", "forbidden", "plain"])
def test_a_single_process_has_a_process_group_where_a_launcher_started_it_or_it_is_required(case):
    """Scripts go on with torch.distributed after initialize(), also with --num_gpus 1."""
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    rest = {name: value for name, value in os.environ.items() if name not in launched}
    environment = {**rest, **(launched if case in ("launched", "forbidden") else {}), "CUDA_VISIBLE_DEVICES": ""}
    result = run_python("-c", ALONE, case, env=environment)
    assert result.returncode == 0, result.stderr


def test_the_batch_size_grows_between_two_steps_as_megatrons_ramps_do():
    """The steps are those of a plain loop over the same samples."""
    net, inputs = Net(), torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    config = {**CONFIG, "train_batch_size": 2, "train_micro_batch_size_per_gpu": 2}
    engine = deepspeed.initialize(model=Net(), config=config)[0]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.8, 0.999), weight_decay=0.0)
    for batch in inputs.split([2, 4, 6]):
        engine.set_train_batch_size(len(batch))
        for part in batch.split(2):
            engine.backward(engine(part).square().mean())
            engine.step()
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    assert (engine.global_steps, engine.global_samples) == (3, 12)
    assert engine.get_batch_info() == (6, 2, 3) and engine.tput_timer.batch_size == 6
    for ours, theirs in zip(engine.module.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    engine.backward(engine(inputs[:2]).sum())
    engine.step()
    with pytest.raises(ValueError, match="1 micro-batches of a step are done"):
        engine.set_train_batch_size(2)
    with pytest.raises(ValueError, match="train_batch_size=3 must be a multiple of train_micro_batch_size_per_gpu=2"):
        engine.set_train_batch_size(3)
    engine.zero_grad()
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (9, 3, 3)


def test_dropout_in_megatrons_random_state_leaves_the_others_alone():
    checkpointing = deepspeed.checkpointing
    checkpointing.configure(Mpu(1), deepspeed_config=None, num_checkpoints=2)
    checkpointing.model_parallel_cuda_manual_seed(1234)
    tracker = checkpointing.get_cuda_rng_tracker()
    first = torch.rand(3)
    with tracker.fork():
        inside = torch.rand(3)
    second = torch.rand(3)
    saved = tracker.get_states()
    with tracker.fork():
        following = torch.rand(3)
    torch.manual_seed(1234)
    assert torch.equal(torch.cat([first, second]), torch.rand(6))
    torch.manual_seed(1234 + 2718)
    assert torch.equal(torch.cat([inside, following]), torch.rand(6))
    tracker.set_states(saved)
    with tracker.fork():
        assert torch.equal(torch.rand(3), following)
    with pytest.raises(ValueError, match="'model-parallel-rng' exists already"):
        tracker.add("model-parallel-rng", 1)
    with pytest.raises(ValueError, match="there is no random state 'other'"), tracker.fork("other"):
        pass


def test_modules_built_on_a_device_have_its_dtype_and_nothing_stays_set():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(2, 3)
    with deepspeed.OnDevice(dtype=torch.bfloat16, enabled=False):
        plain = nn.Linear(2, 3)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.bfloat16, "meta")
    assert (plain.weight.dtype, plain.weight.device.type) == (torch.float32, "cpu") == (torch.rand(1).dtype, "cpu")


def test_the_state_dict_of_the_module_with_and_without_what_is_frozen():
    engine = deepspeed.initialize(model=Net(), config=CONFIG)[0]
    engine.module.fc1.bias.requires_grad_(False)
    state = engine.module_state_dict()
    assert state.keys() == Net().state_dict().keys() and not any(tensor.requires_grad for tensor in state.values())
    assert set(state) - set(engine.module_state_dict(exclude_frozen_parameters=True)) == {"fc1.bias"}
