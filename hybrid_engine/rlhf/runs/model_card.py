"""The README.md of a saved model: how to load it, how and with what it was trained, and its measurements.

The hub shows it as the model's card, and sorts models by the block between the first two lines of dashes
(huggingface_hub's docs, "model cards"). All of it is read from the files of the run, so a card describes what is on
disk.
"""

import json
import platform
import re
from collections.abc import Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import yaml

from hybrid_engine.rlhf.runs.run_folder import CONFIG, METRICS, read_config, read_metrics, read_recipe

CARD = "README.md"
ADAPTER = "adapter"
"""The folder below the model's with the adapter alone, if there is one."""
METHODS = {
    "sft": "supervised fine-tuning",
    "reward": "training of a reward model on preference pairs",
    "ppo": "PPO ([arXiv 1707.06347](https://arxiv.org/abs/1707.06347))",
    "grpo": "GRPO or one of its family ([arXiv 2402.03300](https://arxiv.org/abs/2402.03300))",
    "dpo": "DPO or one of its family ([arXiv 2305.18290](https://arxiv.org/abs/2305.18290))",
    "kto": "KTO ([arXiv 2402.01306](https://arxiv.org/abs/2402.01306))",
    "online_dpo": "online DPO ([arXiv 2402.04792](https://arxiv.org/abs/2402.04792))",
    "agent": "reinforcement learning on conversations of several turns, in which the model calls tools",
}
"""The method of each recipe, with its paper."""
SETTINGS = {
    "learning_rate": "learning rate", "epochs": "epochs", "batch_size": "batch size", "rollout_size": "prompts a step",
    "group_size": "answers to a prompt", "lora_rank": "LoRA rank", "dtype": "dtype", "kl_coef": "KL coefficient",
    "reward": "reward", "held_out_share": "share held out", "held_out_dataset": "held-out data", "seed": "seed",
}  # fmt: skip
"""The most important options, by their names on a card."""
FINAL = ("score", "accuracy", "margin", "kl_per_sequence", "length", "judge_pass_rate", "grad_norm", "learning_rate")
"""Figures of the last step that a card shows in addition to its losses."""
LIBRARIES = ("hybrid-engine", "torch", "transformers", "tokenizers", "peft", "datasets")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def write_model_card(model_folder: Path, run_folder: Path) -> None:
    """Writes README.md into `model_folder` from the files of the run in `run_folder`; for one process."""
    options = read_config(run_folder)
    recipe = read_recipe(run_folder)
    architectures = json.loads((model_folder / "config.json").read_text()).get("architectures") or []
    is_classifier = any("Classification" in name for name in architectures)
    sections = [
        f"# A model trained by `hybrid-engine{' ' + recipe if recipe else ''}`",
        _loading(is_classifier, (model_folder / ADAPTER).is_dir()),
        _training(options, recipe, run_folder),
        _figures(run_folder / "result.json"),
        _options(run_folder / CONFIG),
        _versions(),
    ]
    text = _front_matter(options, recipe, is_classifier) + "\n\n".join(filter(None, sections)) + "\n"
    (model_folder / CARD).write_text(text, encoding="utf-8")


def _front_matter(options: Mapping[str, Any], recipe: str | None, is_classifier: bool) -> str:
    content: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-classification" if is_classifier else "text-generation",
        "tags": ["hybrid-engine", *([recipe] if recipe else [])],
    }
    # The hub refuses a card whose base model or data set is not a name of its own.
    if is_hub_name(model := options.get("model")):
        content["base_model"] = model
    if names := [name for name in _as_list(options.get("dataset")) if is_hub_name(name)]:
        content["datasets"] = names
    return f"---\n{yaml.safe_dump(content, sort_keys=False)}---\n\n"


def is_hub_name(source: Any) -> bool:
    """Whether an option names something on the hub, and nothing on this machine."""
    return isinstance(source, str) and bool(_HUB_NAME.fullmatch(source)) and not Path(source).exists()


def _loading(is_classifier: bool, has_adapter: bool) -> str:
    auto_class = "AutoModelForSequenceClassification" if is_classifier else "AutoModelForCausalLM"
    lines = [
        f"from transformers import {auto_class}, AutoTokenizer",
        f'model = {auto_class}.from_pretrained("this folder")',
        'tokenizer = AutoTokenizer.from_pretrained("this folder")',
    ]
    text = "## Loading it\n\n" + _fenced("python", "\n".join(lines))
    if not has_adapter:
        return text
    with_peft = f'from peft import PeftModel\nmodel = PeftModel.from_pretrained(base, "this folder/{ADAPTER}")'
    return f"{text}\n\nThe adapter is merged into these weights. By itself, for the base model:\n\n" + _fenced(
        "python", with_peft
    )


def _training(options: Mapping[str, Any], recipe: str | None, run_folder: Path) -> str:
    """A card's section on training: a sentence, the most important options, and the figures of the last step."""
    if recipe not in METHODS:
        return ""
    text = f"## How it was trained\n\nBy {METHODS[recipe]}, from {_base(options, recipe)}, on {_data(options)}."
    settings = {shown: options.get(name) for name, shown in SETTINGS.items()}
    text += "\n\n" + _table("option", "value", {name: value for name, value in settings.items() if value})
    steps = read_metrics(run_folder / METRICS)
    if not steps:
        return text
    last = {name: value for name, value in steps[-1].items() if "loss" in name or name in FINAL}
    return f"{text}\n\n" + _table(f"step {steps[-1]['step'] + 1}, the last", "value", last)


def _base(options: Mapping[str, Any], recipe: str) -> str:
    model = options.get("model")
    if model is None:
        return "new weights, drawn at random" if recipe == "sft" else "a small model that the run trained before"
    return f"[{model}](https://huggingface.co/{model})" if is_hub_name(model) else f"`{model}`"


def _data(options: Mapping[str, Any]) -> str:
    data_sets = _as_list(options.get("dataset"))
    if not data_sets:
        return f"a task of hybrid-engine's own{_in_code(options.get('task'))}"
    return ", ".join(f"`{name}`" for name in data_sets)


def _in_code(name: str | None) -> str:
    return "" if name is None else f", `{name}`"


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _table(first: str, second: str, values: Mapping[str, Any]) -> str:
    def shown(value: Any) -> str:
        text = (
            f"{value:.4g}"
            if isinstance(value, float)
            else ", ".join(map(str, value if isinstance(value, list) else [value]))
        )
        return text.replace("|", "\\|").replace("\n", " ")

    rows = [f"| {first} | {second} |", "|---|---|", *(f"| {name} | {shown(value)} |" for name, value in values.items())]
    return "\n".join(rows)


def _figures(path: Path) -> str:
    if not path.exists():
        return ""
    return "## What was measured\n\n" + _fenced("yaml", yaml.safe_dump(json.loads(path.read_text()), sort_keys=False))


def _options(path: Path) -> str:
    if not path.exists():
        return ""
    return "## Options\n\nAs a file for `--config`:\n\n" + _fenced("yaml", path.read_text(encoding="utf-8"))


def _versions() -> str:
    installed = {name: version(name) for name in LIBRARIES if any(distributions(name=name))}
    numbers = installed | {"python": platform.python_version()}
    return "## Versions\n\n" + ", ".join(f"{name} {number}" for name, number in numbers.items())


def _fenced(language: str, text: str) -> str:
    """`text` as a code block, with a fence longer than its backticks."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
