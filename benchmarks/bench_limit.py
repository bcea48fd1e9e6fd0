"""How far a decode step, a prefill and a training step on a CPU are from the least time this processor can take.

    python benchmarks/bench_limit.py --threads 2                        # a Llama of 17M parameters, random weights
    python benchmarks/bench_limit.py --model FOLDER --threads 2         # a real model
    python benchmarks/bench_limit.py --parts products decode --dtypes bfloat16 --rows 16 128

The least time is the sum of three parts, each at the better of the limits that this run measures: products at the peak
rate of the fastest library or weights at the memory's bandwidth, whichever takes longer; attention at the peak rate or
keys and values at that bandwidth; one pass over the logits. A training step is three times its forward products.

Limits are the best of several measurements in CPU seconds at the beginning and at the end: products of many sizes by
torch, by oneDNN and by the compiled functions, and reading memory that no cache holds. The two precisions are measured
in turn. `share` is the least time over the measured one; `of CPU` takes the seconds that the threads worked instead,
which says what a quiet machine would show. `products` are those of one layer of the model, one linear after another,
with as many copies of the layer as fill 256 MiB.

Checked before it is timed: products against fp64, log-probabilities of rollouts against the model's own forward.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    DTYPES,
    FULL,
    SMALL,
    Ceilings,
    Quantiles,
    append_rows,
    environment,
    llama_config,
    parse_run,
    run_options,
)
from rich.console import Console
from rich.table import Table
from roofline import ModelCounts
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import hybrid_engine
from hybrid_engine.ops import cpu_kernels, token_logprobs

PARTS = ("products", "decode", "prefill", "train")
# Mean difference of log-probabilities from the module's forward that rounding explains.
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1}
PROMPT_TOKENS, NEW_TOKENS = 128, 32


class Timing(NamedTuple):
    """One measurement."""

    wall: float
    cpu: float
    """Seconds that the threads worked, divided by their number."""


def timed(run: Callable[[], Any]) -> Timing:
    """Seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Timing(time.perf_counter() - wall, (time.process_time() - cpu) / torch.get_num_threads())


