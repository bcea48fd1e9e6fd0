"""The `optimizer` and `scheduler` blocks: what the engine builds when the caller passes none.

A type is one of DeepSpeed's own, or a class of torch.optim or torch.optim.lr_scheduler, which DeepSpeed takes by name
too; its `params` are then that class's arguments, checked by building one.
"""

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybrid_engine.config.checks import (
    check_choice,
    check_flag,
    check_integer,
    check_number,
    choose_type,
    whole_number,
)
from hybrid_engine.config.keys import OPTIMIZERS_NOT_SUPPORTED
from hybrid_engine.config.reading import child_block, read_block

if TYPE_CHECKING:  # the command reads its options without torch
    import torch

ADAM_DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "Adam": ADAM_DEFAULTS,
    "AdamW": ADAM_DEFAULTS,
    "Lamb": {**ADAM_DEFAULTS, "eps_inside_sqrt": False, "max_coeff": 10.0, "min_coeff": 0.01},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "Muon": {"momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
}
MUON_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}
"""Learning rates of its two kinds of groups where there is no `lr`: those of DeepSpeed's MuonWithAuxAdam."""
OPTIMIZER_PARAMS = {
    "Adam": (*ADAM_DEFAULTS, "bias_correction", "adam_w_mode"),
    "AdamW": (*ADAM_DEFAULTS, "bias_correction", "adam_w_mode"),
    "Lamb": (*OPTIMIZER_DEFAULTS["Lamb"], "bias_correction"),
    "Lion": tuple(OPTIMIZER_DEFAULTS["Lion"]),
    "Muon": ("lr", *MUON_RATES, *OPTIMIZER_DEFAULTS["Muon"]),
}
"""The keys of `optimizer.params` by type."""
TORCH_OPTIMIZERS = ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Classes of torch.optim; each steps every number by itself, so that shards are stepped like the whole."""
PAIRS = ("betas", "etas", "step_sizes")
"""Keys of `optimizer.params` whose values are lists in JSON and tuples in torch."""
WARMUP_PARAMS = ("warmup_num_steps", "warmup_type")
SCHEDULER_PARAMS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *WARMUP_PARAMS),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *WARMUP_PARAMS),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *WARMUP_PARAMS),
    "LRRangeTest": (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
    ),
    "OneCycle": (
        "cycle_min_lr",
        "cycle_max_lr",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
    ),
}
"""The keys of `scheduler.params` by type."""
TORCH_SCHEDULERS = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "StepLR",
)
"""Classes of torch.optim.lr_scheduler; those that are missing take functions, which no JSON file holds."""
NOT_IN_CONFIG = ("params", "optimizer", "last_epoch", "foreach", "fused", "capturable", "differentiable")
"""Arguments of torch's classes that are no keys of `params`: what is stepped, and how rather than what."""
REQUIRED_SCHEDULER_PARAMS = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
FLAGS = ("lr_range_test_staircase", "cycle_momentum")
# The smallest integer each of these may be; the other parameters are rates, not negative.
INTEGERS = {
    "total_num_steps": 1,
    "warmup_num_steps": 0,
    "lr_range_test_step_size": 1,
    "cycle_first_step_size": 1,
    "cycle_second_step_size": 1,
    "cycle_first_stair_count": 0,
    "cycle_second_stair_count": 0,
    "decay_step_size": 0,
}
PER_GROUP = ("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr")
"""Rates that may be a list, one for each parameter group."""
MAY_BE_NULL = ("warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`optimizer`: the optimizer that the engine builds."""

    type: str
    """"Adam" (weight decay added to the gradient), "AdamW" (decoupled weight decay), "Lamb", "Lion", "Muon" (for hidden
    matrices, with AdamW for all other parameters, such as embeddings and heads), or "SGD" and other classes of
    torch.optim; as in DeepSpeed, "Adam" also decouples the decay unless `params.adam_w_mode` is false."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments: `lr`, `betas`, `eps`, `weight_decay`, ...; missing ones have DeepSpeed's defaults."""

    def __post_init__(self) -> None:
        if self.type in TORCH_OPTIMIZERS:
            _check_arguments("optimizer", _torch_optimizer(self.type), _parameters(), self.params)
            return
        assert self.type in OPTIMIZER_DEFAULTS, f"{self.type=}"
        # torch.optim's own default weight decay differs, so no default is left to it.
        object.__setattr__(self, "params", OPTIMIZER_DEFAULTS[self.type] | self.params)
        for name, value in self.params.items():
            if name in ("bias_correction", "eps_inside_sqrt"):
                check_flag(f"optimizer.params.{name}", value)
            elif name != "betas":
                check_number(f"optimizer.params.{name}", value, 0)
        _check_betas(self.params["betas"])
        if "momentum" in self.params:
            _check_decay("optimizer.params.momentum", self.params["momentum"])


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, tuple) or len(betas) != 2:
        raise ValueError(f"optimizer.params.betas={betas!r} must be two numbers; write it like [0.9, 0.999]")
    for index, beta in enumerate(betas):
        _check_decay(f"optimizer.params.betas[{index}]", beta)


