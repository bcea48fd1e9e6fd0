"""Compiles and launches every kernel by Triton's own compiler and launcher, on the CPU: ops, engines, the smoke test.

    make launches                                                       # with several releases of Triton
    PYTHONPATH=benchmarks python -m tests.tools.launches --out launches.md    # with the one that is installed
    ... python -m tests.tools.launches --short                                # what `make test` runs of it
    ... python -m tests.tools.launches --only sampling

What it leaves out is what only a GPU does: values, graphs, time on the device (`benchmarks/gpu_smoke.py` is for those).
The table has a row for each kernel: variants compiled, seconds of compiling, launches, microseconds that one takes in
Python where it is repeated at once (p20), and the most that a variant takes of shared memory, registers and stack. Exit
status 1 names the kernels that do not compile or launch, those that nothing launches, and the checks that failed.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import gpu_smoke
import torch
import triton
from transformers import LlamaForCausalLM, PreTrainedModel

import hybrid_engine
from hybrid_engine.containers import InferenceModel
from hybrid_engine.engine.hybrid_engine import HybridEngine
from hybrid_engine.generation.model import probe
from hybrid_engine.generation.model.probe import LogprobDifference, compare_logprobs
from hybrid_engine.ops import DecodeBatch, cpu_kernels, dispatch, linear_log_prob_tiles
from tests.support.fake_cuda import (
    Launches,
    Meter,
    install,
    kernel_names,
    kernels_on_cpu,
    memory_as_it_is,
    p20,
    replaced,
    zeroed_memory,
)
from tests.support.launch_ops import Check, op_checks
from tests.support.models import WIDE_FAMILIES

ROWS = (1, 3, 8, 16, 17, 33, 64, 128, 256)
FEW_ROWS = (1, 40, 256)
PROMPT_TOKENS = 5
KINDS = ("PrefillBatch", "MixedBatch", "DecodeBatch")
SHORT_OPS = (
    "gated silu", "residual", "experts, silu, halves, 33 rows", "sum with a shared expert", "residual experts",
    "log-probabilities", "log-probabilities of a head, plain, 5 rows", "exact product", "exact sum", "exact _softmax",
    "exact RMS norm", "exact attention of 64, window None, no sinks", "step of states, heads of 64",
    "prefill of states, heads of 64",
    "divergence of heads, beta 0.5, 5 rows",
)  # fmt: skip
SAMPLINGS: tuple[dict[str, object], ...] = (
    {"do_sample": True, "top_k": 50, "top_p": 0.9},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 0, "min_p": 0.05},
    {"do_sample": True, "top_k": 0, "repetition_penalty": 1.2},
    {"do_sample": False, "repetition_penalty": 1.2, "min_new_tokens": 2},
)
"""Of engines, after greedy ones; `launch_ops.py` has more."""


def smoke_checks() -> Iterator[Check]:
    """Those of `benchmarks/gpu_smoke.py`, with nothing compared."""
    for name, run in gpu_smoke.all_checks():
        yield f"smoke: {name}", run


def engine_checks() -> Iterator[Check]:
    """The wide families in bf16, one in the other dtypes, and exact mode."""
    for family, build in WIDE_FAMILIES.items():
        yield f"engine: {family}", partial(run_engine, build, ROWS if family == "llama" else FEW_ROWS)
    for dtype in ("float32", "float16"):
        yield f"engine: llama, {dtype}", partial(run_engine, WIDE_FAMILIES["llama"], FEW_ROWS, dtype)
    for family in ("llama", "gemma2"):
        yield f"engine: {family}, exact", partial(run_engine, WIDE_FAMILIES[family], FEW_ROWS, exact=True)


def short_checks() -> Iterator[Check]:
    """An engine's prefill, decode and sampling, and the ops in bf16 that it does not use."""
    yield "engine: llama", run_small_engine
    yield from ((name, call) for name, call in op_checks(torch.bfloat16) if name in SHORT_OPS)


def all_checks() -> Iterator[Check]:
    """Ops first: what fails there fails in engines too. Kernels in fp16 are those in bf16; an engine shows them."""
    for dtype in (torch.bfloat16, torch.float32):
        for name, call in op_checks(dtype):
            yield f"op: {name}, {str(dtype).removeprefix('torch.')}", partial(repeated, call)
    yield from smoke_checks()
    yield from engine_checks()


def repeated(call: Callable[[], object]) -> None:
    """Compiles at the first call; the others tell what a launch costs."""
    for _ in range(3):
        call()


