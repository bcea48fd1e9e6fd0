"""Random plans by the hundred: each is run on simulated ranks and compared with the module, forward and backward.

    python -m tests.tools.fuzz_plans                      # 100 plans of each model of test_lowering.py
    python -m tests.tools.fuzz_plans --plans 20 llama

Prints a line a model; ends with 1 where a plan differs, whose seed and mesh are named.
"""

import argparse
import logging
import sys
import time

import torch
import torch.distributed as dist

from tests.extensions.parallelize.test_lowering import CASES, build, check_plan, expected_step
from tests.support.random_splits import random_plan

MESHES = ((2,), (4,), (2, 2))


def count_mismatches(name: str, num_plans: int) -> int:
    """How many of the plans with seeds below `num_plans`, on the meshes in turn, differ from the module."""
    module, arguments, graph = build(name)
    expected, found, start = expected_step(module, arguments), 0, time.perf_counter()
    for seed in range(num_plans):
        mesh = MESHES[seed % len(MESHES)]
        try:
            check_plan(graph, random_plan(graph, mesh, seed), module, arguments, expected)
        except Exception as error:  # a plan that cannot be run is a mismatch too
            found += 1
            print(f"{name}: seed {seed}, mesh {mesh}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    seconds = time.perf_counter() - start
    print(
        f"{name}: {num_plans - found} of {num_plans} random plans compute what the module does, {seconds:.0f} s",
        flush=True,
    )
    return found


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", choices=[[], *CASES], help=f"of {', '.join(CASES)}")
    parser.add_argument("--plans", type=int, default=100, help="of each model (default 100)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        return int(sum(count_mismatches(name, args.plans) for name in args.models or CASES) > 0)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
