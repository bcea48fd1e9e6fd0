"""Code that training recipes share: seeds, models and tokenizers, and folders that are either complete or absent.

A saved model has a README.md, the model's card: how to load it, how and with what it was trained, and its measurements.
The hub shows it, and sorts models by the block between the first two lines of dashes (huggingface_hub's docs, "model
cards"). All of it is read from the files of the run, so a card describes what is on disk.
"""

import hashlib
import json
import math
import platform
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions, version
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.checkpoint.export import save_adapter
from hybrid_engine.config.checks import flag
from hybrid_engine.containers.quantised import is_quantised
from hybrid_engine.distributed.processes import on_rank_zero
from hybrid_engine.engine.faster_linears import use_faster_linears
from hybrid_engine.generation.detokenize import end_token_ids
from hybrid_engine.rlhf.runs.run_folder import (
    CONFIG,
    METRICS,
    check_out,
    has_checkpoint,
    read_config,
    read_metrics,
    read_recipe,
    set_aside,
)
from hybrid_engine.rlhf.runs.run_log import say

BEST = "best"
CARD = "README.md"
ADAPTER = "adapter"
"""The folder below the model's with the adapter alone, if there is one."""
METHODS = {
    "sft": "supervised fine-tuning",
    "reward": "reward modeling on preference pairs",
    "ppo": "PPO ([arXiv 1707.06347](https://arxiv.org/abs/1707.06347))",
    "grpo": "a GRPO variant ([arXiv 2402.03300](https://arxiv.org/abs/2402.03300))",
    "dpo": "a DPO variant ([arXiv 2305.18290](https://arxiv.org/abs/2305.18290))",
    "kto": "KTO ([arXiv 2402.01306](https://arxiv.org/abs/2402.01306))",
    "online_dpo": "online DPO ([arXiv 2402.04792](https://arxiv.org/abs/2402.04792))",
    "distill": "on-policy distillation ([arXiv 2306.13649](https://arxiv.org/abs/2306.13649))",
    "agent": "reinforcement learning on multi-turn conversations with tool calls",
}
"""The method of each recipe, with its paper."""
SETTINGS = {
    "learning_rate": "learning rate", "epochs": "epochs", "batch_size": "batch size",
    "rollout_size": "prompts per step", "group_size": "answers per prompt", "lora_rank": "LoRA rank", "dtype": "dtype",
    "kl_coef": "KL coefficient", "reward": "reward", "held_out_share": "held-out fraction",
    "held_out_dataset": "held-out data", "seed": "seed",
}  # fmt: skip
"""The most important options, by their names on a card."""
FINAL = ("score", "accuracy", "margin", "kl_per_sequence", "length", "judge_pass_rate", "grad_norm", "learning_rate")
"""Figures of the last step that a card shows in addition to its losses."""
LIBRARIES = ("hybrid-engine", "torch", "transformers", "tokenizers", "peft", "datasets")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def seed_everything(seed: int) -> None:
    """Seeds Python's and torch's generators, the same on every process."""
    random.seed(seed)
    torch.manual_seed(seed)


def is_finished(folder: Path, runs_again: bool) -> bool:
    """Whether a stage left `folder` complete and may be skipped; never with `runs_again`. Collective.

    Raises:
        ValueError: nothing can be written to the folder of the run.
    """
    on_rank_zero(lambda: check_out(str(folder.parent)))
    found = not runs_again and on_rank_zero(folder.exists)
    if found:
        can_grow = on_rank_zero(lambda: has_checkpoint(folder.parent, folder.name))
        longer = ", and --resume with more --epochs continues it" if can_grow else ""
        say(f"{folder} exists, so this stage is skipped (`hybrid-engine {folder.name} --restart` repeats it{longer})")
    return found


def move_aside(folder: Path, names: Sequence[str]) -> None:
    """Moves the results of an earlier run under `names` to a folder of their own, and logs where; collective."""
    target = on_rank_zero(lambda: set_aside(folder, names))
    if target is not None:
        say(f"The results of an earlier run were moved to {target}")


