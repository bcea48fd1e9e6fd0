"""Parameters that a process uses and another does not: experts in a list, a branch, a parameter that nobody uses."""

import itertools

import pytest
import torch
from torch import nn

import hybrid_engine
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.quick

WIDTH, STEPS, LR, DECAY = 8, 3, 0.1, 0.1
CASES = list(itertools.product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2)))
LEFT_OUT = list(itertools.product((0, 1, 2), (1, 2), ("engine.backward", "loss.backward")))
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Experts(nn.Module):
    """Adds what the named experts make of it."""

    def __init__(self, num_experts=4):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts))
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, chosen):
        return x * self.gate + sum(self.experts[expert](x) for expert in chosen)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, chosen, skipped=(), discarded=()):
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                output = layer(x, chosen)
                x = x if number in discarded else output
        return self.head(x).float().pow(2).mean()


def build():
    torch.manual_seed(0)
    return Model()


def micro_batch(rank, number):
    """Its experts are others on another process and in the next micro-batch; expert 3 is nobody's."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(4, WIDTH, generator=generator), {(0, 0): [0, 1], (1, 0): [1], (0, 1): [1], (1, 1): [2]}[
        rank, number % 2
    ]


def build_engine(stage, num_micro_batches=1, dtype="fp32"):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": LR, "weight_decay": DECAY}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True} | ({"initial_scale_power": 8} if dtype == "fp16" else {})
    return hybrid_engine.initialize(model=build(), config=config)[0]


def train(engine, rank, num_micro_batches, skipped=(), style="engine.backward"):
    """The weights after some steps."""
    for number in range(STEPS * num_micro_batches):
        x, chosen = micro_batch(rank, number)
        loss = engine(x.to(next(engine.parameters()).dtype), chosen, skipped=skipped)
        engine.backward(loss) if style == "engine.backward" else loss.backward()
        engine.step()
    return {name: full_tensor(param).float() for name, param in engine.module.named_parameters()}


def train_differently(engine, **different):
    """What a step says of layers that the processes do not use alike, and whether another one works."""
    x, chosen = micro_batch(0, 0)
    with pytest.raises(ValueError) as raised:
        engine.backward(engine(x, chosen, **different))
        engine.step()
    unchanged = all(
        torch.equal(full_tensor(param), build().get_parameter(name)) for name, param in engine.module.named_parameters()
    )
    engine.backward(engine(x, chosen))
    engine.step()
    return str(raised.value), unchanged, engine.global_steps


def run_all(rank, world_size):
    trained = {(stage, dtype, num): train(build_engine(stage, num, dtype), rank, num) for stage, dtype, num in CASES}
    skipped = [1] if rank == 0 else []
    left_out = {
        (stage, num, style): train(build_engine(stage, num), rank, num, skipped, style)
        for stage, num, style in LEFT_OUT
    }
    refused = {
        "stage 3": train_differently(build_engine(3), skipped=[1 + rank]),
        "discarded": train_differently(build_engine(2), discarded=[1 + rank]),
    }
    return trained, left_out, refused


@pytest.fixture(scope="module")
def both():
    return run_distributed(run_all, 2)


def plain(num_micro_batches, skipped=()):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number, rank in itertools.product(range(num_micro_batches), (0, 1)):
            loss = model(*micro_batch(rank, step * num_micro_batches + number), skipped if rank == 0 else [])
            (loss / (2 * num_micro_batches)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("stage", "dtype", "num_micro_batches"), CASES)
def test_what_one_process_does_not_use_trains_as_in_a_plain_loop(stage, dtype, num_micro_batches, both):
    expected = plain(num_micro_batches)
    assert torch.equal(expected["unused"], torch.ones(3))  # no gradient, no weight decay
    for trained, _, _ in both:
        weights = trained[stage, dtype, num_micro_batches]
        for name, value in expected.items():
            assert (weights[name] - value).abs().max() <= TOLERANCE[dtype], name
        for name in ("unused", "layers.0.experts.3.weight"):
            assert torch.equal(weights[name], build().get_parameter(name).to(TORCH[dtype]).float())


@pytest.mark.parametrize(("stage", "num_micro_batches", "style"), LEFT_OUT)
def test_a_layer_that_one_process_leaves_out_trains_as_in_a_plain_loop(stage, num_micro_batches, style, both):
    expected = plain(num_micro_batches, skipped=[1])
    for _, left_out, _ in both:
        for name, value in left_out[stage, num_micro_batches, style].items():
            assert (expected[name] - value).abs().max() <= TOLERANCE["fp32"], name


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("stage 3", "the processes came through different layers. At stage 3"),
        ("discarded", "but of one that it calls its loss must depend"),
    ],
)
def test_what_gives_wrong_gradients_is_refused_and_nothing_is_stepped(case, words, both):
    for _, _, refused in both:
        message, unchanged, num_steps = refused[case]
        assert words in message and unchanged and num_steps == 1
