"""Compiles the kernels of `gpu_smoke.py` in several processes at once; later parts find them in Triton's cache.

    python benchmarks/gpu_compile.py --processes 8

A kernel that does not compile, or whose launch fails, is named; nothing is compared. Without a GPU references run.
"""

import argparse
import multiprocessing
import sys
import time

import torch
from bench_ops import Case, attention_cases, linear_cases, small_cases
from common import DTYPES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build_cases(dtype: torch.dtype) -> list[Case]:
    """Every op of `bench_ops.py`, as small as the smoke test has it and, on a GPU, at full size."""
    sizes = (True, False) if DEVICE == "cuda" else (True,)
    return [c for small in sizes for build in (linear_cases, attention_cases, small_cases)
            for c in build(dtype, DEVICE, small)]  # fmt: skip


def compile_share(share: tuple[int, int]) -> list[str]:
    """Runs every `share[1]`-th case from `share[0]` on; returns what failed."""
    failed = []
    number = 0
    for name in ("bfloat16", "float32"):
        for case in build_cases(DTYPES[name]):
            number += 1
            if number % share[1] != share[0]:
                continue
            try:
                with torch.no_grad():
                    case.ours(*case.make())
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:  # the next kernel may well compile
                last = (str(error).strip().splitlines() or [""])[-1]
                failed.append(f"{case.name}, {name}: {type(error).__name__}: {last}")
    return failed


def main() -> int:
    """1 where a kernel failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    num, begun = parser.parse_args().processes, time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(num) as pool:
        failed = [line for lines in pool.map(compile_share, [(i, num) for i in range(num)]) for line in lines]
    for line in failed:
        print(f"FAILED   {line}")
    print(f"{len(failed)} cases failed; {time.perf_counter() - begun:.0f} s in {num} processes on {DEVICE}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
