"""Training scripts as DeepSpeed's tutorials, Megatron's and OpenRLHF's loops write them, in one process."""

import argparse
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from distributed import free_port
from torch import nn

import hybrid_engine as deepspeed

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
    command = [sys.executable, "-c", ALONE, case]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
