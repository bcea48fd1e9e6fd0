"""Parameters without a dimension, as the `logit_scale` of CLIP: trained, saved and gathered like all others.

And those without elements, as the weight of a linear with no output.
"""

import itertools
import unittest.mock
from functools import partial

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_engine
from hybrid_engine.extensions.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from hybrid_engine.zero.sharding import full_tensor, local_tensor
from tests.support.distributed import run_distributed
from tests.support.eager_plans import megatron
from tests.support.models import PAD, VOCAB, padded_prompts, randomised

WIDTH, ROWS, MICRO_BATCHES, LR, CLIP = 8, 24, 2, 0.05, 0.3
SCALARS = ("scale", "offset", "layers.0.gain", "layers.1.gain")


class Layer(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(gain))
        self.nothing = nn.Linear(WIDTH, 0)

    def forward(self, x):
        return x + self.gain * torch.tanh(self.linear(x)) + self.nothing(x).sum()


class Model(nn.Module):
    """Scalars of the model and of its layers, one under two names, and one that is frozen; and empty ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(0.5), Layer(0.8)])
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.tied = self.scale
        self.rows = nn.Parameter(torch.zeros(0, WIDTH))
        self.offset = nn.Parameter(torch.tensor(0.2), requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.tied
        x = torch.cat([x, self.rows.to(x)])
        return (x * self.scale.exp() + self.offset).float().square().mean(1)


def settings(stage, dtype="fp32", optimizer="Adam", **zero):
    return {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": optimizer, "params": {"lr": LR}},
    } | ({} if dtype == "fp32" else {dtype: {"enabled": True}})


def batch(step):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(engine, rank, world_size, steps):
    """The norm of the gradients at each step."""
    norms = []
    for step in steps:
        for rows in batch(step).chunk(MICRO_BATCHES):
            part = rows.chunk(world_size)[rank].to(next(engine.parameters()).dtype)
            engine.backward(engine(part).mean())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def weights(engine):
    return {name: full_tensor(param).clone() for name, param in engine.module.named_parameters()}


def by_hand(steps, dtype=torch.float32):
    """What plain PyTorch makes of the whole batches: the norms and the weights."""
    model = Model().to(dtype)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=LR)
    norms = []
    for step in steps:
        optimizer.zero_grad()
        model(batch(step).to(dtype)).mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return norms, {name: param.detach() for name, param in model.named_parameters()}


def worker_trains(rank, world_size, stage, zero):
    engine, *_ = hybrid_engine.initialize(model=Model(), config=settings(stage, **zero))
    norms = train(engine, rank, world_size, range(4))
    with engine.sharding.as_shards():
        own = {name: local_tensor(p) for name, p in engine.module.named_parameters() if not p.dim()}
    return norms, weights(engine), own


@pytest.mark.parametrize(("stage", "world_size"), [*itertools.product((0, 1, 2, 3), (2,)), (3, 3)])
def test_they_are_trained_as_in_plain_pytorch(stage, world_size):
    check_training(stage, world_size)


def test_they_are_trained_where_groups_of_processes_hold_a_copy_each():
    check_training(3, 4, mics_shard_size=2)


def check_training(stage, world_size, **zero):
    norms, expected = by_hand(range(4), torch.float64)
    results = run_distributed(worker_trains, world_size, stage, zero)
    for norms_here, found, own in results:
        assert norms_here == pytest.approx(norms, rel=1e-5)
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in expected.items()}
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, check_dtype=False)
        assert own == results[0][2] and set(own) == set(SCALARS)  # to the bit, on every process


def worker_rounds_otherwise(rank, world_size, stage):
    engine, *_ = hybrid_engine.initialize(model=Model(), config=settings(stage))
    with unittest.mock.patch.object(engine.optimizer, "take_gradients", lambda: add_to_gradients(engine, rank)):
        train(engine, rank, world_size, [0])
    with engine.sharding.as_shards():
        return {name: local_tensor(p) for name, p in engine.module.named_parameters() if name in SCALARS}


def add_to_gradients(engine, rank):
    for trained in engine.optimizer.parameters:
        if not trained.master.dim():
            local_tensor(trained.master.grad).add_(0.01 * rank)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_processes_whose_sums_round_otherwise_keep_equal_copies(stage):
    first, second = run_distributed(worker_rounds_otherwise, 2, stage)
    assert first == second and set(first) == set(SCALARS)


class ScaledLayer(nn.Module):
    """A layer of a language model, whose answer is multiplied by a scalar."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.gain = layer, nn.Parameter(torch.tensor(0.9))

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs) * self.gain


class ScaledLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.logit_scale.exp()
        return output


def build_llama(in_layers):
    config = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    build = partial(ScaledLlama, LlamaConfig(num_hidden_layers=2, num_key_value_heads=2, **config))
    model = randomised(build)
    if in_layers:
        model.model.layers = nn.ModuleList(ScaledLayer(layer) for layer in model.model.layers)
    return model


def worker_generates(rank, world_size, in_layers, settings_of_weights):
    """Tokens and their log-probabilities before and after a step, whether weights stayed, and the norm."""
    results = []
    for stage, pinned, tensor_parallel in settings_of_weights:
        config = settings(stage) | {"train_batch_size": 6, "gradient_accumulation_steps": 1}
        config["hybrid_engine"] = {"enabled": True, "pin_parameters": pinned, "max_running": 2}
        config["hybrid_engine"]["inference_tp_size"] = tensor_parallel if world_size > 1 else 1
        engine, *_ = hybrid_engine.initialize(model=build_llama(in_layers), config=config)
        input_ids, mask = (tensor.chunk(world_size)[rank] for tensor in padded_prompts())
        engine.eval()
        before, first = weights(engine), engine.generate(input_ids, attention_mask=mask, **GREEDY)
        is_same = all(torch.equal(value, before[name]) for name, value in weights(engine).items())
        engine.train()
        engine.backward(engine(input_ids=input_ids, attention_mask=mask, labels=input_ids).loss)
        engine.step()
        engine.eval()
        second = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        results.append((first, second, is_same))
    return results


GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": None}


@pytest.mark.parametrize("in_layers", [False, True])
def test_models_that_have_them_generate(in_layers):
    stages = [(1, True, 1), (3, True, 1), (3, False, 1), (3, True, 2)]
    alone = run_distributed(worker_generates, 1, in_layers, stages)[0]
    pair = run_distributed(worker_generates, 2, in_layers, stages)
    input_ids, mask = padded_prompts()
    own = build_llama(in_layers).generate(input_ids, attention_mask=mask, **GREEDY)
    for (first, second, _), *both in zip(alone, *pair, strict=True):
        assert torch.equal(first, own)
        assert torch.equal(first, torch.cat([both[0][0], both[1][0]]))
        assert torch.equal(second, torch.cat([both[0][1], both[1][1]]))
        assert both[0][2] and both[1][2]


def worker_under_a_plan(rank, world_size, plan_ngpus, folder):
    model, unit, num_units = build_llama(False), rank // plan_ngpus, world_size // plan_ngpus
    input_ids, mask = (tensor.chunk(num_units)[unit] for tensor in padded_prompts())
    arguments = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False}
    if world_size > 1:
        compute_config = hybrid_engine.ComputeConfig(plan_ngpus, world_size, lowering="eager")
        model = hybrid_engine.parallelize(model, arguments, megatron, compute_config, gen_savedir=folder)
    config = settings(3) | {"train_batch_size": 6, "gradient_accumulation_steps": 1}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}}
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    norms = []
    for _ in range(3):
        engine.backward(engine(**arguments, labels=input_ids).loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, engine.module.get_parameter("logit_scale").full_tensor() if world_size > 1 else engine.logit_scale


def test_they_are_trained_under_a_plan(tmp_path):
    norms, scale = run_distributed(worker_under_a_plan, 1, 1, tmp_path)[0]
    for norms_here, found in run_distributed(worker_under_a_plan, 4, 2, tmp_path):
        assert norms_here == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(found, scale, rtol=1e-5, atol=1e-6)


def worker_saves(rank, world_size, stage, folder, steps, loads):
    """Trains on from a checkpoint, and saves all that can be saved."""
    engine, *_ = hybrid_engine.initialize(model=Model(), config=settings(stage, **GATHERS))
    if loads:
        engine.load_checkpoint(folder)
    train(engine, rank, world_size, steps)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "weights.bin")
    return weights(engine)


