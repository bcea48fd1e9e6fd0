"""Expected numbers of the RL maths, computed in float64 by a program that shares no code with this project."""

import json
from typing import Any

import torch

from tests.support.paths import DATA

GOLDENS = json.loads((DATA / "rlhf_goldens.json").read_text())


def load_golden(group: str) -> dict[str, Any]:
    """One group of goldens: lists as float64 tensors, `mask` as bool, numbers as they are."""
    entries = {name: _as_tensor(value) for name, value in GOLDENS[group].items()}
    if "mask" in entries:
        entries["mask"] = entries["mask"].bool()
    return entries


def _as_tensor(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value


def assert_golden(actual: torch.Tensor, expected: Any) -> None:
    """`actual` equals the golden up to the nine decimals it was written with."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-8)
