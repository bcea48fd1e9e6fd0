"""Reference trajectories: the losses and gradient norms of 30 steps of each recipe on a tiny model.

    python -m tests.tools.trajectories            writes tests/data/trajectories.json anew, after a change that is meant
    python -m tests.tools.trajectories dpo kto    only these recipes of it

A recipe joins by an entry in `RUNS`: what runs it, given the folder of the tiny model and a folder to write to.
"""

import json
import platform
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hybrid_engine.recipes import dpo, grpo, kto, online_dpo, ppo, reward, sft
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.runs.run_folder import METRICS, read_metrics
from hybrid_engine.rlhf.tasks.corpus import train_tokenizer

REWARD = "tests.tools.trajectories:shortness"
FILE = Path(__file__).parents[1] / "data" / "trajectories.json"
NUM_STEPS = 30
FIGURES = ("loss", "grad_norm")
FIGURES_OF = {
    "grpo": ("score", "kl_per_sequence", "grad_norm"),
    "ppo": ("score", "kl_per_sequence", "value_loss", "actor_grad_norm", "critic_grad_norm"),
}
"""For recipes whose loss is about 0 by itself, or that have two."""
Trajectory = dict[str, list[float]]


def write_start(folder: Path) -> None:
    """A model of 20 thousand random weights, its tokenizer, and pairs of short answers to additions."""
    rng = random.Random(0)
    numbers = [(rng.randrange(100), rng.randrange(100)) for _ in range(160)]
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"the sum of {a} and {b} is {a + b + 1}"}
        for a, b in numbers
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    tokenizer = train_tokenizer([row["prompt"] + row["rejected"] for row in rows], 300)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(folder / "model").eos_token_id == tokenizer.eos_token_id


PREFERENCE = {
    "batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3, "save_every": 0, "eval_every": 0, "eval_rows": 4,
    "eval_prompts": 2, "max_new_tokens": 2,
}  # fmt: skip


def run_dpo(start: Path, out: Path) -> None:
    """Two passes over 120 pairs, with the SFT term."""
    sources = {"model": str(start / "model"), "dataset": str(start / "pairs.jsonl"), "out": str(out)}
    dpo.run(dpo.Config(**sources, **PREFERENCE, epochs=2, max_pairs=120, sft_weight=0.1))


def run_kto(start: Path, out: Path) -> None:
    """One pass over 240 answers, with unlike weights."""
    sources = {"model": str(start / "model"), "dataset": str(start / "pairs.jsonl"), "out": str(out)}
    kto.run(kto.Config(**sources, **PREFERENCE, max_answers=240, undesirable_weight=1.5))


LEARNING = {"batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-3, "save_every": 0, "epochs": 2}


def run_sft(start: Path, out: Path) -> None:
    """Two passes over 120 answers."""
    sources = {"model": str(start / "model"), "dataset": str(start / "answers.jsonl"), "out": str(out)}
    sft.run(sft.Config(**sources, **LEARNING, max_examples=120))


def run_reward(start: Path, out: Path) -> None:
    """Two passes over 120 pairs, with centred scores."""
    sources = {"model": str(start / "model"), "dataset": str(start / "pairs.jsonl"), "out": str(out)}
    reward.run(reward.Config(**sources, **LEARNING, max_pairs=120, center_coef=0.01))


def run_grpo(start: Path, out: Path) -> None:
    """Thirty steps of two updates each, with a KL in the loss and clipped ratios."""
    sources = {"model": str(start / "model"), "dataset": str(start / "answers.jsonl"), "out": str(out)}
    sizes = {"steps": 30, "rollout_size": 4, "group_size": 4, "minibatch_size": 8, "micro_batch_size": 4}
    rates = {"learning_rate": 3e-3, "save_every": 0, "eval_every": 0, "eval_prompts": 2, "max_new_tokens": 4}
    algorithm = Algorithm.from_options({"preset": "deepseekmath"})
    grpo.run(grpo.Config(**sources, **sizes, **rates, reward=("regex:[a-m]",), algorithm=algorithm))


def shortness(prompts: list[str], responses: list[str]) -> list[float]:
    """The reward of the recipes that sample: answers of few characters, which seldom are alike in a group."""
    return [-float(len(response)) for response in responses]


def run_ppo(start: Path, out: Path) -> None:
    """Thirty rollouts of eight prompts, two passes over each in two updates of actor and critic.

    The actor has learned to end its answers: PPO gives those that are cut off a score of their own.
    """
    data = {"dataset": str(start / "answers.jsonl"), "out": str(out)}
    sft.run(sft.Config(model=str(start / "model"), **data, **(LEARNING | {"learning_rate": 1e-2}), max_examples=120))
    sources = {"model": str(out / "sft"), **data}
    sizes = {"rollout_size": 8, "minibatch_size": 4, "micro_batch_size": 2, "max_new_tokens": 8}
    rare = {"save_every": 0, "eval_every": 0, "eval_prompts": 2}
    rates = {"actor_lr": 1e-4, "critic_lr": 3e-4, "kl_coef": 0.1}
    ppo.run(ppo.Config(**sources, **sizes, **rare, **rates, steps=NUM_STEPS, reward=(REWARD,)))


def run_online_dpo(start: Path, out: Path) -> None:
    """Thirty rollouts of eight prompts."""
    sources = {"model": str(start / "model"), "dataset": str(start / "pairs.jsonl"), "out": str(out)}
    sizes = {"rollout_size": 8, "group_size": 2, "minibatch_size": 8, "micro_batch_size": 4, "max_new_tokens": 4}
    rare = {"save_every": 0, "eval_every": 0, "eval_prompts": 2}
    config = online_dpo.Config(**sources, **sizes, **rare, steps=NUM_STEPS, learning_rate=1e-3, reward=(REWARD,))
    online_dpo.run(config)


RUNS: dict[str, Callable[[Path, Path], None]] = {
    "dpo": run_dpo,
    "kto": run_kto,
    "sft": run_sft,
    "reward": run_reward,
    "grpo": run_grpo,
    "online-dpo": run_online_dpo,
    "ppo": run_ppo,
}


def measure(recipe: str, folder: Path) -> Trajectory:
    """The figures of each step of `recipe`, which writes to a new folder in `folder`."""
    start = folder / "start"
    if not start.exists():
        start.mkdir()
        write_start(start)
    RUNS[recipe](start, folder / recipe)
    log = folder / recipe / f"{recipe}-log"
    lines = read_metrics((log if log.exists() else folder / recipe) / METRICS)
    assert len(lines) == NUM_STEPS, f"{recipe}: {len(lines)} steps"
    return {name: [line[name] for line in lines] for name in FIGURES_OF.get(recipe, FIGURES)}


def read_references() -> dict[str, dict[str, Trajectory]]:
    """For each recipe its `steps` and the `versions` that it was measured with."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main(recipes: list[str]) -> None:
    """Measures `recipes`, or all, and writes them to the file."""
    torch.set_num_threads(1)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    references = read_references()
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes or RUNS:
            references[recipe] = {"versions": versions, "steps": measure(recipe, Path(folder))}
    FILE.write_text(json.dumps(references, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
