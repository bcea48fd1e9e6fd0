"""What the benchmarks share: shapes, timing, this machine's ceilings, peak memory; rows say where they are from."""

import argparse
import csv
import ctypes
import dataclasses
import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
ShapeT = TypeVar("ShapeT")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(LlamaShape):
    """A Llama, and the prompts and answers it is given."""

    prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def positions(self) -> int:
        """Of the longest prompt with its answer."""
        return self.prompt_tokens + self.new_tokens


# 17M parameters.
FULL = Shape(hidden=384, layers=6, heads=6, kv_heads=6, intermediate=1024, vocab=8192, prompts=32, prompt_tokens=64,
             new_tokens=128)  # fmt: skip
SMALL = Shape(hidden=64, layers=2, heads=4, kv_heads=4, intermediate=128, vocab=512, prompts=4, prompt_tokens=16,
              new_tokens=24)  # fmt: skip


def run_options(description: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; `repeats` is how often is timed unless the user says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny shapes: checks that everything runs, in seconds")
    parser.add_argument("--repeats", type=int, help=f"timed runs of each (default {repeats}, with --small 2)")
    parser.set_defaults(full_repeats=repeats)
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, help="rows are added here (default: results/, with --small nowhere)")
    return parser


def base_parser(description: str | None) -> argparse.ArgumentParser:
    """`run_options`, `--dtype` and a shape, whose options that are not given are those of `Shape`, or of `SMALL`."""
    parser = run_options(description)
    add_shape_options(parser, FULL, SMALL)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    return parser


def add_shape_options(parser: argparse.ArgumentParser, full: Any, small: Any) -> None:
    """An option for each field of two instances of a dataclass of integers."""
    for field in dataclasses.fields(full):
        defaults = f"default {getattr(full, field.name)}, with --small {getattr(small, field.name)}"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=defaults)


def chosen_shape(args: argparse.Namespace, full: ShapeT, small: ShapeT) -> ShapeT:
    """The shape for `args.small`, with the fields that were given on the command line."""
    base: Any = small if args.small else full
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(base)}
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})


def parse(parser: argparse.ArgumentParser, name: str) -> tuple[argparse.Namespace, Shape]:
    """Reads the command line, sets the threads, and fills in what was not given."""
    args = parse_run(parser, name)
    return args, chosen_shape(args, FULL, SMALL)


def parse_run(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """Reads the command line, sets the threads, and fills in what was not given of `run_options`."""
    args = parser.parse_args()
    args.repeats = args.repeats or (2 if args.small else args.full_repeats)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.csv is None and not args.small:
        args.csv = RESULTS / f"{name}.csv"
    return args


def llama_config(shape: LlamaShape, positions: int, **options: Any) -> transformers.LlamaConfig:
    """The model of a shape, with room for so many tokens in a sequence."""
    return transformers.LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=positions,
        **options,
    )


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """Of repeated measurements."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, samples: list[float]) -> "Quantiles":
        """Interpolated between the samples, the smallest and the largest included."""
        if len(samples) == 1:
            return cls(*samples * 3)
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(tenths[1], tenths[4], tenths[7])


def synchronize(device: str) -> None:
    """Waits for the device, so that a clock read afterwards counts its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], Any], device: str, clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """Seconds of `clock` that `run` took, and what it returned."""
    synchronize(device)
    start = clock()
    result = run()
    synchronize(device)
    return clock() - start, result


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this machine reached when nothing but memory or nothing but arithmetic was asked of it."""

    bytes_per_second: float
    flops_per_second: float


def measure_ceilings(device: str, dtype: torch.dtype, small: bool) -> Ceilings:
    """The best of three copies of a large buffer, counting bytes read and written, and of three large matmuls.

    On a CPU in fp32 these are of the faster of torch's two libraries.
    """
    num_bytes, size = (2**25, 512) if small else (2**28, 2048)
    if torch.device(device).type == "cuda" and not small:
        num_bytes, size = 2**31, 8192  # over a millisecond each, or the launch would count
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    products = [lambda: left @ right]
    if torch.device(device).type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], ""))
    target.copy_(source), [product() for product in products]  # page in, choose kernels
    copy_seconds = min(timed(lambda: target.copy_(source), device)[0] for _ in range(3))
    matmul_seconds = min(timed(product, device)[0] for product in products for _ in range(3))
    return Ceilings(2 * num_bytes / copy_seconds, 2 * size**3 / matmul_seconds)


def resident_bytes(field: str = "VmRSS") -> int:
    """A figure of this process's memory, from Linux."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; peak memory on the CPU is read from Linux")


def trim_memory() -> None:
    """Gives what was freed back to the operating system: objects, and memory that glibc keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@dataclasses.dataclass
class Peak:
    """`num_bytes` is set when the block that measures it ends."""

    num_bytes: int = 0


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Most memory the block held at once above what was held before it, all threads counted.

    On CUDA from the allocator; on the CPU from the resident set, which also counts memory that the C
    allocator keeps for later, and cannot show less than a page.
    """
    peak = Peak()
    gc.collect()
    if torch.device(device).type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated(device) - before
        return
    trim_memory()  # what others freed must not hide what this block takes
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    yield peak
    peak.num_bytes = max(0, resident_bytes("VmHWM") - before)


def environment(device: str) -> dict[str, str | int]:
    """Columns that say where a row is from."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def _commit() -> str:
    """What git says, unless BENCHMARK_COMMIT does: a copy of the files alone has no history to ask."""
    if os.environ.get("BENCHMARK_COMMIT"):
        return os.environ["BENCHMARK_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def append_rows(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Adds rows to a CSV, whose header the first ones write; None writes nothing.

    Raises ValueError if the file has other columns.
    """
    if path is None or not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    if path.exists():
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != columns:
            raise ValueError(f"--csv={path} has columns {found}, the new rows have {columns}; name another file")
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows added to {path}")
