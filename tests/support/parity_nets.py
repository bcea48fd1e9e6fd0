"""The modules whose training under every plan is compared with their own: a sample in, a loss and an output back."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.causal_models import CAUSAL_MODELS, build_causal, causal_batch

Sample = dict[str, Any]


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, sample):
        x = sample["x"]
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.mse_loss(x, sample["y"]), x


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        heads = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, sample):
        x = self.embed(sample["ids"])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), sample["ids"].roll(1, 1).flatten()), logits


class Experts(nn.Module):
    """Two of four experts for each row."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 3), nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x):
        chosen, experts = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros(*x.shape[:-1], 4, device=x.device).scatter(-1, experts, chosen)
        hidden = F.silu(torch.einsum("nk,ekm->enm", x, self.up))
        return x + torch.einsum("enm,emk,ne->nk", hidden, self.down, weights)


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, sample):
        x = self.first(sample["x"])
        for layer in self.layers:
            x = layer(x)
        x = self.last(x)
        return F.mse_loss(x, sample["y"]), x


class Convolutions(nn.Module):
    """A batch norm between, whose statistics are of the whole batch, and which takes away what a bias before it adds:
    its gradient would be nothing but rounding.
    """

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, sample):
        x = F.max_pool2d(F.relu(self.norm(self.first(sample["image"])), inplace=True), 2)
        logits = self.head(self.second(x).mean((2, 3)))
        return F.cross_entropy(logits, sample["label"]), logits


class Tied(nn.Module):
    """The first weight is the last one too."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, sample):
        logits = self.head(F.silu(self.second(F.silu(self.first(self.embed(sample["ids"]))))))
        return F.cross_entropy(logits.flatten(0, 1), sample["ids"].flatten(), reduction="sum"), logits


class Buffers(nn.Module):
    """Buffers that are read, that are written into, and that no state dict has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 8))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("shift", torch.linspace(-1, 1, 8), persistent=False)

    def forward(self, sample):
        self.calls += 1
        x = sample["x"] * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x + self.shift))
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        return (x - sample["y"]).square().mean(), x


class Nested(nn.Module):
    """A dict of dicts and a number in, a dict out."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, sample):
        x = self.embed(sample["text"]["ids"]) * sample["factor"]
        for layer in self.layers:
            x = F.gelu(layer(x)) * sample["text"]["mask"][..., None]
        scores = self.head(x).squeeze(-1)
        return {"loss": F.mse_loss(scores, sample["target"]), "scores": scores}


class Causal(nn.Module):
    """A model of transformers."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, sample):
        result = self.model(**sample, use_cache=False)
        return result.loss, result.logits


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Perceptron,
    "transformer": Transformer,
    "experts": MixtureOfExperts,
    "convolutions": Convolutions,
    "tied": Tied,
    "buffers": Buffers,
    "nested": Nested,
    **{name: lambda name=name: Causal(build_causal(name)) for name in CAUSAL_MODELS},
}


def build_net(name: str) -> nn.Module:
    """The module, with the same weights each time."""
    torch.manual_seed(0)
    return NETS[name]()


def sample_for(name: str, seed: int) -> Sample:
    """A batch of four rows for the module of that name."""
    generator = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    if name in ("mlp", "experts", "buffers"):
        return {"x": floats(4, 8), "y": floats(4, 8)}
    if name == "convolutions":
        return {"image": floats(4, 4, 8, 8), "label": whole(4, 4)}
    if name == "nested":
        return {"text": {"ids": whole(16, 4, 6), "mask": whole(2, 4, 6)}, "target": floats(4, 6), "factor": 2.0}
    if name in ("transformer", "tied"):
        return {"ids": whole(16, 4, 6)}
    batch = causal_batch(generator)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
