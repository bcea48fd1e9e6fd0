"""Memory, files, threads and temporary files over many cycles of rollouts and steps, saves and new engines.

    python -m tests.tools.attack.leaks [--cycles 1000]

Each figure is taken after a warm-up and after the cycles; what grows with the cycles is a leak.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from .interrupts import VARIANTS, Cycle

WARM_UP = 10
MAY_GROW = {"memory of the process, KiB": 8192, "objects": 400}
"""What the allocator and caches take for good, whatever the number of cycles; nothing else may grow at all."""


@dataclass(frozen=True)
class Growth:
    """What a number of cycles of one kind added."""

    kind: str
    cycles: int
    added: dict[str, int]

    @property
    def leaks(self) -> dict[str, int]:
        """What grew that must not."""
        return {name: amount for name, amount in self.added.items() if amount > MAY_GROW.get(name, 0)}


def measure() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    process = psutil.Process()
    objects = gc.get_objects()
    return {
        "memory of the process, KiB": process.memory_info().rss // 1024,
        "tensors": sum(isinstance(entry, torch.Tensor) for entry in objects),
        "objects": len(objects),
        "file descriptors": process.num_fds(),
        "threads": threading.active_count(),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def grow(kind: str, action: Callable[[], Any], cycles: int) -> Growth:
    """What `cycles` calls of `action` add, after some that may fill caches."""
    for _ in range(WARM_UP):
        action()
    before = measure()
    for _ in range(cycles):
        action()
    after = measure()
    return Growth(kind, cycles, {name: after[name] - before[name] for name in before})


def attack(cycles: int) -> list[Growth]:
    """Every kind of cycle; those that build or save are a tenth as many."""
    growths = []
    own = tempfile.TemporaryDirectory()
    tempfile.tempdir = own.name  # others write to the usual one meanwhile
    with own, tempfile.TemporaryDirectory() as folder:
        for name, variant in VARIANTS.items():
            growths.append(grow(f"eval, generate, train, step ({name})", Cycle(variant).run, cycles))
        cycle = Cycle({})

        def save_and_load() -> None:
            cycle.run()
            cycle.engine.save_checkpoint(Path(folder) / "run", "last")
            cycle.engine.load_checkpoint(Path(folder) / "run")

        def build() -> None:
            Cycle({}).run()

        growths.append(grow("save and load", save_and_load, max(1, cycles // 10)))
        growths.append(grow("a new engine", build, max(1, cycles // 10)))
    tempfile.tempdir = None
    return growths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    torch.set_num_threads(1)
    growths = attack(parser.parse_args().cycles)
    for growth in growths:
        print(growth, growth.leaks or "no leak")
    return int(any(growth.leaks for growth in growths))


if __name__ == "__main__":
    sys.exit(main())
