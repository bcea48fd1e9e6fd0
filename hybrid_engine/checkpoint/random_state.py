"""Every random state of a process as plain values: Python's, numpy's, torch's and this process's GPU's."""

import random
from typing import Any

import numpy as np
import torch


def get_random_state() -> dict[str, Any]:
    """The states as values that `torch.load(weights_only=True)` reads back."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Sets what `get_random_state` returned; a GPU's state is left alone where there is none."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seeds every generator whose state is kept here."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
