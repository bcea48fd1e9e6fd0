"""Which cut of a context makes decode attention fastest on this GPU; `ops/softmax_context_kernels.py` has one for all.

    python benchmarks/tune_attention.py

Every choice of the tokens of a program, of those that it loads together and of the stages in flight, on shapes of
OPT-1.3B, Qwen2 and Llama 8B; recorded as a graph over workspaces that together exceed the second-level cache. A row
tells the microseconds of both kernels together and the share of the bandwidth that keys and values reach. Before it is
timed a choice must give what the present one gives, to the rounding of the dtype.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import DTYPES, append_rows, environment, measure_ceilings, run_options
from tune_products import CALLS, ROTATED_BYTES, check_alike, microseconds, read_arguments

from hybrid_engine.ops import QKV, DecodeBatch, KVBlocks, SoftmaxContextOp
from hybrid_engine.ops import softmax_context_kernels as kernels
from hybrid_engine.ops.dispatch import forget_prepared

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Shape:
    """Rows that decode at the end of `context` tokens."""

    name: str
    rows: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def num_bytes(self) -> int:
        """Of keys and values, in 16 bits."""
        return 2 * 2 * self.rows * self.context * self.kv_heads * self.head_dim


SHAPES = [
    Shape("opt-1.3b", 1, 320, 32, 32, 64),
    Shape("qwen-0.5b", 1, 320, 14, 2, 64),
    Shape("qwen-1.5b", 64, 2080, 12, 2, 128),
    Shape("llama-8b", 32, 1024, 32, 8, 128),
    Shape("llama-8b", 1, 4096, 32, 8, 128),
]


def build(shape: Shape, device: str, dtype: torch.dtype) -> list[Callable[[], torch.Tensor]]:
    """A call for each workspace."""
    calls: list[Callable[[], torch.Tensor]] = []
    groups = shape.heads // shape.kv_heads
    op = SoftmaxContextOp(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
    blocks_per_row = -(-shape.context // BLOCK_SIZE)
    num_blocks = shape.rows * blocks_per_row
    batch = DecodeBatch(
        tokens=torch.zeros(shape.rows, dtype=torch.int64, device=device),
        positions=torch.full((shape.rows,), shape.context - 1, device=device),
        block_tables=torch.randperm(num_blocks, device=device).view(shape.rows, -1),
        context=shape.context,
        is_identity=False,
    )
    q = torch.randn(shape.rows, shape.kv_heads, groups, shape.head_dim, device=device).to(dtype)
    k, v = (torch.randn(shape.rows, shape.kv_heads, shape.head_dim, device=device).to(dtype) for _ in range(2))
    for _ in range(max(1, min(CALLS, ROTATED_BYTES // shape.num_bytes)) if device != "cpu" else 1):
        sizes = (2, num_blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        cache = KVBlocks(*torch.randn(*sizes, device=device, dtype=dtype))
        calls.append(functools.partial(op, QKV(q, k, v), cache, batch))
    return calls


def cut_of(tokens: int, split: int, form: kernels.AttentionForm, element_size: int) -> kernels.DecodeTiles:
    """What `decode_tiles` answers while `tokens` and `split` are tried."""
    return kernels.DecodeTiles(kernels.padded_groups(form.groups), tokens, split)


def tune(shape: Shape, bandwidth: float, dtype: torch.dtype, args: argparse.Namespace) -> None:
    """One shape."""
    torch.manual_seed(0)
    calls, rows, expected = build(shape, args.device, dtype), [], None
    present = kernels.SPLIT, kernels.decode_tiles, kernels.DECODE_STAGES
    choices: list[tuple[int, int | None, int]] = [(kernels.SPLIT, None, kernels.DECODE_STAGES)]
    choices += itertools.product((128, 256, 512), (32, 64, 128), (3, 4, 5, 6))
    for split, tokens, stages in choices:
        kernels.SPLIT, kernels.DECODE_STAGES = split, stages
        if tokens is not None:
            kernels.decode_tiles = functools.partial(cut_of, tokens, split)
        forget_prepared()
        try:
            result = calls[0]().float()
            if args.compile:
                continue
            calls[-1]()
            expected = result if expected is None else expected
            check_alike(result, expected)
            took = microseconds(calls, args.repeats)
        except Exception as error:  # the next choice may well run
            print(f"{shape} {split} {tokens} {stages} FAILED: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        rows.append({
            **vars(shape), "split": split, "tokens": tokens or "", "stages": stages, "microseconds": round(took, 2),
            "share_of_bandwidth": round(shape.num_bytes / took / bandwidth * 1e6, 3),
        })  # fmt: skip
    kernels.SPLIT, kernels.decode_tiles, kernels.DECODE_STAGES = present
    forget_prepared()
    if rows:
        best = sorted(rows, key=lambda row: row["microseconds"])[:3]
        told = [(row["split"], row["tokens"], row["stages"], row["microseconds"]) for row in best]
        print(f"{shape}: present {rows[0]['microseconds']} us ({rows[0]['share_of_bandwidth']}), best {told} "
              f"({best[0]['share_of_bandwidth']})", flush=True)  # fmt: skip
        append_rows(args.csv, [row | environment(args.device) for row in rows])


def main() -> int:
    """Measures, prints, writes."""
    parser = run_options(__doc__, repeats=5)
    args = read_arguments(parser, "attention_tiles")
    dtype = DTYPES["bfloat16"]
    bandwidth = 1.0 if args.compile else measure_ceilings(args.device, dtype, args.small).bytes_per_second
    for shape in SHAPES:
        tune(shape, bandwidth, dtype, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
