"""The options of a recipe for the command: read from its dataclass, which needs no torch, in the groups of `--help`.

A recipe's options are the fields of the class that `hybrid_engine/rlhf/options/__init__.py` names. Each has a type in
`KINDS`, a default and a text. A field whose type is a dataclass holds options like all others: the command passes those
that were given to its `from_options`.
"""

import difflib
import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hybrid_engine.rlhf.options import config_class

KINDS: dict[Any, type] = {
    bool: bool,
    float: float,
    int: int,
    str: str,
    str | None: str,
    int | None: int,
    float | None: float,
    tuple[str, ...]: str,
    str | tuple[str, ...] | None: str,
    tuple[float, ...]: float,
}
"""Types that a field may have, and the type of its value, or of each value of a list."""
LISTS = (tuple[str, ...], str | tuple[str, ...] | None, tuple[float, ...])
GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        *("model", "teacher", "teacher_prompt", "teacher_average"),
        *("teacher_column", "teacher_weights", "teacher_cache"),
        *("teacher_offload", "teacher_sharded", "teacher_timeout", "teacher_requests", "adapter"),
        *("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "dtype", "tf32"),
        *("chat_template", "tool_call_parser", "model_name", "shared_base", "vocab_size", "hidden_size", "num_layers"),
    ),
    "data": (
        *("environment", "harness", "harness_env", "harness_tests", "tools", "action_pattern"),
        *("dataset", "prompts", "task", "split", "dataset_config", "columns", "prompt_template", "system_prompt"),
        *("as_conversation", "held_out", "held_out_share", "held_out_dataset", "held_out_split", "row_key"),
        *("dataset_weights", "deduplicate", "skip_bad_rows", "skip_too_long", "max_tokens", "max_examples"),
        *("max_pairs", "max_answers", "max_prompts", "pass_window", "revisit_after", "replay_best"),
    ),
    "rewards": ("reward", "reward_weights", "reward_time_limit", "missing_eos_penalty", "missing_eos_score"),
    "rollout": (
        *("rollout_size", "group_size", "k", "num_samples", "max_new_tokens", "max_prompt_tokens", "temperature"),
        *("top_k", "top_p", "min_p", "router_replay", "max_running", "longest", "exact", "logprob_bound"),
        *("partial_rollouts", "max_staleness"),
        *("num_clients", "max_turns", "max_episode_seconds", "serving_memory"),
    ),
    "algorithm": (
        *(
            "preset",
            "loss",
            "divergence",
            "beta",
            "on_policy_share",
            "teacher_temperature",
            "teacher_top_k",
            "teacher_coef",
            "teacher_clamp",
            "teacher_alone",
            "kl_coef",
            "reward_aggregation",
            "baseline",
            "scale",
            "scale_divisor",
            "scale_eps",
            "policy_loss",
        ),
        *("clip", "clip_low", "clip_high", "dual_clip", "ratio_cap", "sapo_temperature_pos", "sapo_temperature_neg"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "cov_share", "cov_low", "cov_high"),
        *("cov_kl_coef", "value_clip", "aggregation", "top_entropy", "off_policy_threshold", "gamma", "lam"),
        *("kl_place", "kl_estimator", "kl_unbiased", "sampler_coef", "kl_target", "kl_horizon", "kl_bound"),
        *("measure_kl", "entropy_coef", "entropy_target", "entropy_change", "entropy_coef_max"),
        *("dynamic_sampling", "overlong_buffer", "overlong_factor", "mask_cut_off", "correction", "correction_low"),
        *("correction_high", "correction_threshold", "label_smoothing", "target_margin", "sft_weight"),
        *("wpo", "desirable_weight", "undesirable_weight", "center_coef"),
    ),
    "training": (
        *("steps", "epochs", "ppo_epochs", "learning_rate", "actor_lr", "critic_lr", "batch_size", "minibatch_size"),
        *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "group_by_length", "micro_batch_size"),
        *("tokens_per_micro_batch", "rows_per_pass", "activation_checkpointing", "zero_stage"),
    ),
    "evaluation": ("eval_every", "eval_prompts", "eval_samples", "eval_rows", "pass_score", "threshold"),
    "server": (
        *("host", "port", "api_key", "api_key_file", "allow_host", "allow_origin", "memory", "max_waiting"),
        *("max_session_bytes", "stall_seconds", "finish_seconds"),
    ),
    "run": (
        *("out", "seed", "episodes", "no_train", "replay"),
        *("resume", "restart", "save_every", "tp", "pp", "tracker", "metric_names"),
    ),
}
"""The headings of `--help` and the options below each, those that a beginner needs first."""
OPTIONS = {
    "hybrid_engine.exact": "exact",
    "hybrid_engine.max_running": "max_running",
    "max_running": "max_running",
    "num_return_sequences": "num_samples",
    "pipeline_parallel_size": "pp",
    "tensor_parallel.tp_size": "tp",
    "zero_optimization.stage": "zero_stage",
}
"""The option of a command, by the name of a key of the engine's config or of an argument of `generate()`."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a recipe."""

    name: str
    """The field's name, with underscores."""
    kind: type
    """Type of the value, or of each value of a list."""
    is_list: bool
    default: Any
    meaning: str
    holder: str | None = None
    """The field of `Config` that holds this option; None for a field of `Config` itself."""