def _check_decay(path: str, value: Any) -> None:
    check_number(path, value, 0, 1)
    if value == 1:
        raise ValueError(f"{path}=1 must be below 1; write it like 0.9 or 0.999")


def _check_arguments(block: str, torch_class: type, subject: Any, params: dict[str, Any]) -> None:
    arguments = inspect.signature(torch_class).parameters
    for name, value in params.items():
        if isinstance(arguments[name].default, bool):
            check_flag(f"{block}.params.{name}", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            check_number(f"{block}.params.{name}", value, 0)
    try:
        built = torch_class(subject, **params)
        if hasattr(built, "optimizer"):
            _step_once(built)  # some look at their arguments only then
    # What a class of torch raises for an argument of the wrong kind is anything.
    except Exception as error:
        raise ValueError(
            f"{block}.params={params} are not arguments of torch's {torch_class.__name__}: {error}; correct them"
        ) from error


def _step_once(scheduler: Any) -> None:
    scheduler.optimizer.step()
    scheduler.step(*[0.0] if type(scheduler).__name__ == "ReduceLROnPlateau" else [])


def _torch_optimizer(name: str) -> Any:
    import torch

    return getattr(torch.optim, name)


def _torch_scheduler(name: str) -> Any:
    import torch

    return getattr(torch.optim.lr_scheduler, name)


def _parameters() -> list["torch.nn.Parameter"]:
    import torch

    return [torch.nn.Parameter(torch.zeros(1))]


def _argument_names(torch_class: type) -> list[str]:
    return [name for name in inspect.signature(torch_class).parameters if name not in NOT_IN_CONFIG]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`scheduler`: the learning-rate schedule that the engine builds and steps after each optimizer step."""

    type: str
    """"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle", or "CosineAnnealingLR" and other
    classes of torch.optim.lr_scheduler."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class in `hybrid_engine.optim.lr_schedules` or torch; missing ones have its defaults."""

    def __post_init__(self) -> None:
        # Many files write steps as 1e5, which is a float.
        params = {name: whole_number(value) if name in INTEGERS else value for name, value in self.params.items()}
        object.__setattr__(self, "params", params)
        if self.type in TORCH_SCHEDULERS:
            subject = _torch_optimizer("AdamW")(_parameters())
            _check_arguments("scheduler", _torch_scheduler(self.type), subject, self.params)
            return
        assert self.type in SCHEDULER_PARAMS, f"{self.type=}"
        for name in REQUIRED_SCHEDULER_PARAMS.get(self.type, ()):
            if name not in self.params:
                raise ValueError(f"scheduler.params.{name} is missing; {self.type} needs it; give a number")
        for name, value in self.params.items():
            _check_scheduler_param(name, value)


def _check_scheduler_param(name: str, value: Any) -> None:
    path = f"scheduler.params.{name}"
    if value is None and name in MAY_BE_NULL:
        return
    if name in INTEGERS:
        check_integer(path, value, INTEGERS[name])
    elif name in FLAGS:
        check_flag(path, value)
    elif name == "warmup_type":
        check_choice(path, value, ("log", "linear"))
    else:
        is_list = name in PER_GROUP and isinstance(value, (list, tuple)) and len(value) > 0
        for entry in value if is_list else [value]:
            check_number(path, entry, 0)


def build_optimizer_config(block: dict[str, Any], without_effect: list[str]) -> OptimizerConfig | None:
    """The checked `optimizer` block; None for an empty one."""
    if not block:
        return None
    block = read_block(block, "optimizer", ("type", "params"), without_effect)
    kind = choose_type("optimizer", block.get("type"), (*OPTIMIZER_PARAMS, *TORCH_OPTIMIZERS), OPTIMIZERS_NOT_SUPPORTED)
    given = child_block(block, "params", "optimizer")
    known = OPTIMIZER_PARAMS[kind] if kind in OPTIMIZER_PARAMS else _argument_names(_torch_optimizer(kind))
    params = read_block(given, "optimizer.params", known, without_effect)
    params = {
        name: tuple(value) if isinstance(value, list) and name in PAIRS else value for name, value in params.items()
    }
    if kind in ("Adam", "AdamW"):
        decoupled = params.pop("adam_w_mode", True)
        check_flag("optimizer.params.adam_w_mode", decoupled)
        kind = "AdamW" if decoupled or kind == "AdamW" else "Adam"
    return OptimizerConfig(type=kind, params=params)


def build_scheduler_config(block: dict[str, Any], without_effect: list[str]) -> SchedulerConfig | None:
    """The checked `scheduler` block; None for an empty one."""
    if not block:
        return None
    block = read_block(block, "scheduler", ("type", "params"), without_effect)
    kind = choose_type("scheduler", block.get("type"), (*SCHEDULER_PARAMS, *TORCH_SCHEDULERS))
    given = child_block(block, "params", "scheduler")
    is_ours = kind in SCHEDULER_PARAMS
    known = SCHEDULER_PARAMS[kind] if is_ours else _argument_names(_torch_scheduler(kind))
    params = read_block(given, "scheduler.params", known, without_effect)
    return SchedulerConfig(type=kind, params=params)
