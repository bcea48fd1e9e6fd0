"""Metrics of a policy update that are logged with its loss, as means over tokens, and a description of the choices."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

from hybrid_engine.config.checks import flag
from hybrid_engine.rl.advantages import masked_mean
from hybrid_engine.rl.kl import estimated_entropy, kl_k3
from hybrid_engine.rl.losses import is_clipped, mean_ratio, policy_metrics, product_ratio
from hybrid_engine.rlhf.algorithms.objective import PolicyBatch, without_padding
from hybrid_engine.rlhf.options.algorithm import Algorithm, preset_choices

Cause = Callable[[Algorithm], str | None]


def _clip(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.logprobs_old)
    return is_clipped(ratio, batch.advantages, algorithm.clip_low, algorithm.clip_high)


def _gspo(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = mean_ratio(batch.logprobs, batch.logprobs_old, batch.mask)
    return is_clipped(ratio, batch.advantages, algorithm.clip_low, algorithm.clip_high)


def _sequence_clip(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = product_ratio(batch.logprobs, batch.logprobs_old, batch.mask)
    return is_clipped(ratio, batch.advantages, algorithm.clip_low, algorithm.clip_high)


def _cispo(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    ratio = torch.exp(batch.logprobs - batch.logprobs_old)
    return ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) != ratio


def _nowhere(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    return torch.zeros_like(batch.mask)


CLIPPED: dict[str, Callable[[Algorithm, PolicyBatch], torch.Tensor]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "reinforce": _nowhere,
    "sequence-clip": _sequence_clip,
}
"""`[N, T]` bool: the tokens whose loss, or whose weight under cispo, is clipped."""


@torch.no_grad()
def policy_figures(algorithm: Algorithm, batch: PolicyBatch) -> dict[str, torch.Tensor]:
    """Metrics of a micro-batch as 0-dimensional means over its tokens; nan without any token.

    Returns:
        `ratio` (1 before the first update of a rollout), `clip_fraction`, `approx_kl` (from the policy that sampled to
        the present one), `entropy` (as given, or estimated); with a reference also `kl`, the k3 estimate of the
        policy's KL to it; with weights also `correction_weight`.
    """
    batch = without_padding(batch)
    figures = policy_metrics(batch.logprobs, batch.logprobs_old, batch.advantages, batch.mask)
    clipped = CLIPPED[algorithm.policy_loss](algorithm, batch).to(batch.logprobs.dtype)
    entropy = estimated_entropy(batch.logprobs) if batch.entropy is None else batch.entropy
    figures |= {"clip_fraction": masked_mean(clipped, batch.mask), "entropy": masked_mean(entropy, batch.mask)}
    if batch.logprobs_ref is not None:
        figures["kl"] = masked_mean(kl_k3(batch.logprobs, batch.logprobs_ref), batch.mask)
    if batch.weights is not None:
        figures["correction_weight"] = masked_mean(batch.weights, batch.mask)
    return figures


def _beside(cause: str, has_effect: Callable[[Algorithm], Any]) -> Cause:
    """Fills the algorithm's choices into `cause`; the result is None where `has_effect`."""
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
"""The choice that makes an option ineffective; None where the option has an effect."""


def describe(algorithm: Algorithm) -> list[str]:
    """Lines that say what the preset sets, what replaces a choice of the preset, and what has no effect."""
    preset, chosen = algorithm.preset, preset_choices(algorithm.preset)
    lines = [f"preset {preset}: {as_options(chosen)}" if preset else f"no preset: {as_options(all_choices(algorithm))}"]
    lines += [
        f"{as_options({name: getattr(algorithm, name)})} in place of {value} of preset {preset}"
        for name, value in chosen.items()
        if getattr(algorithm, name) != value
    ]
    return lines + idle_lines(algorithm, chosen)


def all_choices(algorithm: Algorithm) -> dict[str, Any]:
    """The choices that have an effect, by field name."""
    names = [field.name for field in fields(algorithm) if field.name != "preset"]
    return {name: getattr(algorithm, name) for name in names if name not in IDLE or not IDLE[name](algorithm)}


def idle_lines(algorithm: Algorithm, chosen: Mapping[str, Any]) -> list[str]:
    """A line for each choice that is neither the default nor the preset's, and has no effect with the others."""
    usual = {field.name: field.default for field in fields(algorithm)} | dict(chosen)
    return [
        f"{as_options({name: getattr(algorithm, name)})} does nothing beside {cause(algorithm)}"
        for name, cause in IDLE.items()
        if getattr(algorithm, name) != usual[name] and cause(algorithm)
    ]


def as_options(choices: Mapping[str, Any]) -> str:
    """The choices as they would be typed."""
    return " ".join(f"{flag(name)} {value}" for name, value in choices.items())
