"""From the options `--reward` and `--reward-weights` to the rewards of a run.

    rewards = load_rewards(["number", "my_rewards:style"], weights=[1.0, 0.2])

A spec is the name of a rule (`built_in.py`), the folder or hub name of a classifier (`learned.py`) or `module:function`
(`functions.py`).
"""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hybrid_engine.rlhf.rewards.answers import Judge, Reward, RunView
from hybrid_engine.rlhf.rewards.built_in import BUILT_IN
from hybrid_engine.rlhf.rewards.functions import (
    call_function,
    columns_needed,
    columns_optional,
    find_function,
)
from hybrid_engine.rlhf.rewards.learned import LearnedReward, names_model
from hybrid_engine.rlhf.rewards.rewards import TIME_LIMIT_SECONDS, Rewards
from hybrid_engine.rlhf.runs.checks import check_weights


def load_rewards(
    specs: Sequence[str],
    weights: Sequence[float] | None = None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    load_model: Callable[[str], Judge] = LearnedReward.load,
) -> Rewards:
    """Finds the functions and loads the models that the option `--reward` names; frozen, on this process's device.

    Args:
        specs: one for each reward.
        weights: one for each, in their order; None: 1 each.
        time_limit_seconds: for one call of one reward.
        load_model: makes what judges of the folder or hub name of a model.

    Raises:
        ValueError: there is no reward, a spec names none, a weight is missing, not finite or all are 0. What a module
            of the user's raises while it is imported passes as it is.
    """
    if not specs:
        raise ValueError("--reward is missing; give one, such as --reward exact (docs/rewards.md)")
    if not (math.isfinite(time_limit_seconds) and time_limit_seconds > 0):
        raise ValueError(f"--reward-time-limit={time_limit_seconds} must be above 0, in seconds; raise it")
    weights = check_weights(len(specs), weights)
    view = RunView()
    rewards = tuple(
        _load(spec, name, weight, load_model, view)
        for spec, name, weight in zip(specs, names_of(specs), weights, strict=True)
    )
    return Rewards(rewards=rewards, time_limit_seconds=time_limit_seconds, view=view)


def names_of(specs: Sequence[str]) -> list[str]:
    """A short name for each spec: the rule, the function or the folder, numbered where several are alike."""
    short = [_short_name(spec) for spec in specs]
    counts, names = Counter(short), []
    seen: Counter[str] = Counter()
    for name in short:
        seen[name] += 1
        names.append(f"{name}_{seen[name]}" if counts[name] > 1 else name)
    return names


def _short_name(spec: str) -> str:
    if names_model(spec):
        return Path(spec).name or spec
    before, _, behind = spec.partition(":")
    return before if before in BUILT_IN else behind


def _load(spec: str, name: str, weight: float, load_model: Callable[[str], Judge], view: RunView) -> Reward:
    build = partial(Reward, spec=spec, name=name, weight=weight)
    kind, _, given = spec.partition(":")
    if kind in BUILT_IN and not Path(spec).exists():
        rule = BUILT_IN[kind](spec, given)
        return build(judge=rule.judge, columns=rule.columns, check=rule.check)
    if names_model(spec):
        _check_not_misspelt(spec)
        return build(judge=load_model(spec))
    function = find_function(spec)
    return build(
        judge=partial(call_function, function, view=view),
        columns=columns_needed(function),
        optional_columns=columns_optional(function),
    )


def _check_not_misspelt(spec: str) -> None:
    near = difflib.get_close_matches(spec, BUILT_IN, n=1, cutoff=0.75)
    if near and not Path(spec).exists():
        raise ValueError(
            f"--reward={spec!r} is no rule, folder or module:function; did you mean {near[0]!r}? The rules are "
            f"{', '.join(BUILT_IN)}"
        )