@dataclass(frozen=True, kw_only=True)
class RecipeHelp:
    """The content of a recipe's `--help`."""

    text: str
    options: list[Option]

    def grouped(self) -> dict[str, list[Option]]:
        """The options below each heading, in the order of GROUPS; headings without an option are left out."""
        by_name = {option.name: option for option in self.options}
        found = {title: [by_name[name] for name in names if name in by_name] for title, names in GROUPS.items()}
        return {title: options for title, options in found.items() if options}


def read_recipe_help(recipe: str) -> RecipeHelp:
    """The docstring and the options of the `Config` of a recipe."""
    found = config_class(recipe)
    return RecipeHelp(text=inspect.cleandoc(found.__doc__ or ""), options=list(read_options(found)))


def read_options(kind: type) -> Iterator[Option]:
    """The options of a dataclass, those of its bases first; one that is declared again keeps its place."""
    for field in fields(kind):
        if is_dataclass(field.default):
            yield from (replace(option, holder=field.name) for option in read_options(type(field.default)))
            continue
        yield Option(
            name=field.name,
            kind=KINDS[field.type],
            is_list=field.type in LISTS,
            default=field.default,
            meaning=_text_of(kind, field),
        )


def _text_of(kind: type, field: "Field[Any]") -> str:
    """The description of a field, or that of the base which declares it; a field declared again need not repeat it."""
    for base in kind.__mro__:
        declared = vars(base).get("__dataclass_fields__", {}).get(field.name)
        if declared is not None and "text" in declared.metadata:
            return str(declared.metadata["text"])
    raise AssertionError(f"{kind.__qualname__}: say what {field.name} means")


def read_config_file(path: str, options: Sequence[Option]) -> dict[str, Any]:
    """The options in the file, by name; `kl-coef` and `kl_coef` are the same option.

    Raises:
        ValueError: the file cannot be read as YAML, is not a mapping, names an option twice or one that the recipe does
            not have, or gives a value of the wrong type.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config={path!r} is not a readable YAML file: {reason}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"--config={path!r} must contain `name: value` lines, not {content!r}")
    names = [str(key.value).replace("-", "_") for key, _ in yaml.compose(text, yaml.SafeLoader).value]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"--config={path!r} has {name} {count} times; keep one of them")
    by_name = {option.name: option for option in options}
    return dict(_read_entry(path, str(key), value, by_name) for key, value in content.items())


def _read_entry(path: str, key: str, value: Any, by_name: Mapping[str, Option]) -> tuple[str, Any]:
    name = key.replace("-", "_")
    if name not in by_name:
        nearest = difflib.get_close_matches(name, by_name, 1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"use {', '.join(sorted(by_name))}"
        raise ValueError(f"--config={path!r}: the recipe has no option {key!r}; {remedy}")
    option = by_name[name]
    if value is None and option.default is None:
        return name, None
    if not option.is_list:
        return name, _read_value(path, option, value)
    given = value if isinstance(value, list) else [] if value is None else [value]
    return name, tuple(_read_value(path, option, item) for item in given)


def _read_value(path: str, option: Option, value: Any) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if option.kind is float and isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-5, without a decimal point, as text
        except ValueError:
            pass
    if option.kind is float and is_number:
        return float(value)
    if type(value) is option.kind:
        return value
    raise ValueError(
        f"--config={path!r}: {option.name}={value!r} must be of type {option.kind.__name__}; "
        f"write {'it in quotes' if option.kind is str else 'one'}"
    )


def in_options(text: str, names: Iterable[str]) -> str:
    """Returns `text` with names of the engine's options replaced by a command's flags for the options `names`.

    A key of the config is replaced wherever it occurs, any other name only where a value follows: `max_new_tokens=8`.
    """
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    keys = {key: flags[name] for key, name in OPTIONS.items() if name in flags}
    texts = sorted((*map(re.escape, keys), *(f"{name}(?==)" for name in flags)), key=len, reverse=True)
    pattern = rf"(?<![-\w.:'\"`])(?:{'|'.join(texts)})(?![\w.]\w)"
    return re.sub(pattern, lambda found: keys.get(found[0]) or flags[found[0]], text)


class InOptions(logging.Filter):
    """Rewrites the lines of a logger with the flags of a command that has the options `names`."""

    def __init__(self, names: Iterable[str]):
        super().__init__()
        self.names = tuple(names)

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = in_options(record.getMessage(), self.names), None
        return True
