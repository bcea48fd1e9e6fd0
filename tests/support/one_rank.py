"""What breaks on one rank alone, and what the ranks tell of it."""

import torch

import hybrid_engine
from hybrid_engine.zero.sharding import local_tensor
from tests.support.models import build_model


def build_engine(stage, pinned=True, trains=True, **options):
    torch.manual_seed(0)
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        **({"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}} if trains else {}),
        "hybrid_engine": {"enabled": True, "pin_parameters": pinned, "max_running": 2, **options},
    }
    return hybrid_engine.initialize(model=build_model(), config=config)[0]


class Broken:
    """`name` of `owner` raises `error` from its call number `calls` on."""

    def __init__(self, owner, name, error, calls=0):
        self.owner, self.name, self.error, self.calls = owner, name, error, calls

    def __enter__(self):
        self.had = self.name in vars(self.owner)
        self.real = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self)

    def __call__(self, *args, **kwargs):
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return self.real(*args, **kwargs)

    def __exit__(self, *unused):
        if self.had:
            setattr(self.owner, self.name, self.real)
        else:
            delattr(self.owner, self.name)


def outcome(action):
    """What it returned, or the class and words of its error."""
    try:
        return action()
    except BaseException as error:
        return type(error).__name__, str(error)


def check_error(parts, who, name, words=""):
    own, other = parts[who][0], parts[1 - who][0]
    assert isinstance(own, tuple) and isinstance(other, tuple), (name, own, other)
    assert own[0] == other[0], (name, own, other)
    assert own[1].removeprefix("[Errno 28] ").split(":")[0] in other[1]
    assert f"rank {who}: " in other[1] and words in other[1]


def local_parameters(engine):
    return [local_tensor(parameter) for parameter in engine.module.parameters()]
