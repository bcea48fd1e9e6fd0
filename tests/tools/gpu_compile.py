"""Compiles every kernel in several processes at once; later parts find them in Triton's cache.

    python tests/tools/gpu_compile.py --processes 8        # the first part of `make gpu`

These are the ops of `bench_ops.py` in bf16 and fp32, and all ops of `make launches` in bf16. A kernel that does not
compile, or whose launch fails, is named; nothing is compared. Without a GPU references run.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from hybrid_engine.ops.dispatch import SWITCH

# After the installed package, of which the folder of the repository has only a part.
sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("", "benchmarks"))
from bench_ops import Case, attention_cases, linear_cases, small_cases
from common import DTYPES

from tests.support.launch_ops import op_checks, samplings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = ("exact ", " 2100 rows")
"""In names of ops that a CPU leaves out: exact mode's have no reference, and many rows take long."""


def build_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and calls; of `bench_ops.py` as small as the smoke test has them and, on a GPU, at full size."""
    sizes = (True, False) if DEVICE == "cuda" else (True,)
    for name in ("bfloat16", "float32"):
        for small in sizes:
            for build in (linear_cases, attention_cases, small_cases):
                for case in build(DTYPES[name], DEVICE, small):
                    yield f"{case.name}, {name}", partial(run_case, case)
    for name, call in list_checks():
        if DEVICE == "cuda" or not any(part in name for part in ON_GPU):
            yield name, partial(run_check, call)


def list_checks() -> list[tuple[str, Callable[[], object]]]:
    """All ops of `make launches` in bf16; samplings, which read logits, in fp32."""
    with torch.device(DEVICE):
        return [*op_checks(torch.bfloat16), *samplings()]


def run_case(case: Case) -> None:
    """Without gradients."""
    with torch.no_grad():
        case.ours(*case.make())


def run_check(call: Callable[[], object]) -> None:
    """On the device, forward and where it has one backward."""
    with torch.device(DEVICE):
        call()


def compile_share(share: tuple[int, int]) -> list[str]:
    """Runs every `share[1]`-th case from `share[0]` on; returns what failed."""
    os.environ.setdefault(SWITCH, "0")  # else an op whose kernel does not compile would run in torch
    failed = []
    for number, (name, call) in enumerate(build_cases()):
        if number % share[1] != share[0]:
            continue
        try:
            call()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # the next kernel may well compile
            last = (str(error).strip().splitlines() or [""])[-1]
            failed.append(f"{name}: {type(error).__name__}: {last}")
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