def save_stage(engine: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes model and tokenizer as a Hugging Face folder that gets its name only when complete; collective.

    An adapter is merged into the weights, and also saved by itself in `adapter/` below them, for peft. The README.md
    describes the run's files so far, so call this after its options and figures are written.
    """
    _name_ends(engine.module, tokenizer)
    unfinished, replaced = (folder.with_name(f".{folder.name}-{state}") for state in ("unfinished", "replaced"))
    on_rank_zero(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    engine.save_16bit_model(unfinished)
    save_adapter(engine.module, unfinished / ADAPTER)

    def publish() -> None:
        tokenizer.save_pretrained(unfinished)
        write_model_card(unfinished, _run_folder(folder))
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)
        unfinished.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)

    on_rank_zero(publish)


def _name_ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Stores the end tokens of the run's answers in the model's generation_config, for programs that load it later."""
    if getattr(model, "generation_config", None) is not None:  # a classifier does not have one
        model.generation_config.eos_token_id = end_token_ids(model, tokenizer)


def _run_folder(folder: Path) -> Path:
    """The folder with options and figures of the run that saves a model to `folder`."""
    log = folder.with_name(f"{folder.name.partition('-')[0]}-log")
    return log if log.is_dir() else folder.parent


def load_config(source: str | Path, option: str = "model", **options: Any) -> PretrainedConfig:
    """The config of a Hugging Face folder or name; ValueError, naming `option`, if it does not load."""
    with explained(option, source):
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **options)


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """`config` itself, with every dropout probability set to 0."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def num_positions(config: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that the model can read; None without a limit, as with dynamic RoPE scaling."""
    text_config = config.get_text_config()
    if "dynamic" in str(getattr(text_config, "rope_parameters", None)):
        return None
    return getattr(text_config, "max_position_embeddings", None)


@contextmanager
def explained(option: str, source: str | Path) -> Iterator[None]:
    """Converts transformers' errors for a folder or name that does not load into a ValueError that names `option`."""
    try:
        yield
    except UnpicklingError as error:
        raise ValueError(
            f"{flag(option)}={str(source)!r} has weights in a pickle that contains more than tensors, which could run "
            "code and is not loaded; save them as safetensors"
        ) from error
    # The type depends on the model's family and on what is missing or damaged.
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()).partition(" Model type should be one of ")[0]  # a list of hundreds
        raise ValueError(
            f"{flag(option)}={str(source)!r} must be a Hugging Face folder or name that loads: {reason}"
        ) from error


