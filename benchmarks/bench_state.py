"""The decode step of a layer that keeps a state against that of an attention layer of the same model.

    python benchmarks/bench_state.py --threads 1
    python benchmarks/bench_state.py --threads 1 --kv-heads 8      # every query head has keys and values of its own

A model of two layers, a gated delta net and gated attention, with the sizes of Qwen3.5-0.8B. Each layer's mixer (norm,
projections, states or keys and values, output projection) takes one token of every row, in turn, at each context. Times
are CPU seconds of this process on a CPU, seconds on a GPU. The goals at 32 rows: at a context of 512 the state costs at
most 1.3 times the attention; at 8192 it costs what it costs at 512, within 10%.

Before anything is timed, the logits of eight steps are compared with the model's own forward.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch
from common import DTYPES, Quantiles, add_shape_options, append_rows, chosen_shape, environment, parse_run, run_options
from common import synchronize as wait_for
from rich.console import Console
from rich.table import Table
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.cache import ModelCache
from hybrid_engine.ops import DecodeBatch

CONTEXTS = (512, 8192)
BLOCK = 64
KINDS = ("gated delta net", "attention")


@dataclasses.dataclass(frozen=True)
class StateShape:
    """Rows, and sizes of both layers; queries and keys of the state have as many heads as its values."""

    rows: int
    hidden: int
    state_heads: int
    state_dim: int
    heads: int
    kv_heads: int
    head_dim: int


FULL = StateShape(rows=32, hidden=1024, state_heads=16, state_dim=128, heads=8, kv_heads=2, head_dim=256)
SMALL = StateShape(rows=2, hidden=32, state_heads=2, state_dim=16, heads=2, kv_heads=1, head_dim=16)


def build_model(shape: StateShape, dtype: torch.dtype, device: str) -> Qwen3_5ForCausalLM:
    """A layer of each kind, with a small MLP and vocabulary."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden,
        num_hidden_layers=2,
        vocab_size=256,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=shape.state_heads,
        linear_num_value_heads=shape.state_heads,
        linear_key_head_dim=shape.state_dim,
        linear_value_head_dim=shape.state_dim,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    return Qwen3_5ForCausalLM(config).eval().to(device, dtype)


def step_at(position: int, tokens: torch.Tensor) -> DecodeBatch:
    """One token `[S]` of every row at `position`; row i has the blocks and the slot that are its own."""
    num_rows, num_blocks = len(tokens), position // BLOCK + 1
    tables = torch.arange(num_rows * num_blocks, device=tokens.device).view(num_blocks, num_rows).t().contiguous()
    return DecodeBatch(
        tokens=tokens,
        positions=torch.full_like(tokens, position),
        block_tables=tables,
        context=position + 1,
        is_identity=False,
        state_slots=torch.arange(num_rows, device=tokens.device),
    )


def check(module: Qwen3_5ForCausalLM, model: InferenceModel, shape: StateShape) -> None:
    """Raises ValueError if a step's logits are not the module's own."""
    ids = torch.randint(256, (shape.rows, 8), device=model.device)
    cache = model.new_cache(shape.rows, BLOCK, shape.rows)
    logits = torch.stack([model.forward(step_at(t, ids[:, t]), cache, model.layers) for t in range(8)], 1)
    expected = module(ids).logits.float()
    bound = (1e-4 if model.dtype == torch.float32 else 0.1) * float(expected.abs().max())
    if (difference := float((logits - expected).abs().max())) > bound:
        raise ValueError(f"logits differ from the module's own by {difference}, more than {bound}")


def mixer_call(model: InferenceModel, index: int, cache: ModelCache, batch: DecodeBatch) -> Callable[[], object]:
    """A call of one layer's mixer on random hidden states."""
    layer = model.layers[index]
    hidden = torch.randn(len(batch.tokens), model.embedding.weight.shape[1], device=model.device, dtype=model.dtype)
    rotary = model.angles.rows(batch, model.dtype).get(layer.kind)
    return lambda: layer.mixer.forward(hidden, rotary, cache.layers[index], batch, hidden)


def seconds_of(call: Callable[[], object], device: str) -> float:
    """CPU seconds of a call, or seconds on a GPU."""
    clock = time.perf_counter if torch.device(device).type == "cuda" else time.process_time
    wait_for(device)
    start = clock()
    call()
    wait_for(device)
    return clock() - start


def measure(model: InferenceModel, shape: StateShape, contexts: tuple[int, ...], repeats: int, device: str):
    """Quantiles of a step's seconds by kind of layer and context."""
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    for context in contexts:
        batch = step_at(context - 1, torch.zeros(shape.rows, dtype=torch.int64, device=device))
        cache = model.new_cache(batch.block_tables.numel(), BLOCK, shape.rows)
        calls |= {(kind, context): mixer_call(model, index, cache, batch) for index, kind in enumerate(KINDS)}
    samples: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for repeat in range(repeats + 2):  # the first two warm up
        for key, call in calls.items():
            seconds = seconds_of(call, device)
            if repeat > 1:
                samples[key].append(seconds)
    return {key: Quantiles.of(values) for key, values in samples.items()}


def parse_arguments() -> tuple[argparse.Namespace, StateShape]:
    """The command line; on a CPU fp32 is the default."""
    parser = run_options(__doc__, repeats=20)
    add_shape_options(parser, FULL, SMALL)
    default = "bfloat16" if torch.cuda.is_available() else "float32"
    parser.add_argument("--dtype", choices=DTYPES, default=default)
    args = parse_run(parser, "state")
    return args, chosen_shape(args, FULL, SMALL)


@torch.no_grad()
def main() -> None:
    """Prints a table and adds a row for each kind of layer and context."""
    args, shape = parse_arguments()
    contexts = (65, 130) if args.small else CONTEXTS
    module = build_model(shape, DTYPES[args.dtype], args.device)
    model = InferenceModel(module)
    model.bind()
    model.prepare_positions(max(contexts))
    check(module, model, shape)
    quantiles = measure(model, shape, contexts, args.repeats, args.device)
    table = Table("layer", "context", "ms (p20)", "ms (p50)", "ms (p80)", "of attention's", "of the first context's")
    rows = []
    for (kind, context), times in quantiles.items():
        of_attention = times.p50 / quantiles[KINDS[1], context].p50
        of_first = times.p50 / quantiles[kind, contexts[0]].p50
        spread = (times.p20, times.p50, times.p80)
        table.add_row(kind, str(context), *(f"{t * 1e3:.2f}" for t in spread), f"{of_attention:.2f}", f"{of_first:.2f}")
        sizes = dataclasses.asdict(shape) | {"dtype": args.dtype, "layer": kind, "context": context}
        rows.append(environment(args.device) | sizes | dataclasses.asdict(times) | {"of_attention": of_attention})
    Console().print(table)
    append_rows(args.csv, rows)


if __name__ == "__main__":
    main()
