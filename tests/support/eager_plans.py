"""Models, Megatron's layout for them, and their training with and without it, for tests of the eager lowering."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.optimizer import build_optimizer
from hybrid_engine.extensions.parallelize.parallelize import parallelize
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from tests.support.causal_models import CAUSAL_MODELS, build_causal, causal_batch
from tests.support.parallel_nets import ADAM, Block

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "up", "fc1", "c_fc")
ROWS = ("o_proj", "out_proj", "down_proj", "down", "fc2", "mlp.c_proj")
STEPS = 3


def megatron(graph, config, globs=COLUMNS + ROWS):
    """Columns, then rows, and what lies between them; the vocabulary of the head."""
    plan = Plan(graph=graph, mesh=(config.plan_ngpus,))
    paths = {op.path for op in graph.ops.values() if op.name in ("linear", "addmm")}
    for path in sorted(paths):
        name = next((n for n in globs if path.endswith(f".{n}") or path == n), None)
        if name is not None:
            op = "addmm" if "c_" in name else "linear"  # GPT-2's are no linears
            plan.place(path, op=op, out="n" if name in COLUMNS else "k")
    if globs:
        plan.follow("*layers.*")
        plan.follow("*.h.*")
        plan.follow("block*")
        head = graph.ops.get("lm_head:linear:0")
        if head is not None and head.rule.can_split(["n"], plan.mesh):
            plan.place("lm_head", out="n")
    return plan


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.out_proj = nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        nn.init.normal_(self.embed.weight, std=0.1)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


def causal(name):
    torch.manual_seed(0)
    arguments = causal_batch() | {"use_cache": False}
    return build_causal(name), arguments


def seeded(kind, arguments):
    torch.manual_seed(0)
    return kind(), arguments()


MODELS = {
    "mlp": lambda: seeded(MLP, lambda: {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}),
    "transformer": lambda: seeded(
        Transformer, lambda: {"ids": torch.randint(0, 32, (4, 6)), "labels": torch.randint(0, 32, (4, 6))}
    ),
    **{name: partial(causal, name) for name in CAUSAL_MODELS},
}
LEAST_SPLIT = {"mlp": 6, "transformer": 21, "llama": 15, "qwen2": 21, "gpt2": 7, "opt": 21}
"""Parameters that Megatron's layout splits."""


@dataclass
class Trained:
    """What a training came to."""

    losses: list
    gradients: dict
    """Of the first step."""
    weights: dict
    num_split: int = 0
    least_split: int = 0


def sample_of(name, step, unit):
    """The arguments of one forward pass."""
    _, arguments = MODELS[name]()
    generator = torch.Generator().manual_seed(100 * step + unit)

    def drawn(value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator)
        return torch.randint(0, 32, value.shape, generator=generator)

    found = {key: value if key == "attention_mask" else drawn(value) for key, value in arguments.items()}
    return found | ({"labels": found["input_ids"]} if "input_ids" in found else {})


def _loss(result):
    return result if isinstance(result, torch.Tensor) else result.loss


def train_alone(name, num_units):
    """Steps of Adam on the sum of what the units see."""
    module, _ = MODELS[name]()
    optimizer = torch.optim.Adam(module.parameters(), **ADAM)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [_loss(module(**sample_of(name, step, unit))) for unit in range(num_units)]
        sum(found).backward()
        gradients = gradients or {key: p.grad.clone() for key, p in module.named_parameters()}
        losses.append([loss.item() for loss in found])
        optimizer.step()
    least = LEAST_SPLIT[name] if num_units == 1 else 0
    return Trained(losses, gradients, dict(module.named_parameters()), least_split=least)


def train_parallel(name, plan_ngpus, use_zero, folder, policy=None):
    """The same on all processes of the run, whose number is a multiple of `plan_ngpus`; `policy` with its options."""
    policy, options = policy or (megatron if plan_ngpus > 1 else "dp", {})
    module, arguments = MODELS[name]()
    world_size = dist.get_world_size()
    config = ComputeConfig(
        plan_ngpus=plan_ngpus, runtime_ngpus=world_size, use_zero=use_zero, lowering="eager", pas_config=options
    )
    parallel = parallelize(
        module,
        arguments,
        policy,
        config,
        gen_savedir=folder / f"{name}{plan_ngpus}{use_zero}{len(options)}",
    )
    optimizer = build_optimizer(parallel, torch.optim.Adam, **ADAM)
    losses, gradients, num_units = [], {}, world_size // plan_ngpus
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(parallel(**sample_of(name, step, dist.get_rank() // plan_ngpus)))
        loss.backward()
        optimizer.sync_shard_grad()
        gradients = gradients or {key: full(p.grad) for key, p in parallel.named_parameters()}
        everywhere = [None] * world_size
        dist.all_gather_object(everywhere, loss.item())
        losses.append(everywhere[::plan_ngpus])
        assert len(losses[-1]) == num_units
        optimizer.step()
    weights = {key: full(p) for key, p in parallel.named_parameters()}
    split = [p for p in parallel.parameters() if isinstance(p, DTensor) and any(x.is_shard() for x in p.placements)]
    return Trained(losses, gradients, weights, num_split=0 if use_zero else len(split))


def full(tensor):
    """The whole of it, on this process."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
