"""Parameters without a dimension, as CLIP's `logit_scale`: they train, and go from plan to plan, as all others do."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from hybrid_engine import (
    ComputeConfig,
    Plan,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dicts,
    parallelize,
)
from tests.extensions.parallelize.test_checkpoints import (
    assert_same,
    gathered,
    make_optimizer,
    merged_of,
    parallel_steps,
)
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.parallel_nets import OPTIMIZERS, Block, Stack, adam, plain_steps, samples_of
from tests.support.random_splits import random_splits

pytestmark = pytest.mark.torch_versions


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class Gained(Block):
    """A block with a factor of its own, which layers under ZeRO have beside what is sharded; a weight of no rows."""

    def __init__(self, num_rows):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.rows = nn.Parameter(torch.ones(num_rows, 3))

    def forward(self, x):
        return super().forward(x) * self.gain + self.rows.sum()


class Scaled(Stack):
    """Logits with a trained scale, a frozen one and one that is nobody's."""

    def __init__(self, num_rows=0):
        super().__init__()
        self.blocks = nn.ModuleList(Gained(num_rows) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(0.3))
        self.temperature = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.double()

    def forward(self, sample):
        self.calls += 1
        x = self.embed(sample["ids"])
        for block in self.blocks:
            x = block(x) * sample["mask"][..., None]
        logits = self.head(self.norm(x)) * self.logit_scale.exp() / self.temperature
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sample["ids"].roll(1).flatten(), reduction="sum")
        return loss, logits


def build(num_rows=0):
    torch.manual_seed(0)
    return Scaled(num_rows)


CLOSE = {"rtol": 1e-6, "atol": 1e-9}


def make(folder, policy, plan_ngpus, num_rows=0, **options):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = ComputeConfig(plan_ngpus, world_size, use_end2end=True, **options)
    return parallelize(
        build(num_rows), {"sample": samples_of(0)[0]}, policy, config, gen_savedir=folder, reuse="override"
    )


def megatron(graph, config):
    plan = Plan(graph=graph, mesh=(config.plan_ngpus,))
    plan.place("*.up", out="n")
    plan.place("*.down", out="k")
    plan.follow("*")
    return plan


ZERO = {"use_zero": True}
LAYOUTS = {
    2: {
        "ZeRO": ("dp", 1, ZERO),
        "random 2": (random_splits(), 2, {}),
        "eager ZeRO": ("dp", 1, {**ZERO, "lowering": "eager"}),
        "groups of one unit": ("dp", 1, {**ZERO, "zero_ngroups": 2}),
        "data parallel": ("dp", 1, {}),
    },
    4: {
        "random 2 x 2 ZeRO": (random_splits(), 2, ZERO),
        "stages with ZeRO": ("pp", 2, {**ZERO, "pas_config": {"pipeline_nmicros": 2}}),
        "two groups of ZeRO": ("dp", 1, {**ZERO, "zero_ngroups": 2}),
        "batch 2 x 2": ("data", 2, {}),
        "eager 2 x 2 ZeRO": (megatron, 2, {**ZERO, "lowering": "eager"}),
        "random 4": (random_splits(3), 4, {}),
    },
}
OPTIMIZER = {2: "adam", 4: "sgd"}
STEPS_EACH = 2


def journey(rank, world_size, folder):
    """Steps under one layout after another, each begun with what the one before saved, by either way in turns."""
    merged, norms = [], []
    for number, (policy, plan_ngpus, options) in enumerate(LAYOUTS[world_size].values()):
        module = make(folder, policy, plan_ngpus, **options)
        optimizer = make_optimizer(module, OPTIMIZER[world_size])
        if merged:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
            load_merged_state_dicts(module, merged[-1][0], optimizer, merged[-1][1])
        norms.append(parallel_steps(module, optimizer, range(STEPS_EACH * number, STEPS_EACH * (number + 1))))
        again = deduped_again(folder, policy, plan_ngpus, options, OPTIMIZER[world_size], module, optimizer)
        merged.append(merged_of(module, optimizer, folder, str(number)))
        assert_same(again, merged[-1])
    return merged, norms


