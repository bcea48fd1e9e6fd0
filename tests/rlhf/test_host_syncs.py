"""Micro-batches of the recipes never wait for the device: their figures are read once a step.

On a GPU the host waits for all that was launched wherever it reads a number, a bool or a mask's True places. Here what
would lie on a GPU is a `OnDevice`, and so is all that is computed from it; reading one is noted.
"""

import sys
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import LlamaForSequenceClassification

import hybrid_engine
from hybrid_engine.ops.linear_divergence import TopTokens
from hybrid_engine.recipes import distill, dpo, grpo, kto, ppo, reward, sft
from hybrid_engine.rl.losses import StepCounts
from hybrid_engine.rl.preferences import build_loss
from hybrid_engine.rlhf.algorithms import Coefficients, PolicyBatch
from hybrid_engine.rlhf.batches import packing, sequences
from hybrid_engine.rlhf.batches.micro_batches import Items
from hybrid_engine.rlhf.batches.packing import Layout, set_layout
from hybrid_engine.rlhf.batches.passes import RunPasses
from hybrid_engine.rlhf.batches.sequences import ValueModel, build_sequences
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair
from hybrid_engine.rlhf.experience import answers, policy, roles, teachers
from hybrid_engine.rlhf.experience.answers import LabelledAnswer, Reading, TrainingPair
from hybrid_engine.rlhf.experience.policy import Experience
from hybrid_engine.rlhf.experience.roles import CriticExperience
from hybrid_engine.rlhf.experience.teachers import (
    AheadTeacher,
    ModelTeacher,
    ScoredTeacher,
    SeveralTeachers,
    StepAnswers,
)
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.tasks.corpus import Pair
from tests.support.models import PAD, build_model
from tests.support.training_passes import train_in_parts

SENDERS = sequences, packing, answers, dpo, reward, policy, roles, teachers
READS = "item", "tolist", "cpu", "numpy", "nonzero", "equal", "masked_select", "__bool__", "__int__", "__float__"
CPU = torch.device("cpu")


class OnDevice(torch.Tensor):
    """Notes reads, but for those of transformers, which asks once a pass whether a mask is needed."""

    reads: ClassVar[list[str]] = []
    is_cpu = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        parts = index if isinstance(index, tuple) else (index,)
        is_masked = any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)
        if name in READS or is_masked:
            if not sys._getframe(1).f_globals["__name__"].startswith("transformers."):
                cls.reads.append(name)
            args = tuple(value.as_subclass(torch.Tensor) if isinstance(value, cls) else value for value in args)
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def send(values, device):
    return values.as_subclass(OnDevice)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    for module in SENDERS:
        monkeypatch.setattr(module, "send_to_device", send)
    monkeypatch.setattr(OnDevice, "reads", [])


def build_engine(model):
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return hybrid_engine.initialize(model=model, config=config)[0]


def tokens(row):
    return [5 + row, 6, 7][: 1 + row % 3], [11 + row, 12, 13 + row, 14][: 2 + row % 3]


def encoded(row):
    prompt, response = tokens(row)
    return Encoded(prompt_ids=prompt, response_ids=response)


def experience(num_rows):
    batch = build_sequences(*map(list, zip(*map(tokens, range(num_rows)), strict=True)), PAD, CPU)
    values = torch.linspace(-2, -1, batch.response_mask.numel()).view(batch.response_mask.shape).as_subclass(OnDevice)
    return batch, values


def run_sft(engine, num_rows):
    rows = [encoded(row) for row in range(num_rows)]
    loss_of = partial(sft.micro_batch_loss, engine, rows, PAD, 100)
    return train_in_parts([engine], Items.of(rows), RunPasses(), [(engine, loss_of)])


def run_dpo(engine, num_rows):
    rows = [
        TrainingPair(EncodedPair.of_tokens(*tokens(row), tokens(row + 1)[1]), -9.0, -9.5) for row in range(num_rows)
    ]
    return dpo.update(engine, rows, num_rows, build_loss("sigmoid", 0.1), Reading(PAD))


def run_kto(engine, num_rows):
    rows = [LabelledAnswer(encoded(row), row % 2 == 0, -9.0, encoded(row + 1), -9.0) for row in range(num_rows)]
    config = SimpleNamespace(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0)
    return kto.update(engine, rows, num_rows, config, Reading(PAD))


