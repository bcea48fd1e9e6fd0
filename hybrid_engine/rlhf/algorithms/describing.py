"""What an algorithm is, in lines to print before a run: no choice is made silently."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from hybrid_engine.rlhf.algorithms.choices import Algorithm
from hybrid_engine.rlhf.algorithms.presets import preset_choices
from hybrid_engine.rlhf.runs.checks import flag

Cause = Callable[[Algorithm], str | None]


def _beside(cause: str, has_effect: Callable[[Algorithm], Any]) -> Cause:
    """The cause, with the algorithm's choices in place of their names, unless `has_effect`."""
    return lambda algorithm: None if has_effect(algorithm) else cause.format_map(vars(algorithm))


IDLE: dict[str, Cause] = {
    "scale_divisor": _beside("--scale {scale}", lambda a: a.scale in ("group-std", "leave-one-out-std")),
    "scale_eps": _beside("--scale {scale}", lambda a: a.scale.endswith("-std")),
    "clip_low": _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss != "reinforce"),
    "clip_high": _beside("--policy-loss {policy_loss}", lambda a: a.policy_loss != "reinforce"),
    "kl_estimator": _beside("--kl-place {kl_place}", lambda a: a.needs_reference),
    "kl_horizon": _beside("--kl-target {kl_target}", lambda a: a.kl_target),
    "overlong_factor": _beside("--overlong-buffer {overlong_buffer}", lambda a: a.overlong_buffer),
    "correction_low": _beside("--correction {correction}", lambda a: a.correction != "none"),
    "correction_high": _beside("--correction {correction}", lambda a: a.correction != "none"),
    "correction_threshold": _beside("--correction {correction}", lambda a: a.correction != "none"),
}
"""Beside which choice an option does nothing; None where it does something."""


def describe(algorithm: Algorithm) -> list[str]:
    """What the preset sets, what stands in place of a choice of the preset, and what does nothing; a line each."""
    preset, chosen = algorithm.preset, preset_choices(algorithm.preset)
    lines = [f"preset {preset}: {as_options(chosen)}" if preset else f"no preset: {as_options(all_choices(algorithm))}"]
    lines += [
        f"{as_options({name: getattr(algorithm, name)})} in place of {value} of preset {preset}"
        for name, value in chosen.items()
        if getattr(algorithm, name) != value
    ]
    return lines + idle_lines(algorithm, chosen)


def all_choices(algorithm: Algorithm) -> dict[str, Any]:
    """The choices that do something, by the names of the fields."""
    names = [field.name for field in fields(algorithm) if field.name != "preset"]
    return {name: getattr(algorithm, name) for name in names if name not in IDLE or not IDLE[name](algorithm)}


def idle_lines(algorithm: Algorithm, chosen: Mapping[str, Any]) -> list[str]:
    """A line for each choice that is neither the default nor the preset's, and does nothing beside the others."""
    usual = {field.name: field.default for field in fields(algorithm)} | dict(chosen)
    return [
        f"{as_options({name: getattr(algorithm, name)})} does nothing beside {cause(algorithm)}"
        for name, cause in IDLE.items()
        if getattr(algorithm, name) != usual[name] and cause(algorithm)
    ]


def as_options(choices: Mapping[str, Any]) -> str:
    """The choices as they would be typed."""
    return " ".join(f"{flag(name)} {value}" for name, value in choices.items())
