"""The README.md of a saved model: how to load it, how it was made, with what, and what was measured.

The hub shows it as the model's card; the block between the first two lines of dashes is what it sorts models by
(huggingface_hub's docs, "model cards"). All of it is read from what the run left, so a card says what is on disk.
"""

import json
import platform
import re
from collections.abc import Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import yaml

from hybrid_engine.recipes.runs.config_files import CONFIG, read_config, read_recipe

CARD = "README.md"
ADAPTER = "adapter"
"""The folder below the model's with the adapter alone, where there was one."""
LIBRARIES = ("hybrid-engine", "torch", "transformers", "tokenizers", "peft", "datasets")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def write_model_card(model_folder: Path, run_folder: Path) -> None:
    """Writes README.md into `model_folder` from what the run left in `run_folder`; for one process."""
    options = read_config(run_folder)
    recipe = read_recipe(run_folder)
    architectures = json.loads((model_folder / "config.json").read_text()).get("architectures") or []
    is_classifier = any("Classification" in name for name in architectures)
    sections = [
        f"# A model trained by `hybrid-engine{' ' + recipe if recipe else ''}`",
        _loading(is_classifier, (model_folder / ADAPTER).is_dir()),
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
    # The hub refuses a card whose base model or data set is no name of its own.
    if is_hub_name(model := options.get("model")):
        content["base_model"] = model
    if is_hub_name(dataset := options.get("dataset")):
        content["datasets"] = [dataset]
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
    """`text` as a block of code, whatever backticks are in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
