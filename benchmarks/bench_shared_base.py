"""Peak memory of PPO with four roles as adapters on one base, beside supervised training of one adapter.

    python benchmarks/bench_shared_base.py          # a Llama of 123M parameters, fp32, on the CPU
    python benchmarks/bench_shared_base.py --small

Each case runs in a fresh process and reports the most memory of that process (VmHWM of Linux) less what it had when
everything was imported, before the model was read. All have the same base, rank of LoRA and training passes: as many
sequences, of as many prompt and answer tokens. PPO makes whole steps: rollout, rewards of a reward model, reference,
values, updates of actor and critic: on one base, and with `--lora-rank` alone, where critic and reward are models of
their own and the critic is trained whole.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch

RANK = 8
CASES = ("sft", "ppo on one base", "ppo of three models")
"""The first is what the others are measured by."""


def sizes(is_small: bool) -> dict[str, int]:
    """Of the model, and of the passes."""
    if is_small:
        return {"hidden": 64, "layers": 2, "mlp": 128, "vocab": 256, "rows": 2, "prompt": 16, "answer": 8}
    return {"hidden": 768, "layers": 16, "mlp": 2048, "vocab": 8192, "rows": 4, "prompt": 64, "answer": 32}


def save_models(folder: Path, size: dict[str, int]) -> None:
    """A base with a tokenizer and a reward model with an adapter on it, in `folder`."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from hybrid_engine.rlhf.options.shared import AdapterOptions
    from hybrid_engine.rlhf.runs.run_checks import add_adapter
    from hybrid_engine.rlhf.tasks.arithmetic import build_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab"], hidden_size=size["hidden"], intermediate_size=size["mlp"],
        num_hidden_layers=size["layers"], num_attention_heads=size["hidden"] // 16,
        num_key_value_heads=size["hidden"] // 16, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    base = str(folder / "base")
    LlamaForCausalLM(config).save_pretrained(base)
    build_tokenizer().save_pretrained(base)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model = add_adapter(classifier, AdapterOptions(lora_rank=RANK), "SEQ_CLS")
    model.save_pretrained(folder / "reward" / "adapter")
    model.merge_and_unload().save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "reward")
    digits = [f"{number:0{size['prompt'] - 2}d}=" for number in range(24)]
    rows = [json.dumps({"prompt": text, "completion": "1" * (size["answer"] - 1)}) for text in digits]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")


def run_case(case: str, folder: Path, size: dict[str, int]) -> None:
    """Runs two steps of `case` and prints the bytes that they took at most."""
    from hybrid_engine.recipes import ppo, sft

    torch.set_num_threads(1)
    at_start = most_bytes()
    shared: dict[str, Any] = {
        "model": str(folder / "base"), "dataset": str(folder / "data.jsonl"), "lora_rank": RANK, "save_every": 0,
        "out": str(folder / case.replace(" ", "-")), "micro_batch_size": size["rows"],
    }  # fmt: skip
    if case == "sft":
        train_only(sft, sft.Config(**shared, batch_size=size["rows"], epochs=1))
    else:
        config = ppo.Config(
            **shared, reward=(str(folder / "reward"),), shared_base=case == "ppo on one base", steps=2,
            rollout_size=size["rows"], minibatch_size=size["rows"], ppo_epochs=1, eval_prompts=size["rows"],
            eval_every=0, max_prompt_tokens=size["prompt"], max_new_tokens=size["answer"],
        )  # fmt: skip
        train_only(ppo, config)
    print(json.dumps({"bytes": most_bytes() - at_start}))


def train_only(recipe: Any, config: Any) -> None:
    """The run without the folder of the merged model at its end, which is written from a copy of the base."""
    recipe.save_stage = lambda *_: None
    recipe.run(config)


def most_bytes() -> int:
    """The most bytes of memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = common.run_options(__doc__)
    parser.add_argument("--case", help="one case, in this process")
    parser.add_argument("--folder", help="where its models are")
    options = common.parse_run(parser, "shared_base")
    size = sizes(options.small)
    if options.case:
        run_case(options.case, Path(options.folder), size)
        return
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__, "--folder", name, *(["--small"] if options.small else [])]
        save_models(Path(name), size)
        found = {}
        for case in CASES:
            result = subprocess.run([*command, "--case", case], capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(result.stderr[-3000:])
            found[case] = json.loads(result.stdout.splitlines()[-1])["bytes"]
            print(f"{case:20} {found[case] / 2**20:8.0f} MiB  {found[case] / found['sft']:.2f}", flush=True)
            ratio = round(found[case] / found["sft"], 3)
            row = {"case": case, **size, "peak_mib": round(found[case] / 2**20), "ratio": ratio}
            common.append_rows(options.csv, [row | common.environment("cpu")])


if __name__ == "__main__":
    main()