def deduped_again(folder, policy, plan_ngpus, options, name, *trained):
    """What another module of the same plan has that loaded this one's deduplicated parts."""
    parts = deduped_state_dict(*trained)
    other = make(folder, policy, plan_ngpus, **options)
    optimizer = make_optimizer(other, name)
    load_deduped_state_dict(other, parts[0], optimizer, parts[1])
    return gathered(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("world_size", list(LAYOUTS))
def test_training_with_scalars_that_goes_from_plan_to_plan_is_that_of_the_module(tmp_path, world_size):
    module = build()
    kind, options = OPTIMIZERS[OPTIMIZER[world_size]]
    optimizer = kind(adam([(name, p) for name, p in module.named_parameters() if p.requires_grad]), **options)
    expected = []
    for number in range(len(LAYOUTS[world_size])):
        steps = range(STEPS_EACH * number, STEPS_EACH * (number + 1))
        norms = plain_steps(module, optimizer, steps)
        expected.append((norms, {name: p.detach().clone() for name, p in module.named_parameters()}))
    for merged, norms in run_distributed(journey, world_size, tmp_path, seconds=300):
        for name, (state, _), found, wanted in zip(LAYOUTS[world_size], merged, norms, expected, strict=True):
            torch.testing.assert_close(found, wanted[0], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
            for key, weight in wanted[1].items():
                torch.testing.assert_close(
                    state[key], weight, **CLOSE, msg=lambda text, at=(name, key): f"{at}: {text}"
                )
        module.load_state_dict(merged[-1][0])
        optimizer.load_state_dict(merged[-1][1])


ROWS = {"Adafactor": 1}
"""It divides by the number of a weight's elements."""
KINDS = {"Rprop": {"lr": 0.01}, "Adafactor": {"lr": 0.01}, "Adagrad": {"lr": 0.01}, "NAdam": {"lr": 0.01}}


def two_steps(rank, world_size, folder):
    """Weights after two steps of each optimizer in a unit of two, the second one in a module that loaded the first."""
    found = {}
    for name, options in KINDS.items():
        merged = None
        for step in range(2):
            module = make(folder, random_splits(), 2, ROWS.get(name, 0))
            optimizer = build_optimizer(module, getattr(torch.optim, name), **options)
            if merged:
                load_merged_state_dicts(module, merged[0], optimizer, merged[1])
            module.train_step(samples_of(step))
            optimizer.step()
            merged = merged_of(module, optimizer, folder, f"{name}-{step}")
        found[name] = merged[0]
    return found


def test_every_kind_of_optimizer_goes_on_with_scalars_in_a_unit(tmp_path):
    found = run_distributed(two_steps, 2, tmp_path, seconds=200)[0]
    for name, options in KINDS.items():
        module = build(ROWS.get(name, 0))
        optimizer = getattr(torch.optim, name)(module.parameters(), **options)
        plain_steps(module, optimizer, range(2), clip=1e9)
        for key, weight in module.named_parameters():
            torch.testing.assert_close(
                found[name][key], weight.detach(), **CLOSE, msg=lambda t, n=name, k=key: f"{n} {k}: {t}"
            )


def through_dcp(rank, world_size, folder):
    """The whole state of a module under each layout of two, which read what the one before saved by DCP."""
    found = []
    for number, (policy, plan_ngpus, options) in enumerate(LAYOUTS[2].values()):
        module = make(folder, policy, plan_ngpus, **options)
        optimizer = make_optimizer(module, "adam")
        if number == 0:
            parallel_steps(module, optimizer, range(1))
        else:
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
            dcp.load(module.state_dict(), checkpoint_id=folder / f"dcp-{number - 1}")
        dcp.save(module.state_dict(), checkpoint_id=folder / f"dcp-{number}")
        found.append(merged_of(module, optimizer, folder, f"merged-{number}")[0])
    return found


def test_dcp_carries_scalars_between_plans(tmp_path):
    first, *others = run_distributed(through_dcp, 2, tmp_path, seconds=200)[0]
    assert first["logit_scale"] != build().logit_scale
    for other in others:
        assert_same(other, first)
