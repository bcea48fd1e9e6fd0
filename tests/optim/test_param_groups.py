"""Optimizer type Muon of the config, against torch's Muon and AdamW in a plain loop."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForSequenceClassification

import hybrid_engine
from hybrid_engine.optim.build import hidden_matrices
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed

STEPS = 3
PARAMS = {"muon_lr": 0.05, "adam_lr": 1e-2, "weight_decay": 0.1}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WHERE = [(0, "bf16"), (1, "fp32"), (2, "fp16"), (3, "bf16"), (3, "fp32")]


class Tiny(nn.Module):
    """Matrices with uneven shards, one taller than wide, and a tied head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 9)
        self.down = nn.Linear(9, 5)
        self.lm_head = nn.Linear(5, 7, bias=False)
        self.lm_head.weight = self.words.weight

    def forward(self, tokens):
        hidden = self.words(tokens)
        return self.lm_head(hidden + self.down(torch.tanh(self.up(hidden))))


def loss_of(model, rank, step):
    tokens = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(100 * rank + step))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train_plainly(dtype):
    """fp32 masters by name after STEPS steps on the mean of two processes' gradients."""
    model = Tiny().to(dtype)
    params = dict(model.named_parameters())
    masters = {name: nn.Parameter(param.detach().float().clone()) for name, param in params.items()}
    matrices = [masters["up.weight"], masters["down.weight"]]
    rest = [masters["words.weight"], masters["up.bias"], masters["down.bias"]]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.05, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1),
    ]
    for step in range(STEPS):
        gradients = [torch.autograd.grad(loss_of(model, rank, step), list(params.values())) for rank in range(2)]
        for name, first, second in zip(params, *gradients, strict=True):
            masters[name].grad = (first.float() + second.float()) / 2
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


def build(stage, precision, params=PARAMS, model=None, **more):
    precisions = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    }
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Muon", "params": params},
        **precisions[precision],
        **more,
    }
    return hybrid_engine.initialize(model=model or Tiny(), config=config)[0]


def train(engine, steps=range(STEPS)):
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        engine.backward(loss_of(engine, rank, step))
        engine.step()
    return {trained.name: full_tensor(trained.master).clone() for trained in engine.optimizer.parameters}


def try_everything(rank, world_size, folder):
    results = {where: train(build(*where)) for where in WHERE}
    with hybrid_engine.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        model = Tiny()
    results["zero.Init"] = train(build(3, "fp32", model=model))
    for stage in (0, 3):
        first = build(stage, "bf16")
        train(first, range(2))
        first.save_checkpoint(f"{folder}/{stage}")
        second = build(stage, "bf16")
        second.load_checkpoint(f"{folder}/{stage}")
        results["resumed", stage] = train(second, range(2, STEPS))
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("muon")


@pytest.fixture(scope="module")
def results(folder):
    return run_distributed(try_everything, 2, str(folder))


@pytest.mark.parametrize("where", WHERE)
def test_two_processes_step_like_torchs_muon_and_adamw(results, where):
    expected = train_plainly(DTYPES[where[1]])
    torch.testing.assert_close(results[0][where], expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(results[1][where], expected, rtol=1e-6, atol=1e-7)


def test_matrices_that_zero_init_built_sharded_are_muons(results):
    assert results[0]["zero.Init"].keys() == results[0][3, "fp32"].keys()
    with torch.no_grad():
        started = dict(Tiny().named_parameters())
        moved = {name: (value - started[name]).abs().max() for name, value in results[0]["zero.Init"].items()}
    # A matrix of Muon moves by 0.05 a step times a nearly orthogonal matrix; AdamW's numbers by 0.01 a step at most.
    assert moved["words.weight"] < 0.04 < moved["up.weight"]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_resumed_run_goes_on_to_the_bit(results, stage):
    for result in results:
        torch.testing.assert_close(result["resumed", stage], result[stage, "bf16"], rtol=0, atol=0)


def resume_alone(rank, world_size, folder):
    engine = build(0, "bf16")
    engine.load_checkpoint(f"{folder}/3")
    states = engine.optimizer.inner.state
    return {
        trained.name: {key: full_tensor(value) for key, value in states[trained.master].items() if value.dim()}
        for trained in engine.optimizer.parameters
    }


def test_a_checkpoint_of_two_processes_gives_one_each_class_its_state(results, folder):
    (state,) = run_distributed(resume_alone, 1, str(folder))
    assert {name: set(entries) for name, entries in state.items()} == {
        "words.weight": {"exp_avg", "exp_avg_sq"},
        "up.weight": {"momentum_buffer"},
        "up.bias": {"exp_avg", "exp_avg_sq"},
        "down.weight": {"momentum_buffer"},
        "down.bias": {"exp_avg", "exp_avg_sq"},
    }
    assert all(value.abs().sum() > 0 for entries in state.values() for value in entries.values())


def rates(engine):
    return {group["use_muon"]: group["lr"] for group in engine.optimizer.param_groups}


def test_rates_are_deepspeeds_or_lr_or_each_its_own():
    assert rates(build(0, "fp32", {})) == {True: 0.02, False: 3e-4}
    assert rates(build(0, "fp32", {"lr": 0.1})) == {True: 0.1, False: 0.1}
    assert rates(build(0, "fp32", {"lr": 0.1, "adam_lr": 0.001})) == {True: 0.1, False: 0.001}


def test_a_schedule_gives_each_class_its_own_rate():
    schedule = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": [0.05, 0.001], "warmup_min_lr": 0, "warmup_num_steps": 0},
    }
    engine = build(0, "fp32", scheduler=schedule)
    train(engine)
    assert rates(engine) == {True: 0.05, False: 0.001}


def test_embeddings_and_heads_of_any_name_are_adamws():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    assert hidden_matrices(gpt2) == {
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    llama = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    assert len(hidden_matrices(llama)) == 7
    assert all(name.startswith("model.layers.0.") for name in hidden_matrices(llama))


def test_a_model_without_hidden_matrices_is_refused():
    with pytest.raises(ValueError, match=r'optimizer.type="Muon" steps matrices of hidden layers.*"AdamW"'):
        build(0, "fp32", model=nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2)))


@pytest.mark.parametrize(("key", "value"), [("momentum", 1.0), ("muon_lr", -1), ("adam_lr", "x"), ("nesterov", False)])
def test_params_out_of_range_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"optimizer.params.{key}"):
        build(0, "fp32", {key: value})
