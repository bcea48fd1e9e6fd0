"""Every family: our `engine.generate()` against transformers' `model.generate()` at batch 1 and 32.

    python benchmarks/bench_families.py --threads 2

Greedy, the same prompts, a fixed number of new tokens, the two taking turns in every round. Before anything is
timed the tokens must be equal; a family that does not run on containers ends the benchmark. The ratio is
transformers' median time over ours: above 1 we are faster.
"""

import statistics
from functools import partial

import torch
from common import DTYPES, append_rows, base_parser, environment, parse, timed
from families import VOCAB, build, build_families
from rich.console import Console
from rich.table import Table

import hybrid_engine

BATCHES = (1, 32)


def measure(name: str, make, args, prompt_tokens: int, new_tokens: int) -> list[dict]:
    """A row per batch size."""
    model = build(make, DTYPES[args.dtype], args.device)
    theirs = model.generate
    precision = {"bf16": {"enabled": args.dtype == "bfloat16"}, "fp16": {"enabled": args.dtype == "float16"}}
    hybrid = {"enabled": True, "max_out_tokens": prompt_tokens + new_tokens}
    engine, *_ = hybrid_engine.initialize(
        model=model, config={"train_batch_size": 1, "hybrid_engine": hybrid, **precision}
    )
    engine.eval()
    if engine.generator.fallback_reason is not None:
        raise RuntimeError(f"{name} does not run on containers: {engine.generator.fallback_reason}")
    rows = []
    for batch in BATCHES:
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(3, VOCAB, (batch, prompt_tokens), generator=generator).to(args.device)
        options = {
            "attention_mask": torch.ones_like(prompts), "max_new_tokens": new_tokens, "min_new_tokens": new_tokens,
            "do_sample": False, "pad_token_id": 0,
        }  # fmt: skip
        engines = {"ours": engine.generate, "transformers": theirs}
        outputs = {key: generate(prompts, **options) for key, generate in engines.items()}  # also warms up
        same = (outputs["ours"] == outputs["transformers"]).float().mean().item()
        if args.dtype == "float32" and same < 1:
            raise RuntimeError(f"{name}, batch {batch}: only {same:.1%} of the tokens are transformers' own")
        seconds: dict[str, list[float]] = {key: [] for key in engines}
        for repeat in range(args.repeats):
            for key in sorted(engines, reverse=repeat % 2 == 1):
                seconds[key].append(timed(partial(engines[key], prompts, **options), args.device)[0])
        ours, other = (statistics.median(seconds[key]) for key in ("ours", "transformers"))
        rows.append(
            {"family": name, "batch": batch, "ours_ms_per_token": round(ours / new_tokens * 1e3, 3),
             "transformers_ms_per_token": round(other / new_tokens * 1e3, 3), "ratio": round(other / ours, 3)}
        )  # fmt: skip
    return rows


def main() -> None:
    """Measures, prints, writes."""
    parser = base_parser(__doc__)
    parser.add_argument("--only", default="", help="families whose name contains this")
    args, shape = parse(parser, "families")
    hidden, layers = (64, 2) if args.small else (256, 4)
    console = Console()
    table = Table("family", "batch", "ours ms/token", "transformers ms/token", "ratio")
    rows = []
    families = build_families(hidden, layers, shape.prompt_tokens + shape.new_tokens)
    for name, make in families.items():
        if args.only.lower() in name.lower():
            for row in measure(name, make, args, shape.prompt_tokens, shape.new_tokens):
                print(row, flush=True)
                table.add_row(*map(str, row.values()))
                rows.append(row | {"hidden": hidden, "layers": layers, "prompt_tokens": shape.prompt_tokens,
                                   "new_tokens": shape.new_tokens, "dtype": args.dtype})  # fmt: skip
    console.print(table)
    append_rows(args.csv, [row | environment(args.device) for row in rows])


if __name__ == "__main__":
    main()
