"""Layers that keep a state against an attention layer of the same width: a decode step, and a prefill.

    python benchmarks/bench_state.py --threads 1
    python benchmarks/bench_state.py --threads 1 --kv-heads 8      # every query head has keys and values of its own

Models of two layers: a gated delta net and gated attention with the sizes of Qwen3.5-0.8B, and a state space of Mamba-2
as in Granite 4. Each layer's mixer (norm, projections, states or keys and values, output projection) takes one token of
every row at each context, and whole prompts of each length, in turn. Times are CPU seconds of this process on a CPU,
seconds on a GPU. The goals at 32 rows: at a context of 512 the state costs at most 1.3 times the attention; at 8192 it
costs what it costs at 512, within 10%.

Before anything is timed, the logits of eight steps and of a prefill are compared with each model's own forward.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from common import DTYPES, Quantiles, add_shape_options, append_rows, chosen_shape, environment, parse_run, run_options
from common import synchronize as wait_for
from rich.console import Console
from rich.table import Table
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.cache import ModelCache
from hybrid_engine.ops import DecodeBatch, PrefillBatch

CONTEXTS, PROMPTS = (512, 8192), (512, 2048)
BLOCK = 64
ATTENTION = "attention"
KINDS = ("gated delta net", "state space", ATTENTION)


@dataclasses.dataclass(frozen=True)
class StateShape:
    """Rows, and sizes of the layers; queries and keys of the delta rule have as many heads as its values."""

    rows: int
    hidden: int
    state_heads: int
    state_dim: int
    space_heads: int
    space_size: int
    heads: int
    kv_heads: int
    head_dim: int


FULL = StateShape(
    rows=32, hidden=1024, state_heads=16, state_dim=128, space_heads=32, space_size=128,
    heads=8, kv_heads=2, head_dim=256,
)  # fmt: skip
SMALL = StateShape(
    rows=2, hidden=32, state_heads=2, state_dim=16, space_heads=2, space_size=16, heads=2, kv_heads=1, head_dim=16
)


class Mixer(NamedTuple):
    """One layer of a model."""

    model: InferenceModel
    place: int
    """Its index."""


def build_models(shape: StateShape) -> list[PreTrainedModel]:
    """A gated delta net and an attention layer, and a state space, with small MLPs and vocabularies."""
    torch.manual_seed(0)
    common = {"hidden_size": shape.hidden, "intermediate_size": shape.hidden, "num_hidden_layers": 2,
              "vocab_size": 256, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}  # fmt: skip
    delta = Qwen3_5TextConfig(
        **common,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=shape.state_heads,
        linear_num_value_heads=shape.state_heads,
        linear_key_head_dim=shape.state_dim,
        linear_value_head_dim=shape.state_dim,
        head_dim=shape.head_dim,
    )
    space = GraniteMoeHybridConfig(
        **common,
        layer_types=["linear_attention", "full_attention"],
        mamba_n_heads=shape.space_heads,
        mamba_d_state=shape.space_size,
        num_local_experts=0,
        shared_intermediate_size=shape.hidden,
    )
    return [Qwen3_5ForCausalLM(delta).eval(), GraniteMoeHybridForCausalLM(space).eval()]


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


def prompt_of(tokens: torch.Tensor) -> PrefillBatch:
    """One whole prompt `[N]`, in the first blocks and the first slot."""
    places, device = torch.arange(len(tokens), device=tokens.device), tokens.device
    return PrefillBatch(
        tokens=tokens,
        positions=places,
        write_blocks=places // BLOCK,
        write_offsets=places % BLOCK,
        lengths=(len(tokens),),
        starts=torch.tensor([0, len(tokens)], dtype=torch.int32, device=device),
        wanted=torch.tensor([len(tokens) - 1], device=device),
        row_lengths=torch.full_like(places, len(tokens)),
        state_slots=torch.zeros(1, dtype=torch.int64, device=device),
    )


def check(module: PreTrainedModel, model: InferenceModel, rows: int) -> None:
    """Raises ValueError if the logits of steps or of a prefill are not the module's own."""
    ids = torch.randint(256, (rows, 8), device=model.device)
    cache = model.new_cache(rows, BLOCK, rows)
    steps = torch.stack([model.forward(step_at(t, ids[:, t]), cache, model.layers) for t in range(8)], 1)
    prefill = model.forward(prompt_of(ids[0]), cache, model.layers)
    expected = module(ids).logits.float()
    bound = (1e-4 if model.dtype == torch.float32 else 0.1) * float(expected.abs().max())
    for logits, own in ((steps, expected), (prefill, expected[0, -1:])):
        if (difference := float((logits - own).abs().max())) > bound:
            raise ValueError(f"logits differ from the module's own by {difference}, more than {bound}")