def load_model(
    auto_class: Any, source: str | Path, option: str = "model", *, has_new_head: bool = False, **options: Any
) -> nn.Module:
    """`auto_class.from_pretrained(source)` in fp32 with every dropout probability of its config set to 0.

    Dropout would make the log-probabilities of two passes over the same weights differ.

    Args:
        auto_class: of transformers.
        source: Hugging Face name or folder.
        option: that named it.
        has_new_head: whether weights outside the model's body may be missing, and are then random.
        options: for the model's config.

    Raises:
        ValueError: naming `option`: nothing loads, or weights are missing or not finite.
    """
    config = without_dropout(load_config(source, option, **options))
    with explained(option, source):
        loading = {"config": config, "dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
        model, info = auto_class.from_pretrained(source, **loading)
    body = f"{model.base_model_prefix}."
    missing = [name for name in sorted(info["missing_keys"]) if not has_new_head or name.startswith(body)]
    plain = ((name, p) for name, p in model.named_parameters() if not is_quantised(p))
    wrong = [name for name, parameter in plain if not torch.isfinite(parameter).all()]
    for names, problem in ((missing, "lacks weights of"), (wrong, "has weights that are not finite in")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{flag(option)}={str(source)!r} {problem} {names[0]}{more}; save the model again")
    use_faster_linears(model)
    return model


def score_head(classifier: nn.Module, option: str, source: str | Path) -> nn.Linear:
    """The head `score` of a sequence classifier that was loaded from `source`; ValueError, naming `option`, if none."""
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{flag(option)}={str(source)!r} loads as {type(classifier).__name__}, which has no linear head named "
            "score; use a causal model family (such as Llama, Qwen2 or GPT-2)"
        )
    return head


def load_tokenizer(folder: str | Path, option: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer of a model, set to pad on the left; one without a pad token pads with its end-of-sequence token.

    That is safe here because padding is known from lengths, not from token ids.

    Raises:
        ValueError: naming `option`: nothing loads, the vocabulary is empty or there is no end-of-sequence token.
    """
    given = f"{flag(option)}={str(folder)!r}"
    with explained(option, folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.padding_side = "left"
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"{given} must hold a tokenizer and encodes text to no tokens; save the model's tokenizer there"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{given} has a tokenizer without eos_token; responses could not end: set one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def mix_seed(seed: int, index: int) -> int:
    """A seed for part `index` of a run; 32 bits, which is all that torch's generator on the CPU uses of a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "big")


class Best(NamedTuple):
    """The best measurement so far, as stored in checkpoints."""

    value: float | None = None
    """None before the first measurement."""
    step: int = 0
    """Number of steps before it."""

    def result(self, figure: str) -> dict[str, dict[str, float]]:
        """The entry for `result.json`, where `figure` names the measurement; empty before the first."""
        return {} if self.value is None else {"best": {figure: self.value, "step": self.step}}


def keep_highest(
    best: Best, value: float, step: int, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path
) -> Best:
    """The better of `best` and of `value` after `step` steps, whose weights are then saved below `out`; collective.

    NaN is never better.
    """
    is_better = value > (-math.inf if best.value is None else best.value)
    return _save(Best(value, step), actor, tokenizer, out) if is_better else best


def keep_lowest(best: Best, value: float, step: int, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path) -> Best:
    """Saves the weights with the lowest loss, as `keep_highest` does for the highest score."""
    is_better = value < (math.inf if best.value is None else best.value)
    return _save(Best(value, step), actor, tokenizer, out) if is_better else best


def _save(best: Best, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path) -> Best:
    save_stage(actor, tokenizer, out / BEST)
    return best


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
    # The hub refuses a card whose base model or dataset is not a name of its own.
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
    text = "## Loading\n\n" + _fenced("python", "\n".join(lines))
    if not has_adapter:
        return text
    with_peft = f'from peft import PeftModel\nmodel = PeftModel.from_pretrained(base, "this folder/{ADAPTER}")'
    return f"{text}\n\nThe adapter is merged into these weights. To load it alone, on the base model:\n\n" + _fenced(
        "python", with_peft
    )


def _training(options: Mapping[str, Any], recipe: str | None, run_folder: Path) -> str:
    """A card's section on training: a sentence, the most important options, and the figures of the last step."""
    if recipe not in METHODS:
        return ""
    text = f"## Training\n\nTrained with {METHODS[recipe]}, from {_base(options, recipe)}, on {_data(options)}."
    settings = {shown: options.get(name) for name, shown in SETTINGS.items()}
    text += "\n\n" + _table("option", "value", {name: value for name, value in settings.items() if value})
    steps = read_metrics(run_folder / METRICS)
    if not steps:
        return text
    last = {name: value for name, value in steps[-1].items() if "loss" in name or name in FINAL}
    return f"{text}\n\n" + _table(f"step {steps[-1]['step'] + 1} (last)", "value", last)


def _base(options: Mapping[str, Any], recipe: str) -> str:
    model = options.get("model")
    if model is None:
        return "randomly initialized weights" if recipe == "sft" else "a small model that the run trained first"
    return f"[{model}](https://huggingface.co/{model})" if is_hub_name(model) else f"`{model}`"


def _data(options: Mapping[str, Any]) -> str:
    data_sets = _as_list(options.get("dataset"))
    if not data_sets:
        return f"a built-in task of hybrid-engine{_in_code(options.get('task'))}"
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
    return "## Evaluation\n\n" + _fenced("yaml", yaml.safe_dump(json.loads(path.read_text()), sort_keys=False))


def _options(path: Path) -> str:
    if not path.exists():
        return ""
    return "## Options\n\nAs a `--config` file:\n\n" + _fenced("yaml", path.read_text(encoding="utf-8"))


def _versions() -> str:
    installed = {name: version(name) for name in LIBRARIES if any(distributions(name=name))}
    numbers = installed | {"python": platform.python_version()}
    return "## Versions\n\n" + ", ".join(f"{name} {number}" for name, number in numbers.items())


def _fenced(language: str, text: str) -> str:
    """`text` as a code block, with a fence longer than its backticks."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
