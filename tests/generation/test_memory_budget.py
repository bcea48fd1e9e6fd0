"""The KV workspace leaves room for training: what that takes is known before the first step, and seen in it."""

import pytest
import torch

import hybrid_engine
from hybrid_engine.containers import device
from hybrid_engine.containers.device import free_and_total_bytes, num_bytes
from hybrid_engine.generation import memory
from tests.support.models import PAD, build_model, padded_prompts

OPTIONS = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": PAD, "do_sample": False}
MIB = 2**20


def build_engine(optimizer="AdamW", precision=None, **options):
    config = {
        "train_batch_size": 6,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "hybrid_engine": {"enabled": True, **options},
        **({precision: {"enabled": True}} if precision else {}),
    }
    engine, *_ = hybrid_engine.initialize(model=build_model(), config=config)
    return engine


def fake_memory(monkeypatch, free, total=None):
    """This machine has `free` bytes of `total` from now on, whatever is taken."""
    monkeypatch.setattr(device, "host_memory_bytes", lambda: (int(free), int(total or free)))


def roll_out(engine):
    input_ids, mask = padded_prompts()
    engine.eval()
    engine.generate(input_ids, attention_mask=mask, **OPTIONS)


def train(engine):
    input_ids, _ = padded_prompts()
    engine.train()
    engine.backward(engine(input_ids=input_ids, labels=input_ids).loss)
    engine.step()


def held(engine):
    return engine.generator.workspace.allocated_bytes


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_before_the_first_step_training_takes_what_the_step_then_brings(precision):
    engine = build_engine(precision=precision)
    values = sum(parameter.numel() for parameter in engine.module.parameters())
    assert engine.training_memory.missing_bytes() == values * (8 + 4)  # Adam's moments and the gradients
    train(engine)
    assert engine.training_memory.missing_bytes() == values * 4  # the moments are there
    state = [v for values in engine.optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
    assert num_bytes(state) == pytest.approx(values * 8, rel=0.01)


def test_an_optimizer_without_state_is_known_by_its_first_step():
    engine = build_engine(optimizer="SGD")
    values = sum(parameter.numel() for parameter in engine.module.parameters())
    train(engine)
    assert engine.training_memory.missing_bytes() == values * 4


def test_a_rollout_leaves_the_memory_that_training_will_take(monkeypatch):
    engine = build_engine(training_free_share=0.0, kv_block_size=4)
    roll_out(engine)
    wanted, training = held(engine), engine.training_memory.missing_bytes()
    engine.release_inference_cache()
    free = (training + 0.7 * wanted) / memory.USABLE_MEMORY
    fake_memory(monkeypatch, free)
    roll_out(engine)
    assert 0 < held(engine) <= 0.7 * wanted
    # Where less than half of it would be left, the rollout takes what there is, and gives it back.
    engine.release_inference_cache()
    fake_memory(monkeypatch, (training + 0.2 * wanted) / memory.USABLE_MEMORY)
    roll_out(engine)
    assert held(engine) > 0.2 * wanted
    fake_memory(monkeypatch, training * 0.5)
    engine.train()
    assert held(engine) == 0


@pytest.mark.parametrize(("free", "stays"), [(0.3, True), (0.2, False)])
def test_train_gives_the_workspace_back_unless_the_stated_share_stays_free(monkeypatch, free, stays):
    engine = build_engine(training_free_share=0.25)
    roll_out(engine)
    training = engine.training_memory.missing_bytes()
    fake_memory(monkeypatch, training + free * 64 * MIB, 64 * MIB)
    cache = engine.generator.workspace.cache
    engine.train()
    assert (held(engine) > 0) == stays and engine.generator.workspace.cache is cache
    train(engine)
    roll_out(engine)  # the storage is taken again
    assert held(engine) > 0


class Meter:
    """A PeakMeter whose device grows by `growth` bytes in every step."""

    def __init__(self, growth):
        self.growth, self.starts = growth, []

    def begin(self, forgets_earlier):
        self.starts.append(forgets_earlier)

    def growth_bytes(self):
        return self.growth


def test_the_first_steps_peak_says_what_activations_take(monkeypatch):
    engine = build_engine(training_free_share=0.0)
    training = engine.training_memory
    training._meter = meter = Meter(90 * MIB)
    fake_memory(monkeypatch, 64 * MIB)
    roll_out(engine)
    assert not training.is_known
    engine.train()
    assert held(engine) == 0  # nobody knows yet what activations will take
    train(engine)
    values = sum(parameter.numel() for parameter in engine.module.parameters())
    state = [v for values in engine.optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
    assert training.missing_bytes() == 90 * MIB - num_bytes(state) > values * 4
    roll_out(engine)
    engine.train()
    assert held(engine) == 0  # 64 MiB are too few
    fake_memory(monkeypatch, 100 * MIB)
    roll_out(engine)
    meter.growth = 120 * MIB
    train(engine)
    assert training.missing_bytes() == 120 * MIB  # a longer batch
    assert meter.starts[0] and not meter.starts[-1]  # scripts read the allocator's peak too: it is forgotten once


def test_what_graphs_keep_for_themselves_is_not_free(monkeypatch):
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 100 * MIB, "allocated_size": 60 * MIB},
        {"device": 0, "segment_pool_id": (0, 1), "total_size": 50 * MIB, "allocated_size": 10 * MIB},
        {"device": 1, "segment_pool_id": (0, 1), "total_size": 7 * MIB, "allocated_size": 0},
    ]
    answers = {
        "mem_get_info": (500 * MIB, 1000 * MIB),
        "memory_reserved": 150 * MIB,
        "memory_allocated": 70 * MIB,
        "memory_snapshot": segments,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    assert free_and_total_bytes(torch.device("cuda", 0)) == (540 * MIB, 1000 * MIB)
