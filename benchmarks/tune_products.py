"""Which tiles make a product of few rows fastest on this GPU; `ops/linears_kernels.py` chooses by a rule.

    python benchmarks/tune_products.py                       # every shape, some 60 tiles each
    python benchmarks/tune_products.py --only opt-1.3b --seconds 20

Each kernel of a decode step (query-key-value, output, up or gate and up, down) runs with each choice of tiles, over
weights that together exceed the second-level cache, recorded as a graph as decode steps are. A row tells the
microseconds of a launch and the share of the bandwidth that its weights reach; the rule's own choice comes first, and
a line per product says what the best would gain. Before it is timed a choice must give what the rule's own gives, to
the rounding of the dtype. Choices that need more shared memory than there is are left out.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import DTYPES, append_rows, environment, measure_ceilings, parse_run, run_options

from hybrid_engine.ops import QKVGemmOp, VectorMatMulOp, linears
from hybrid_engine.ops.dispatch import forget_prepared
from hybrid_engine.ops.linears import up_product
from hybrid_engine.ops.linears_kernels import ProductTiles, choose_tiles

# Weights that are rotated, several times the second-level cache of an H100 (50 MB) or H200 (60 MB).
ROTATED_BYTES = 2**29
SHARED_BYTES = 227 * 1024
CALLS = 40


@dataclass(frozen=True)
class Product:
    """One launch of a decode step."""

    shape: str
    kind: str  # qkv, linear, up
    rows: int
    width_in: int
    widths_out: tuple[int, ...]
    num_weights: int = 1  # of the same columns, side by side

    @property
    def num_bytes(self) -> int:
        """Of the weights, in 16 bits."""
        return 2 * self.width_in * sum(self.widths_out) * self.num_weights


def products_of(shape: str, rows: int, hidden: int, q: int, kv: int, mlp: int, gated: bool) -> list[Product]:
    """The four of a layer."""
    return [
        Product(shape, "qkv", rows, hidden, (q, kv, kv)),
        Product(shape, "linear", rows, q, (hidden,)),
        Product(shape, "up", rows, hidden, (mlp,), 2 if gated else 1),
        Product(shape, "linear", rows, mlp, (hidden,)),
    ]


PRODUCTS = [
    *products_of("opt-1.3b", 1, 2048, 2048, 2048, 8192, False),
    *products_of("qwen-0.5b", 1, 896, 896, 128, 4864, True),
    *products_of("qwen-1.5b", 64, 1536, 1536, 256, 8960, True),
    *products_of("opt-1.3b", 32, 2048, 2048, 2048, 8192, False),
    *products_of("llama-8b", 1, 4096, 4096, 1024, 14_336, True),
    Product("qwen-0.5b head", "linear", 1, 896, (151_936,)),
    Product("opt-1.3b head", "linear", 1, 2048, (50_272,)),
    Product("qwen-1.5b head", "linear", 64, 1536, (151_936,)),
]


def candidates(product: Product, own: ProductTiles, is_small: bool = False) -> list[ProductTiles]:
    """The rule's own choice first."""
    splits = (1, 2, 4, 8) if product.kind == "linear" and sum(product.widths_out) < 20_000 else (1,)
    found = [own]
    for block_n, stage_kib, flight_kib, warps, parts in itertools.product(
        (16, 32, 64, 128), (8, 16, 32), (48, 96, 160), (4, 8), splits
    ):
        block_k = stage_kib * 1024 // (2 * block_n * product.num_weights)
        if not 64 <= block_k <= 512 or block_n * warps < 64 or block_k > product.width_in:
            continue
        stages = 1 + flight_kib // stage_kib
        stage = (block_n * product.num_weights + own.rows) * block_k * 2
        programs = sum(-(-width // block_n) for width in product.widths_out)
        if stages > 8 or stages * stage > SHARED_BYTES or (parts > 1 and programs > 132) or programs < 24:
            continue
        if parts * 2 * block_k > product.width_in and parts > 1:
            continue
        found.append(ProductTiles(own.rows, block_n, block_k, parts, warps, stages))
    return list(dict.fromkeys(found))[: 3 if is_small else None]


def build(product: Product, device: str, dtype: torch.dtype) -> list[Callable[[], torch.Tensor]]:
    """A call for each set of weights."""
    sets = max(1, min(CALLS, ROTATED_BYTES // product.num_bytes)) if device != "cpu" else 1
    calls = []
    x = (torch.randn(product.rows, product.width_in, device=device) / product.width_in**0.5).to(dtype)
    for _ in range(sets):
        widths = product.widths_out * product.num_weights
        weights = [torch.randn(width, product.width_in, device=device, dtype=dtype).t() for width in widths]
        calls.append(_call(product, x, weights))
    return calls


def _call(product: Product, x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    if product.kind == "qkv":
        heads, kv_heads = (width // 64 for width in product.widths_out[:2])
        op = QKVGemmOp(None, 0.0, heads, kv_heads, 64)
        return lambda: op._launch(x, weights, [None] * 3)[0]
    if product.kind == "up":
        gate, up = ((weights[0], None), (weights[1], None)) if product.num_weights == 2 else (None, (weights[0], None))
        return lambda: up_product(x, gate, up, "silu" if product.num_weights == 2 else "relu")
    linear = VectorMatMulOp()
    return lambda: linear._launch(x, weights[0], None, None)


def microseconds(calls: list[Callable[[], torch.Tensor]], repeats: int) -> float:
    """The least of the replays, of one launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            calls[index % len(calls)]()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(1 + repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e3)
    return min(times[1:])


def check_alike(result: torch.Tensor, expected: torch.Tensor) -> None:
    """RuntimeError where a choice computes something else than the first."""
    error = ((result - expected).norm() / expected.norm()).item()
    if not error < 0.01:
        raise RuntimeError(f"the result is {error:.3g} from that of the first choice")


def read_arguments(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """The command line; without a GPU there is nothing to time."""
    parser.add_argument("--compile", action="store_true", help="runs every choice once and times nothing")
    args = parse_run(parser, name)
    if not args.compile and torch.device(args.device).type != "cuda":
        parser.error(f"--device={args.device}: kernels are timed on a GPU; --compile runs them once")
    return args


def use(tiles: ProductTiles) -> None:
    """From now on products run with these."""
    linears.choose_tiles = lambda *given, **options: tiles  # type: ignore
    forget_prepared()


def own_choice(product: Product, dtype: torch.dtype) -> ProductTiles:
    """What the rule says."""
    return choose_tiles(
        product.rows, product.width_in, product.widths_out, dtype,
        num_weights=product.num_weights, can_split=product.kind == "linear",
    )  # fmt: skip


def main() -> int:
    """Measures, prints, writes."""
    parser = run_options(__doc__, repeats=5)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--seconds", type=float, default=1e9, help="for each product")
    args = read_arguments(parser, "tiles")
    dtype = DTYPES["bfloat16"]
    bandwidth = 1.0 if args.compile else measure_ceilings(args.device, dtype, args.small).bytes_per_second
    for product in PRODUCTS:
        if args.only in product.shape:
            tune(product, bandwidth, dtype, args)
    return 0


def tune(product: Product, bandwidth: float, dtype: torch.dtype, args: argparse.Namespace) -> None:
    """One product."""
    torch.manual_seed(0)
    calls = build(product, args.device, dtype)
    own, begun, rows = own_choice(product, dtype), time.monotonic(), []
    expected = None
    for tiles in candidates(product, own, args.small):
        if time.monotonic() - begun > args.seconds:
            break
        use(tiles)
        try:
            result = calls[0]()
            if args.compile:
                continue
            for call in calls[1:2]:
                call()
            expected = result.float() if expected is None else expected
            check_alike(result.float(), expected)
            took = microseconds(calls, args.repeats)
        except Exception as error:  # the next choice may well run
            print(f"{product} {tiles} FAILED: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        rows.append({
            "shape": product.shape, "kind": product.kind, "num_rows": product.rows, "width_in": product.width_in,
            "width_out": sum(product.widths_out) * product.num_weights, **tiles._asdict(), "is_own": tiles == own,
            "microseconds": round(took, 2), "share_of_bandwidth": round(product.num_bytes / took / bandwidth * 1e6, 3),
        })  # fmt: skip
    if rows:
        best = min(rows, key=lambda row: row["microseconds"])
        told = {name: best[name] for name in ("block_n", "block_k", "splits", "num_warps", "num_stages")}
        print(f"{product.shape} {product.kind} {product.rows} x {product.width_in} x {product.widths_out}: own "
              f"{rows[0]['microseconds']} us ({rows[0]['share_of_bandwidth']}), best {best['microseconds']} "
              f"({best['share_of_bandwidth']}) of {len(rows)}: {told}; {own}", flush=True)  # fmt: skip
        append_rows(args.csv, [row | environment(args.device) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