GATHERS = {"stage3_gather_16bit_weights_on_model_save": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoints_go_from_two_processes_to_one_and_back(stage, tmp_path):
    _, expected = by_hand(range(6))
    folder = str(tmp_path)
    for world_size, first in ((2, 0), (1, 2), (2, 4)):
        found = run_distributed(worker_saves, world_size, stage, folder, range(first, first + 2), first > 0)[0]
        exported = torch.load(tmp_path / "weights.bin", weights_only=True)
        fp32 = get_fp32_state_dict_from_zero_checkpoint(folder)
        for name, value in found.items():
            assert torch.equal(exported[name], value) and torch.equal(fp32[name], value)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def worker_in_16_bits(rank, world_size, stage, dtype):
    engine, *_ = hybrid_engine.initialize(model=Model(), config=settings(stage, dtype))
    train(engine, rank, world_size, range(4))
    masters = {t.name: full_tensor(t.master) for t in engine.optimizer.parameters}
    skipped = engine.skipped_steps
    for _ in range(MICRO_BATCHES):
        loss = engine(batch(0)[:3].to(next(engine.parameters()).dtype)).mean()
        engine.backward(loss * (float("inf") if dtype == "fp16" and rank == 1 else 1.0))
        engine.step()
    after = {t.name: full_tensor(t.master) for t in engine.optimizer.parameters}
    return masters, after, engine.skipped_steps - skipped


@pytest.mark.parametrize(("stage", "dtype"), list(itertools.product((1, 2, 3), ("bf16", "fp16"))))
def test_masters_of_16_bits_and_overflows(stage, dtype):
    _, expected = by_hand(range(4))
    for masters, after, num_skipped in run_distributed(worker_in_16_bits, 2, stage, dtype):
        trained = {name: value for name, value in expected.items() if name in masters}
        assert all(master.dtype == torch.float32 for master in masters.values())
        if dtype == "bf16":  # fp16 leaves out the first steps, until its scale fits
            torch.testing.assert_close(masters, trained, rtol=5e-2, atol=3e-2)
        assert num_skipped == (dtype == "fp16") == all(torch.equal(masters[n], after[n]) for n in masters)


def worker_changes(rank, world_size):
    with hybrid_engine.zero.Init(config_dict_or_path=settings(3)):
        model = Model()
        with torch.no_grad():
            model.scale.fill_(0.9)
    engine, *_ = hybrid_engine.initialize(model=model, config=settings(3))
    scale = engine.module.scale
    marks = tuple(scale.ds_shape), scale.ds_numel, tuple(scale.ds_tensor.shape)
    with hybrid_engine.zero.GatheredParameters([scale, engine.module.offset], modifier_rank=1):
        seen = scale.item()
        if rank == 1:
            scale.data.fill_(0.7)
            engine.module.offset.data.fill_(0.1)
    before = weights(engine)
    train(engine, rank, world_size, range(2))
    return marks, seen, before, weights(engine)


def test_zero_init_and_gathered_parameters():
    for marks, seen, before, after in run_distributed(worker_changes, 2):
        assert marks == ((), 1, ()) and seen == pytest.approx(0.9)
        assert before["scale"] == torch.tensor(0.7) and before["offset"] == torch.tensor(0.1)
        assert after["scale"] != before["scale"] and after["offset"] == before["offset"]


def with_empty_frozen():
    """A model that torch's Adafactor steps, which divides by the number of elements."""
    model = Model()
    for param in model.parameters():
        param.requires_grad_(param.requires_grad and param.numel() > 0)
    return model


def worker_optimizers(rank, world_size, stage, names):
    found = {}
    for name in names:
        engine, *_ = hybrid_engine.initialize(
            model=with_empty_frozen(),
            config={k: v for k, v in settings(stage).items() if k != "optimizer"},
            optimizer=lambda params, name=name: getattr(torch.optim, name)(params, lr=LR),
        )
        train(engine, rank, world_size, range(3))
        found[name] = weights(engine)
    return found


NAMES = "SGD AdamW Adagrad Adafactor Rprop RMSprop NAdam Adamax RAdam ASGD Adadelta"
OPTIMIZERS = NAMES.split()


@pytest.mark.parametrize("stage", [1, 3])
def test_every_optimizer_steps_them(stage):
    expected = run_distributed(worker_optimizers, 1, stage, OPTIMIZERS)[0]
    for found in run_distributed(worker_optimizers, 2, stage, OPTIMIZERS):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
