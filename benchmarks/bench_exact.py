"""What exact mode costs: a rollout and a training step in it, beside the same without.

    python benchmarks/bench_exact.py
    python benchmarks/bench_exact.py --dtype bfloat16

Each run is one of both, in turn: a rollout of every prompt, then forward and backward of all its sequences in one
micro-batch with left-padded prompts. Before anything is timed the rollout's log-probabilities are compared with the
trainer's: in exact mode to the bit, and the largest difference without it is printed beside. On a CPU only.
"""

import argparse
import statistics
from typing import Any

import torch
from common import (
    DTYPES,
    Quantiles,
    Shape,
    append_rows,
    base_parser,
    environment,
    llama_config,
    parse,
    timed,
)
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

import hybrid_engine
from hybrid_engine.ops import token_logprobs

PARTS = ("rollout", "forward", "backward")


def build_engine(shape: Shape, dtype: torch.dtype, exact: bool) -> Any:
    """Equal weights for both."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(shape, shape.positions, bos_token_id=None, eos_token_id=None, pad_token_id=0))
    config: dict[str, Any] = {
        "train_batch_size": shape.prompts,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}},  # equal weights stay so
        "bf16": {"enabled": dtype == torch.bfloat16},
        "hybrid_engine": {
            "enabled": True, "exact": exact, "max_out_tokens": shape.positions, "print_latency": False
        },
    }  # fmt: skip
    engine, *_ = hybrid_engine.initialize(model=model.to(dtype), config=config)
    return engine


def build_prompts(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of mixed lengths, padded on the left, and their mask."""
    input_ids = torch.randint(1, shape.vocab, (shape.prompts, shape.prompt_tokens))
    padding = torch.arange(shape.prompts)[:, None] * 5 % shape.prompt_tokens
    mask = (torch.arange(shape.prompt_tokens) >= padding).long()
    return input_ids * mask, mask


def run_once(
    engine: Any, input_ids: torch.Tensor, mask: torch.Tensor, new_tokens: int
) -> tuple[dict[str, float], float]:
    """Seconds of each part, and the largest difference of rollout and trainer in log-probability."""
    engine.eval()
    seconds, output = {}, None
    options = {"do_sample": True, "max_new_tokens": new_tokens, "seed": 0, "return_dict_in_generate": True}
    seconds["rollout"], output = timed(lambda: engine.generate(input_ids, attention_mask=mask, **options), "cpu")
    full = torch.cat([mask, torch.ones_like(output.logprobs, dtype=mask.dtype)], 1)
    positions = (full.cumsum(1) - 1).clamp(min=0)
    engine.train()

    def forward() -> torch.Tensor:
        logits = engine(
            input_ids=output.sequences,
            attention_mask=full,
            position_ids=positions,
            logits_to_keep=new_tokens + 1,
            use_cache=False,
        ).logits
        return token_logprobs(logits[:, :-1], output.sequences[:, -new_tokens:])

    seconds["forward"], logprobs = timed(forward, "cpu")
    difference = engine.observe_logprobs(output.logprobs, logprobs, torch.ones_like(logprobs))
    seconds["backward"], _ = timed(lambda: engine.backward(-logprobs.mean()), "cpu")
    engine.step()
    return seconds, difference.max


def main() -> None:
    """Prints a table and adds rows to a CSV."""
    parser = base_parser(__doc__)
    args, shape = parse(parser, "exact")
    dtype = DTYPES[args.dtype]
    engines = {"exact": build_engine(shape, dtype, True), "usual": build_engine(shape, dtype, False)}
    prompts = build_prompts(shape)
    differences = {name: run_once(engine, *prompts, shape.new_tokens)[1] for name, engine in engines.items()}
    if differences["exact"] != 0.0:
        raise RuntimeError(f"in exact mode rollout and trainer are {differences['exact']:.3g} apart")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for repeat in range(args.repeats):
        names = list(engines) if repeat % 2 else list(engines)[::-1]
        for name in names:
            runs[name].append(run_once(engines[name], *prompts, shape.new_tokens)[0])
    print_results(args, differences, runs)
    append_rows(args.csv, rows(args, shape, runs))


def print_results(
    args: argparse.Namespace, differences: dict[str, float], runs: dict[str, list[dict[str, float]]]
) -> None:
    """One line for each part."""
    table = Table(title=f"{args.dtype}, {torch.get_num_threads()} threads, seconds (median)")
    for column in ("", "usual", "exact", "times"):
        table.add_column(column, justify="right")
    for part in PARTS:
        usual, exact = (statistics.median(run[part] for run in runs[name]) for name in ("usual", "exact"))
        table.add_row(part, f"{usual:.2f}", f"{exact:.2f}", f"{exact / usual:.2f}")
    console = Console()
    console.print(table)
    console.print(f"rollout and trainer apart by at most {differences['usual']:.2g} as usual, 0 in exact mode")


def rows(args: argparse.Namespace, shape: Shape, runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """For the CSV."""
    sizes = {name: getattr(shape, name) for name in ("hidden", "layers", "prompts", "prompt_tokens", "new_tokens")}
    found = []
    for name, measured in runs.items():
        for part in PARTS:
            seconds = Quantiles.of([run[part] for run in measured])
            times = {"p20": seconds.p20, "p50": seconds.p50, "p80": seconds.p80}
            found.append({"mode": name, "part": part, "dtype": args.dtype, **sizes, **times, **environment("cpu")})
    return found


if __name__ == "__main__":
    main()