def build_mixers(shape: StateShape, dtype: torch.dtype, device: str, reach: int) -> dict[str, Mixer]:
    """A checked layer of each kind, for positions up to `reach`."""
    models = []
    for module in build_models(shape):
        models.append(InferenceModel(module.to(device, dtype)))
        models[-1].bind()
        models[-1].prepare_positions(reach)
        check(module, models[-1], shape.rows)
    return dict(zip(KINDS, [Mixer(models[0], 0), Mixer(models[1], 0), Mixer(models[0], 1)], strict=True))


def mixer_call(mixer: Mixer, cache: ModelCache, batch: DecodeBatch | PrefillBatch) -> Callable[[], object]:
    """A call of the layer's mixer on random hidden states."""
    model, place = mixer
    layer = model.layers[place]
    hidden = torch.randn(len(batch.tokens), model.embedding.weight.shape[1], device=model.device, dtype=model.dtype)
    rotary = model.angles.rows(batch, model.dtype).get(layer.kind)
    return lambda: layer.mixer.forward(hidden, rotary, cache.layers[place], batch, hidden)


def seconds_of(call: Callable[[], object], device: str) -> float:
    """CPU seconds of a call, or seconds on a GPU."""
    clock = time.perf_counter if torch.device(device).type == "cuda" else time.process_time
    wait_for(device)
    start = clock()
    call()
    wait_for(device)
    return clock() - start


Key = tuple[str, int, str]  # "decode" or "prefill", tokens, kind of layer


def build_calls(mixers: dict[str, Mixer], shape: StateShape, passes: dict[str, tuple[int, ...]]) -> dict[Key, Callable]:
    """Each kind's call for each pass."""
    calls: dict[Key, Callable[[], object]] = {}
    for name, sizes in passes.items():
        for size in sizes:
            for kind, mixer in mixers.items():
                rows, device = shape.rows if name == "decode" else size, mixer.model.device
                tokens = torch.zeros(rows, dtype=torch.int64, device=device)
                batch: DecodeBatch | PrefillBatch = (
                    prompt_of(tokens) if name == "prefill" else step_at(size - 1, tokens)
                )
                num_blocks = -(-size // BLOCK) * (1 if name == "prefill" else rows)
                calls[name, size, kind] = mixer_call(mixer, mixer.model.new_cache(num_blocks, BLOCK, shape.rows), batch)
    return calls


def measure(calls: dict[Key, Callable], repeats: int, device: str) -> dict[Key, Quantiles]:
    """Quantiles of each call's seconds; the calls take turns."""
    samples: dict[Key, list[float]] = {key: [] for key in calls}
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
    """Prints a table and adds a row for each pass and kind of layer."""
    args, shape = parse_arguments()
    passes: dict[str, tuple[int, ...]] = {"decode": CONTEXTS, "prefill": PROMPTS}
    if args.small:
        passes = {"decode": (65, 130), "prefill": (70,)}
    mixers = build_mixers(shape, DTYPES[args.dtype], args.device, max(sum(passes.values(), ())))
    quantiles = measure(build_calls(mixers, shape, passes), args.repeats, args.device)
    table = Table("pass", "tokens", "layer", "ms (p20)", "ms (p50)", "ms (p80)", "of attention's", "of the first's")
    rows = []
    for (name, size, kind), times in quantiles.items():
        of_attention = times.p50 / quantiles[name, size, ATTENTION].p50
        of_first = times.p50 / quantiles[name, passes[name][0], kind].p50
        spread = (f"{t * 1e3:.2f}" for t in (times.p20, times.p50, times.p80))
        table.add_row(name, str(size), kind, *spread, f"{of_attention:.2f}", f"{of_first:.2f}")
        sizes = dataclasses.asdict(shape) | {"dtype": args.dtype, "pass": name, "tokens": size, "layer": kind}
        rows.append(environment(args.device) | sizes | dataclasses.asdict(times) | {"of_attention": of_attention})
    Console().print(table)
    append_rows(args.csv, rows)


if __name__ == "__main__":
    main()