def best(run: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds that the threads worked for the fastest of some calls, after one."""
    run()
    return min(timed(run).cpu for _ in range(repeats))


def products_of(input: torch.Tensor, weight: torch.Tensor) -> list[Callable[[], Any]]:
    """The ways to multiply `input [N, in]` and `weight [out, in]`."""
    ways: list[Callable[[], Any]] = [lambda: torch.mm(input, weight.t())]
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(input, weight, None, "none", [], ""))
    linear = (weight.t(), None)
    if len(input) <= 128 and cpu_kernels.can_multiply(input, [linear]):
        ways.append(lambda: cpu_kernels.products(input, [linear]))
    return ways


def measure_limits(dtype: torch.dtype, is_small: bool) -> Ceilings:
    """The bandwidth of reading and the peak rate of products."""
    num_bytes = 2**24 if is_small else 2**28
    source = torch.ones(num_bytes // 4)
    seconds = best(lambda: source.sum())
    flops = 0.0
    for rows, width in ((128, 256), (64, 512)) if is_small else ((128, 576), (128, 1536), (512, 1024), (2048, 2048)):
        input, weight = torch.randn(rows, width).to(dtype), torch.randn(width, width).to(dtype)
        least = min(best(way) for way in products_of(input, weight))
        flops = max(flops, 2 * rows * width * width / least)
    return Ceilings(num_bytes / seconds, flops)


def best_limits(measured: list[dict[torch.dtype, Ceilings]]) -> dict[torch.dtype, Ceilings]:
    """The highest of each limit; the memory's bandwidth is the same for every precision."""
    bandwidth = max(limits.bytes_per_second for each in measured for limits in each.values())
    rates = {dtype: max(each[dtype].flops_per_second for each in measured) for dtype in measured[0]}
    return {dtype: Ceilings(bandwidth, rate) for dtype, rate in rates.items()}


class Work(NamedTuple):
    """What a pass cannot do without."""

    weight_bytes: float
    products: float
    """Operations."""
    kv_bytes: float = 0.0
    attention: float = 0.0
    """Operations."""
    logit_bytes: float = 0.0

    def seconds(self, limits: Ceilings) -> float:
        """The least time."""
        bandwidth, rate = limits.bytes_per_second, limits.flops_per_second
        products = max(self.weight_bytes / bandwidth, self.products / rate)
        return products + max(self.kv_bytes / bandwidth, self.attention / rate) + self.logit_bytes / bandwidth


class Result(NamedTuple):
    """The measurements of one part."""

    part: str
    dtype: torch.dtype
    num_rows: int
    work: Work
    timings: list[Timing]


def decode_work(counts: ModelCounts, num_rows: int) -> Work:
    """A step of `num_rows` answers to one prompt, each with keys and values of its own, in the middle of a rollout."""
    context = num_rows * (PROMPT_TOKENS + NEW_TOKENS // 2)
    products = 2 * num_rows * (counts.layers + counts.head)
    logit_bytes = num_rows * counts.vocab * counts.element
    return Work(counts.weight_bytes, products, context * counts.kv_bytes, context * counts.attention, logit_bytes)


def prefill_work(counts: ModelCounts, num_prompts: int) -> Work:
    """A pass over prompts, with logits after each one's last token."""
    tokens, pairs = num_prompts * PROMPT_TOKENS, num_prompts * PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2
    products = 2 * (tokens * counts.layers + num_prompts * counts.head)
    logit_bytes = num_prompts * counts.vocab * counts.element
    return Work(counts.weight_bytes, products, tokens * counts.kv_bytes, pairs * counts.attention, logit_bytes)


def train_work(counts: ModelCounts, num_rows: int, length: int) -> Work:
    """Forward and backward of `num_rows` sequences, with logits at every token."""
    tokens, pairs = num_rows * length, num_rows * length * (length + 1) / 2
    products = 6 * tokens * (counts.layers + counts.head)
    return Work(3 * counts.weight_bytes, products, 0.0, 3 * pairs * counts.attention, tokens * counts.vocab * 4)


class Bench:
    """A model in one precision, in an engine.

    Args:
        source: the folder of a model; None: a Llama with random weights.
    """

    def __init__(self, source: str | None, dtype: torch.dtype, is_small: bool, max_rows: int):
        torch.manual_seed(0)
        self.dtype, self.is_small = dtype, is_small
        self.model = _build_model(source, is_small).to(dtype)
        self.counts = ModelCounts.of(self.model)
        config: dict[str, Any] = {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
            "bf16": {"enabled": dtype == torch.bfloat16},
            "hybrid_engine": {
                "enabled": True, "max_out_tokens": PROMPT_TOKENS + NEW_TOKENS, "max_running": max_rows,
                "print_latency": False, "release_inference_cache": True,
            },
        }  # fmt: skip
        self.engine, *_ = hybrid_engine.initialize(model=self.model, config=config)
        self.prompts = torch.randint(3, self.counts.vocab, (max_rows, PROMPT_TOKENS))

    def generate(self, num_prompts: int, num_samples: int, num_tokens: int) -> Any:
        """Answers without an end, with their log-probabilities."""
        prompts = self.prompts[:num_prompts]
        return self.engine.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=num_tokens,
            num_return_sequences=num_samples, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, seed=1,
        )  # fmt: skip

    def check(self) -> None:
        """Raises RuntimeError if a rollout's log-probabilities are not the model's own."""
        self.engine.eval()
        output = self.generate(2, 2, 8)
        with torch.no_grad():
            logits = self.model(output.sequences).logits[:, PROMPT_TOKENS - 1 : -1]
        own = token_logprobs(logits, output.sequences[:, PROMPT_TOKENS:])
        difference = (own - output.logprobs).abs().mean().item()
        if not difference <= ROUNDING[self.dtype]:
            raise RuntimeError(f"{self.dtype}: log-probabilities are {difference:.3g} from the model's own on average")

    def decode(self, num_rows: int) -> Timing:
        """One step."""
        return self._phase(lambda: self.generate(1, num_rows, NEW_TOKENS), "decode_seconds", NEW_TOKENS - 1)

    def prefill(self, num_prompts: int) -> Timing:
        """One pass over prompts, of which each draws one token."""
        return self._phase(lambda: self.generate(num_prompts, 1, 1), "prefill_seconds", 1)

    def _phase(self, run: Callable[[], Any], figure: str, times: int) -> Timing:
        self.engine.eval()
        self.engine.latency.begin()
        whole = timed(run)
        wall = self.engine.latency_stats()[figure] / times
        return Timing(wall, wall * whole.cpu / whole.wall)

    def train(self, num_rows: int, length: int) -> Timing:
        """Forward and backward, without the optimizer's step."""
        self.engine.train()
        tokens = torch.randint(3, self.counts.vocab, (num_rows, length))

        def step() -> None:
            logits = self.engine(input_ids=tokens, use_cache=False).logits
            self.engine.backward(functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()))

        timing = timed(step)
        self.engine.zero_grad()
        return timing

    def layer_products(self, num_rows: int) -> tuple[Timing, float]:
        """The linears of a layer on rows, by the engine's choice of library; and their operations."""
        config = self.model.config
        hidden, inner = config.hidden_size, config.intermediate_size
        widths = [(hidden, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]
        copies = 2 if self.is_small else max(2, 2**28 // (sum(a * b for a, b in widths) * self.dtype.itemsize))
        layers = [[torch.randn(b, a, dtype=self.dtype).t() for a, b in widths] for _ in range(copies)]
        inputs = {width: torch.randn(num_rows, width, dtype=self.dtype) for width in (hidden, inner)}
        for (width, _), weight in zip(widths, layers[0], strict=True):
            exact = inputs[width].double() @ weight.double()
            error = (cpu_kernels.linear_transposed(inputs[width], weight, None).double() - exact).abs().max()
            assert error <= 2 * torch.finfo(self.dtype).eps * exact.abs().max() * 8, f"{error=} {width=} {num_rows=}"

        def run() -> None:
            for weights in layers:
                for (width, _), weight in zip(widths, weights, strict=True):
                    cpu_kernels.linear_transposed(inputs[width], weight, None)

        run()
        return timed(run), copies * 2.0 * num_rows * sum(a * b for a, b in widths)


def _build_model(source: str | None, is_small: bool) -> PreTrainedModel:
    if source is not None:
        model = AutoModelForCausalLM.from_pretrained(source)
    else:
        shape = SMALL if is_small else FULL
        model = LlamaForCausalLM(llama_config(shape, PROMPT_TOKENS + NEW_TOKENS + 256, pad_token_id=0))
    for config in (model.config, model.generation_config):
        config.bos_token_id = config.eos_token_id = None
    return model.eval()


def measure(args: argparse.Namespace, benches: list[Bench]) -> list[Result]:
    """All parts, the precisions in turn."""
    results = []
    for part in args.parts:
        for num_rows in args.rows if part in ("products", "decode") else [args.batch]:
            timings: dict[torch.dtype, list[Timing]] = {bench.dtype: [] for bench in benches}
            work = {}
            for _ in range(args.repeats):
                for bench in benches:
                    timing, work[bench.dtype] = _measure_part(part, bench, num_rows, args)
                    timings[bench.dtype].append(timing)
            for dtype, found in timings.items():
                results.append(Result(part, dtype, num_rows, work[dtype], found))
                print(describe(results[-1]), flush=True)
    return results


def _measure_part(part: str, bench: Bench, num_rows: int, args: argparse.Namespace) -> tuple[Timing, Work]:
    if part == "products":
        timing, flops = bench.layer_products(num_rows)
        return timing, Work(flops / (2 * num_rows) * bench.dtype.itemsize, flops)
    if part == "decode":
        return bench.decode(num_rows), decode_work(bench.counts, num_rows)
    if part == "prefill":
        return bench.prefill(num_rows), prefill_work(bench.counts, num_rows)
    length = PROMPT_TOKENS if args.small else 2 * PROMPT_TOKENS
    return bench.train(num_rows, length), train_work(bench.counts, num_rows, length)


def describe(result: Result) -> str:
    """A line while it runs."""
    median = Quantiles.of([timing.wall for timing in result.timings]).p50
    return f"{result.part} {result.num_rows} {str(result.dtype).removeprefix('torch.')}: {median * 1e3:.1f} ms"


def row_of(result: Result, limits: Ceilings) -> dict[str, Any]:
    """A row of the table and of the CSV."""
    wall = Quantiles.of([timing.wall for timing in result.timings])
    cpu = Quantiles.of([timing.cpu for timing in result.timings])
    least, flops = result.work.seconds(limits), result.work.products + result.work.attention
    return {
        "part": result.part, "rows": result.num_rows, "dtype": str(result.dtype).removeprefix("torch."),
        "ms_p20": round(wall.p20 * 1e3, 3), "ms_p50": round(wall.p50 * 1e3, 3), "ms_p80": round(wall.p80 * 1e3, 3),
        "cpu_ms_p50": round(cpu.p50 * 1e3, 3), "least_ms": round(least * 1e3, 3),
        "share": round(least / wall.p50, 3), "share_of_cpu": round(least / cpu.p50, 3),
        "gflops": round(flops / wall.p50 / 1e9, 1), "peak_gflops": round(limits.flops_per_second / 1e9, 1),
        "peak_gbytes": round(limits.bytes_per_second / 1e9, 1),
    }  # fmt: skip


def main() -> None:
    """Prints a table and adds rows to a CSV."""
    parser = run_options(__doc__, repeats=3)
    parser.add_argument("--model", help="the folder of a model (default: a Llama of 17M parameters)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, help="default 1, 4, 16, 64, 128 and 256, with --small 1 and 4")
    parser.add_argument("--batch", type=int, help="prompts of a prefill, sequences of a training step (default 8)")
    args = parse_run(parser, "limit")
    args.rows = args.rows or ([1, 4] if args.small else [1, 4, 16, 64, 128, 256])
    args.batch = args.batch or (2 if args.small else 8)
    dtypes = [DTYPES[name] for name in args.dtypes]
    benches = [Bench(args.model, dtype, args.small, max(*args.rows, args.batch, 4)) for dtype in dtypes]
    for bench in benches:
        bench.check()
    before = {dtype: measure_limits(dtype, args.small) for dtype in dtypes}
    results = measure(args, benches)
    limits = best_limits([before, {dtype: measure_limits(dtype, args.small) for dtype in dtypes}])
    rows = [row_of(result, limits[result.dtype]) for result in results]
    table = Table(*(column.replace("_", " ").replace("share of cpu", "of CPU") for column in rows[0]))
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=180).print(table)
    append_rows(
        args.csv,
        [{"model": Path(args.model).name if args.model else "llama-17m", **row, **environment("cpu")} for row in rows],
    )


if __name__ == "__main__":
    main()
