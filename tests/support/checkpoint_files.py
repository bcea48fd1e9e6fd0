"""A small engine, its checkpoints, and what tests do to their files."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hybrid_engine

MANIFEST = "checkpoint.json"


def linear_engine(value: float = 1.0, size: int = 3, **more: Any) -> Any:
    """An engine over a linear of `size` inputs and two outputs, whose weights are `value`."""
    model = nn.Linear(size, 2)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, **more}
    return hybrid_engine.initialize(model=model, config=config)[0]


def step(engine: Any, num_steps: int = 1) -> Any:
    """Trains for some steps on ones; returns the engine."""
    for _ in range(num_steps):
        inputs = torch.ones(1, engine.module.in_features, dtype=engine.module.weight.dtype)
        engine.backward(engine(inputs).float().square().sum())
        engine.step()
    return engine


def snapshot(engine: Any) -> Any:
    """Copies of all that a checkpoint would change."""
    return copy.deepcopy(
        {
            "weights": dict(engine.module.named_parameters()),
            "masters": [trained.master for trained in engine.optimizer.parameters],
            "gradients": [trained.master.grad for trained in engine.optimizer.parameters],
            "optimizer": engine.optimizer.state_dict(),
            "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            "counters": [engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps],
            "random": torch.get_rng_state(),
            "pending": engine.num_pending_micro_batches,
        }
    )


def is_same(before: Any, after: Any) -> bool:
    """Whether two snapshots are equal, to the bit."""
    if isinstance(before, torch.Tensor):
        return torch.equal(before, after)
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(is_same(before[key], after[key]) for key in before)
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(is_same, before, after))
    return before == after


def as_format_1(folder: Path) -> None:
    """Makes a checkpoint one of the first format: sizes of files, no checksums, fewer entries in the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for key in ("checksum", "checksums", "tied", "scheduler", "pending_micro_batches"):
        manifest.pop(key, None)
    if manifest["optimizer"]:
        manifest["optimizer"].pop("defaults", None)
    manifest["format"] = 1
    manifest["files"] = {name: (folder / name).stat().st_size for name in manifest["files"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def replace_index(folder: Path, content: Any) -> None:
    """Puts other bytes, or another pickled object, in the place of the index of tensors; the manifest agrees."""
    (folder / ".metadata").write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    as_format_1(folder)
