"""Measures the links and devices of a machine for the planner of `parallelize`, and writes the figures to a file."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Measures links and devices for the planner of parallelize (policy autodist), and writes them to a file.

    torchrun --nproc-per-node 2 --no-python hybrid-engine measure-links --out costs.json

Collectives run over all processes that torchrun started and, with several nodes, also over those of one node. Nothing
else should run at the same time. Without --out, the file is the one that autodist reads by default.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybrid-engine measure-links",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file")
    parser.add_argument("--megabytes", type=float, default=16, help="size of the large message (default: 16)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=10,
        help="repetitions of each collective, of which the median is used (default: 10)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures on all processes; rank 0 writes the file and prints the figures. Returns the exit status.

    Raises ValueError for options out of range, and for a single process.
    """
    options = build_parser().parse_args(arguments)
    if options.megabytes < 1:
        raise ValueError(f"--megabytes={options.megabytes} must be at least 1, or latency alone is measured")
    if options.repeats < 1:
        raise ValueError(f"--repeats={options.repeats} must be at least 1")
    measuring = importlib.import_module("hybrid_engine.extensions.parallelize.planning.machine")  # needs torch
    processes = importlib.import_module("hybrid_engine.distributed.processes")
    measured_path = importlib.import_module("hybrid_engine.extensions.parallelize.planning.setting").measured_path
    processes.init_distributed()
    machine = measuring.measure_machine(int(options.megabytes * 1e6), options.repeats)
    if processes.get_rank() == 0:
        out = options.out or measured_path()
        machine.save(out)
        for side in ("near", "far"):
            for kind, link in getattr(machine, side).items():
                print(f"{side} {kind}: {link.latency_s * 1e6:.1f} us, {link.bytes_per_s / 1e9:.3f} GB/s")
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in machine.device.flops_per_s.items())
        print(f"products, TFLOPS: {rates}; memory {machine.device.bytes_per_s / 1e9:.4g} GB/s; written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