def run_engine(
    build: Callable[[], PreTrainedModel],
    rows: tuple[int, ...],
    dtype: str = "bfloat16",
    samplings: tuple[dict[str, object], ...] = SAMPLINGS,
    **generation: object,
) -> None:
    """Rollouts of so many rows, with each sampling, and one in which prompts enter while others decode.

    Raises:
        RuntimeError: no containers, or a kind of step that was not taken.
    """
    kinds: set[str] = set()
    forward = InferenceModel.forward

    def noting(model: InferenceModel, batch: object, *args: object) -> torch.Tensor:
        kinds.add(type(batch).__name__)
        return forward(model, batch, *args)

    with patch.object(InferenceModel, "forward", noting):
        engine = build_engine(build, dtype, max_running=256, **generation)
        for num_rows in rows:
            roll_out(engine, num_rows, do_sample=False)
        for options in samplings:
            roll_out(engine, rows[0], **options)
        lengths = [{"max_new_tokens": length} for length in (2, 6, 3, 6)]
        roll_out(build_engine(build, dtype, max_running=2, **generation), len(lengths), row_options=lengths)
    missing = [] if generation.get("exact") else [kind for kind in KINDS if kind not in kinds]
    if missing:
        raise RuntimeError(f"no {', '.join(missing)} was run")


def run_small_engine() -> None:
    """A Llama whose start tries fewer rows, and one sampling."""
    with patch.object(probe, "WIDE_ROWS", (1, 8)):
        run_engine(WIDE_FAMILIES["llama"], (3,), samplings=SAMPLINGS[:1])


def build_engine(build: Callable[[], PreTrainedModel], dtype: str, **generation: object) -> HybridEngine:
    """An engine on containers, whose workspace is cut as on a GPU."""
    generation = {"enabled": True, "print_latency": False, "kv_block_size": 64, "max_out_tokens": 128} | generation
    precision = {"bf16": {"enabled": dtype == "bfloat16"}, "fp16": {"enabled": dtype == "float16"}}
    config = {"train_micro_batch_size_per_gpu": 1, **precision, "hybrid_engine": generation}
    engine, *_ = hybrid_engine.initialize(model=build().eval(), config=config)
    if engine.generator.fallback_reason is not None:
        raise RuntimeError(f"no containers: {engine.generator.fallback_reason}")
    return engine.eval()


def roll_out(engine: HybridEngine, num_rows: int, **options: object) -> None:
    """A few tokens for each of so many prompts."""
    ids = torch.randint(3, 500, (num_rows, PROMPT_TOKENS))
    engine.generate(ids, torch.ones_like(ids), **{"max_new_tokens": 6, "pad_token_id": 0, "seed": 7} | options)


def time_pass(num_layers: int = 32, num_rows: int = 8) -> str:
    """Milliseconds of a processor that a decode step takes in Python where it is not recorded."""
    seconds: list[float] = []
    forward = InferenceModel.forward

    def timed(model: InferenceModel, batch: object, *args: object) -> torch.Tensor:
        if not isinstance(batch, DecodeBatch):
            return forward(model, batch, *args)
        with memory_as_it_is():
            begin = time.thread_time()
            logits = forward(model, batch, *args)
            seconds.append(time.thread_time() - begin)
        return logits

    engine = build_engine(partial(build_layers, num_layers), "bfloat16")
    roll_out(engine, num_rows)  # compiles
    with patch.object(InferenceModel, "forward", timed):
        roll_out(engine, num_rows, max_new_tokens=64, min_new_tokens=64)
    return f"a decode step of {num_layers} layers and {num_rows} rows, not recorded: {p20(seconds) * 1e3:.1f} ms"


def build_layers(num_layers: int) -> PreTrainedModel:
    """A Llama of so many small layers."""
    config = WIDE_FAMILIES["llama"]().config
    config.num_hidden_layers = num_layers
    return LlamaForCausalLM(config)


@contextmanager
def nothing_compared() -> Iterator[None]:
    """Kernels wrote nothing: whatever is compared agrees, and what was drawn is token 0."""

    def agree(*_: object) -> LogprobDifference:
        return LogprobDifference(0.0, 0.0)

    with ExitStack() as stack:
        stack.enter_context(zeroed_memory())
        stack.enter_context(replaced(compare_logprobs, agree))
        stack.enter_context(patch.object(gpu_smoke, "check", lambda case, ways, dtype: case.ours(*case.make())))
        stack.enter_context(patch.object(gpu_smoke, "compare_with_model", lambda *_: "not compared"))
        yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """What is chosen by where tensors lie is chosen as for a GPU."""
    with ExitStack() as stack:
        # Else products beyond the kernels' rows would lie by columns on some processors, which kernels do not read.
        stack.enter_context(patch.object(cpu_kernels, "_PROCESSOR", cpu_kernels.Processor.of("")))
        tile_bytes = linear_log_prob_tiles.TILE_BYTES_ON_GPU
        stack.enter_context(patch.object(linear_log_prob_tiles, "TILE_BYTES", tile_bytes))
        yield