def run_grpo(engine, num_rows):
    batch, values = experience(num_rows)
    chosen = Experience(batch, values, PolicyBatch(values, values, values + 1.5, batch.response_mask, values - 0.1))
    config = SimpleNamespace(algorithm=Algorithm(), temperature=1.0)
    step, present = StepCounts(20, num_rows, 8), torch.zeros_like(values)
    loss_of = partial(grpo.micro_batch_loss, engine, chosen, present, step, config, Coefficients(0.1, 0.0, 0.0))
    found = train_in_parts([engine], chosen.sequences.items, RunPasses(), [(engine, loss_of)])
    assert present.as_subclass(torch.Tensor).any()
    return found


def run_ppo(engine, num_rows):
    batch, values = experience(num_rows)
    chosen = CriticExperience(
        sequences=batch, logprobs=values, logprobs_old=values, values_old=values, advantages=values, returns=values
    )
    critic = build_engine(ValueModel(build_model(seed=1).model, torch.nn.Linear(engine.module.config.hidden_size, 1)))
    roles = SimpleNamespace(policy=SimpleNamespace(actor=engine), critic=critic)
    config = SimpleNamespace(temperature=1.0, clip=0.2, value_clip=0.2)
    losses = [
        (engine, partial(ppo.policy_loss, roles, chosen, torch.zeros_like(values), 20, config)),
        (critic, partial(ppo.value_loss, roles, chosen, 20, config)),
    ]
    return train_in_parts([engine, critic], chosen.sequences.items, RunPasses(), losses)


def run_reward(engine, num_rows):
    config = engine.module.config
    config.num_labels, config.pad_token_id = 1, PAD
    engine = build_engine(LlamaForSequenceClassification(config))
    set_layout(engine.module, Layout.ROWS)
    texts = [[*prompt, *response] for prompt, response in map(tokens, range(num_rows + 1))]
    rows = [Pair(texts[row], texts[row + 1], 0.0, None) for row in range(num_rows)]
    loss_of = partial(reward.micro_batch_loss, engine, rows, None, SimpleNamespace(center_coef=0.1, batch_size=8))
    return train_in_parts([engine], Items.of(rows), RunPasses(), [(engine, loss_of)])


class LikelyTokens:
    """A source of two tokens for each place."""

    def score(self, prompts, answers):
        places = [torch.tensor([[3, 4]] * len(answer)) for answer in answers]
        return [TopTokens(ids, torch.full(ids.shape, -1.0)) for ids in places]


def run_distill(engine, num_rows):
    batch, frozen = experience(num_rows)[0].numbered(), build_model(seed=2).requires_grad_(False)
    passes = RunPasses()
    several = [
        ModelTeacher(model=frozen, temperature=1.0),
        AheadTeacher(frozen, 1.0, passes),
        ScoredTeacher(LikelyTokens()),
    ]
    teacher = SeveralTeachers(several, torch.tensor([[1.0, 0.5, 0.0], [0.5, 0.0, 1.0]] * num_rows), reads_always=False)
    prompts, responses = map(list, zip(*map(tokens, range(num_rows)), strict=True))
    told = SimpleNamespace(prompt_ids=prompts, response_ids=responses)
    with torch.no_grad():
        teacher.begin_step(StepAnswers(batch, told, list(range(num_rows)), None))
    OnDevice.reads.clear()  # once a step it reads what it states ahead
    config = SimpleNamespace(temperature=1.0, divergence_beta=0.5, teacher_top_k=0)
    loss_of = partial(distill.micro_batch_loss, engine, teacher, batch, config, 20)
    return train_in_parts([engine], batch.items, passes, [(engine, loss_of)])


RECIPES = {
    "distill": run_distill,
    "sft": run_sft,
    "dpo": run_dpo,
    "kto": run_kto,
    "grpo": run_grpo,
    "ppo": run_ppo,
    "reward": run_reward,
}


@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.ROWS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_more_micro_batches_read_the_device_no_more_often(recipe, layout):
    engine = build_engine(build_model())
    set_layout(engine.module, layout)
    RECIPES[recipe](engine, 2)  # the first pass tries the head
    counts = []
    for num_rows in (4, 8):
        OnDevice.reads.clear()
        RECIPES[recipe](engine, num_rows)
        counts.append(list(OnDevice.reads))
    assert counts[0] == counts[1] != []
