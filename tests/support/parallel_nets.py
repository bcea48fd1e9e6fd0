"""Small modules, their samples and their plain training, for tests of `parallelize`."""

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_engine import Plan

ADAM = {"lr": 0.01, "eps": 1e-3}
"""Gradients that are nothing but rounding, as those of a key's bias, must not be made as large as the others.

Near 0 Adam multiplies what a gradient rounds by with lr / eps: from 1e-4 a module's own training in fp32 was 1.05e-5
away from that in fp64 after two steps.
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Blocks between tied weights, buffers that are written into, a dict as its sample, logits beside the loss."""

    def __init__(self, num_blocks=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(num_blocks)), nn.LayerNorm(8)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, sample):
        self.calls += 1
        x = self.embed(sample["ids"])
        for block in self.blocks:
            x = block(x) * sample["mask"][..., None]
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), sample["ids"].roll(1).flatten(), reduction="sum")
        return loss, logits


def columns_then_rows(graph, config):
    """Megatron's layout of linears called `up` and `down`."""
    plan = Plan(graph=graph, mesh=(config.plan_ngpus,))
    plan.place("up", out="n")
    plan.place("down", out="k")
    plan.follow("*")
    return plan


def sample(seed, length=6):
    """A batch of four rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 16, (4, length), generator=generator)
    return {"ids": ids, "mask": torch.randint(0, 2, (4, length), generator=generator)}


def samples_of(step, count=4):
    """What all units together see in a step."""
    return [sample(100 * step + number) for number in range(count)]


def build(kind=Stack):
    torch.manual_seed(0)
    return kind()


def adam(named):
    """Two groups: weights and the rest."""
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() < 2], "lr": 0.02},
    ]


OPTIMIZERS = {"adam": (torch.optim.Adam, {"lr": 0.01}), "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})}


def plain_steps(module, optimizer, steps, clip=0.7):
    """The norms of the gradients, the sum of those of all samples of each step."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for batch in samples_of(step):
            module(batch)[0].backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), clip).item())
        optimizer.step()
    return norms


def plain_optimizer(module, name):
    kind, options = OPTIMIZERS[name]
    return kind(adam(list(module.named_parameters())), **options)


def plain_training(name, num_steps, kind=Stack):
    """Weights after so many steps, and the norms of each."""
    module = build(kind)
    norms = plain_steps(module, plain_optimizer(module, name), range(num_steps))
    return {key: p.detach() for key, p in module.named_parameters()}, norms
