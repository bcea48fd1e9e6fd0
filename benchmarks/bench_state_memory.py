"""Memory over many rollouts of models that keep states or latent vectors, and what a token or a sequence takes.

    python benchmarks/bench_state_memory.py --threads 1      # 500 rollouts of each tiny model
    python benchmarks/bench_state_memory.py --threads 1 --only Qwen3.5 --rollouts 2000

Each rollout has prompts of other lengths, in groups, and answers that end early; every third is followed by a training
step, and the memory of blocks and slots is given back before every tenth. The resident set is read after the first
hundred, when libraries have what they keep for good, and at the end.

`bytes a token` and `bytes a sequence` are what the engine counts in bf16 for the sizes that `transformers` has as
defaults, which are those of a published model: DeepSeek-V3 keeps 576 numbers a token in each layer.
"""

import argparse

import torch
import transformers as hf
from common import append_rows, environment, parse_run, resident_bytes, run_options, trim_memory
from families import VOCAB, build, build_families
from rich.console import Console
from rich.table import Table

import hybrid_engine
from hybrid_engine.containers import InferenceModel
from hybrid_engine.engine.hybrid_engine import HybridEngine

FAMILIES = ("Qwen3.5", "Granite 4", "LFM2", "DeepSeek-V3", "Gemma 4")
HIDDEN, LAYERS, POSITIONS = 64, 2, 64
WARM = 100  # rollouts before the first reading
PUBLISHED = {
    "DeepSeek-V3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(num_hidden_layers=1, first_k_dense_replace=1)),
    "Qwen3.5": lambda: hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(num_hidden_layers=4)),
}
"""One layer of the first, of which all are alike; of the second three gated delta nets and an attention layer."""


def build_engine(family: str) -> HybridEngine:
    """A tiny model that trains."""
    model = build(build_families(HIDDEN, LAYERS, POSITIONS)[family], torch.float32, "cpu")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "hybrid_engine": {"enabled": True, "max_out_tokens": POSITIONS},
    }
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    if engine.generator.fallback_reason is not None:
        raise RuntimeError(f"{family} does not run on containers: {engine.generator.fallback_reason}")
    return engine


def roll_out(engine: HybridEngine, number: int) -> None:
    """One rollout of four groups of two."""
    generator = torch.Generator().manual_seed(number)
    length = 5 + number % 23
    prompts = torch.randint(3, VOCAB, (4, length), generator=generator)
    mask = (torch.arange(length) >= torch.arange(4)[:, None]).long()  # rows of several lengths
    ends = list(range(number % 7, VOCAB, 40))  # an answer ends after some 40 tokens
    if number % 10 == 0:
        engine.release_inference_cache()
    engine.eval()
    output = engine.generate(
        prompts, mask, max_new_tokens=16, do_sample=True, num_return_sequences=2, eos_token_id=ends, pad_token_id=0,
        seed=number,
    )  # fmt: skip
    if number % 3 == 0:
        engine.train()
        engine.backward(engine(input_ids=output[:4], labels=output[:4]).loss)
        engine.step()


def measure(family: str, num_rollouts: int) -> dict[str, int]:
    """Bytes of the resident set after `WARM` rollouts and after all, and of a slot."""
    engine = build_engine(family)
    resident = []
    for number in range(1, num_rollouts + 1):
        roll_out(engine, number)
        if number in (min(WARM, num_rollouts // 2), num_rollouts):
            trim_memory()
            resident.append(resident_bytes())
    assert engine.generator.model is not None
    return {
        "rollouts": num_rollouts, "warm_bytes": resident[0], "last_bytes": resident[-1],
        "growth_bytes": resident[-1] - resident[0], "slot_bytes": engine.generator.model.bytes_per_slot(),
    }  # fmt: skip


def published_bytes(family: str) -> tuple[int, int, int]:
    """Layers, and bytes of a token and of a sequence in them, in bf16."""
    with torch.device("meta"):
        model = InferenceModel(PUBLISHED[family]().to(torch.bfloat16))
    return len(model.layers), model.bytes_per_block(1), model.bytes_per_slot()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = run_options(__doc__)
    parser.add_argument("--rollouts", type=int, default=0, help="of each model (default 500, with --small 4)")
    parser.add_argument("--only", default="", help="families whose name contains this")
    args = parse_run(parser, "state_memory")
    args.rollouts = args.rollouts or (4 if args.small else 500)
    return args


def main() -> None:
    """Measures, prints, writes."""
    args = parse_arguments()
    table = Table("family", "rollouts", "MiB after the first", "MiB at the end", "growth, KiB", "bytes of a slot")
    for family in FAMILIES:
        if args.only.lower() in family.lower():
            row = measure(family, args.rollouts)
            print(family, row, flush=True)
            resident = [f"{row[name] / 2**20:.1f}" for name in ("warm_bytes", "last_bytes")]
            table.add_row(
                family, str(args.rollouts), *resident, f"{row['growth_bytes'] / 2**10:.0f}", str(row["slot_bytes"])
            )
            append_rows(args.csv, [{"family": family} | row | environment("cpu")])
    Console().print(table)
    for family in PUBLISHED:
        layers, token_bytes, slot_bytes = published_bytes(family)
        print(f"{family}, {layers} layers in bf16: {token_bytes} bytes a token, {slot_bytes} bytes a sequence")


if __name__ == "__main__":
    main()