def run(checks: list[Check], meter: Meter) -> list[str]:
    """Runs the checks; names of those that failed, each printed with its error."""
    failed = []
    for name, call in checks:
        try:
            call()
        except Exception as error:  # the next check may well pass
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        num_variants, spilled_bytes = meter.read_resources()
        if num_variants:
            spills = f", of which one spills {spilled_bytes} bytes" if spilled_bytes else ""
            print(f"{name}: {num_variants} variants compiled{spills}", flush=True)
        gc.collect()
    return failed


def table(meter: Meter) -> str:
    """A row for each kernel and one for all, in Markdown."""
    columns = (
        "kernel", "variants", "compile s", "launches", "us of Python per launch", "shared bytes", "registers",
        "spilled bytes",
    )  # fmt: skip
    rows: list[tuple[object, ...]] = [
        (name, k.num_variants, f"{k.compile_seconds:.1f}", k.num_launches, f"{k.microseconds:.0f}", k.shared_bytes,
         k.registers, k.spilled_bytes)
        for name, k in sorted(meter.kernels.items())
    ]  # fmt: skip
    rows.append(summed(list(meter.kernels.values())))
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def summed(kernels: list[Launches]) -> tuple[object, ...]:
    """The last row: sums, and a launch of any; of what a variant takes the most."""
    total = Launches(
        num_variants=sum(k.num_variants for k in kernels),
        compile_seconds=sum(k.compile_seconds for k in kernels),
        num_launches=sum(k.num_launches for k in kernels),
        seconds=[seconds for k in kernels for seconds in k.seconds],
        shared_bytes=max((k.shared_bytes for k in kernels), default=0),
        registers=max((k.registers for k in kernels), default=0),
        spilled_bytes=max((k.spilled_bytes for k in kernels), default=0),
    )
    return (
        "**all**", total.num_variants, f"{total.compile_seconds:.1f}", total.num_launches, f"{total.microseconds:.0f}",
        total.shared_bytes, total.registers, total.spilled_bytes,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and writes the table; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--short", action="store_true", help="one engine and the ops in bf16")
    parser.add_argument("--out", type=Path, help="a file for the table, in Markdown")
    args = parser.parse_args(arguments)
    if dispatch.IS_INTERPRETED or dispatch.fallback_forced():
        parser.error("kernels must be compiled: unset TRITON_INTERPRET and HYBRID_ENGINE_FALLBACK")
    os.environ[dispatch.SWITCH] = "0"  # a kernel that does not compile is no reason to go on without it
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        os.environ["HYBRID_ENGINE_CACHE"] = folder  # or a model that was probed before would not be again
        install(Path(folder))
        meter = Meter()
        for context in (kernels_on_cpu(), as_on_a_gpu(), nothing_compared()):
            stack.enter_context(context)
        torch.manual_seed(0)
        checks = [check for check in (short_checks() if args.short else all_checks()) if args.only in check[0]]
        if not checks:
            parser.error(f"no check is named {args.only!r}")
        with meter.installed():
            failed = run(checks, meter)
        step = "" if args.short or args.only else f"; {time_pass()}"
    report = f"Triton {triton.__version__}, sm_90, torch {torch.__version__}, no GPU{step}\n\n{table(meter)}\n"
    print(report)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(report)
    for name, error in meter.errors.items():
        print(f"KERNEL FAILED {name}: {error}")
    is_whole = not (args.short or args.only)
    unseen = sorted(kernel_names() - set(meter.kernels)) if is_whole else []
    if unseen:
        print(f"KERNELS THAT NOTHING LAUNCHED: {', '.join(unseen)}; call their ops in tests/support/launch_ops.py")
    for what, names in (("checks", failed), ("kernels", [*meter.errors, *unseen])):
        print(f"{len(names)} {what} failed{': ' if names else ''}{', '.join(names)}")
    return int(bool(failed or meter.errors or unseen))


if __name__ == "__main__":
    sys.exit(main())
