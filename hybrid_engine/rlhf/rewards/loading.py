"""Loads the rewards of a run from the options `--reward` and `--reward-weights`.

    rewards = load_rewards(["number", "my_rewards:style"], weights=[1.0, 0.2])

A spec is the name of a rule (`built_in.py`) or of a judge (`judges.py`), the folder or hub name of a classifier
(`learned.py`) or `module:function` (a function of the user).
"""

import asyncio
import difflib
import importlib
import inspect
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_engine.config.checks import check_weights
from hybrid_engine.rlhf.rewards.judges import RULES
from hybrid_engine.rlhf.rewards.learned import LearnedReward, names_model
from hybrid_engine.rlhf.rewards.rewards import TIME_LIMIT_SECONDS, Rewards
from hybrid_engine.rlhf.rewards.scores import Answers, Judge, Reward, RunView

OF_ANSWERS = ("prompts", "responses", "completions", "prompt_ids", "response_ids", "is_cut_off")
GIVEN = (*OF_ANSWERS, "completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric")
"""Names that every function may use for its parameters; a column of the same name is hidden."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load_rewards(
    specs: Sequence[str],
    weights: Sequence[float] | None = None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
    load_model: Callable[[str], Judge] = LearnedReward.load,
) -> Rewards:
    """Finds the functions and loads the models that `--reward` names; frozen, on this process's device.

    Args:
        specs: one for each reward.
        weights: one for each, in their order; None: 1 each.
        time_limit_seconds: for one call of one reward.
        load_model: builds a judge from the folder or hub name of a model.

    Raises:
        ValueError: there is no reward, a spec does not name one, a weight is missing or not finite, or all are 0.
            Errors that a user's module raises during its import are not converted.
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
    """A short name for each spec: the rule, the function or the folder, numbered if several are equal."""
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
    return before if before in RULES else behind


def _load(spec: str, name: str, weight: float, load_model: Callable[[str], Judge], view: RunView) -> Reward:
    build = partial(Reward, spec=spec, name=name, weight=weight)
    kind, _, given = spec.partition(":")
    if kind in RULES and not Path(spec).exists():
        rule = RULES[kind](spec, given)
        return build(judge=rule.judge, columns=rule.columns, references=rule.references, check=rule.check)
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
    near = difflib.get_close_matches(spec, RULES, n=1, cutoff=0.75)
    if near and not Path(spec).exists():
        raise ValueError(
            f"--reward={spec!r} is not a rule, a folder or module:function; did you mean {near[0]!r}? The rules are "
            f"{', '.join(RULES)}"
        )


def find_function(spec: str, option: str = "--reward") -> Callable[..., Any]:
    """The function that `module:function`, a value of `option`, names, in a module on the path or in this folder.

    Errors that the module raises during its import are not converted.

    Raises:
        ValueError: the module or function does not exist, or it cannot be called.
    """
    module_name, _, function_name = spec.partition(":")
    for part, name in (("module", module_name), ("function", function_name)):
        if not name:
            raise ValueError(f"{option}={spec!r} has no {part}; write module:function")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # the module exists, and imports a missing one
            raise
        raise ValueError(
            f"{option}={spec!r}: no module {error.name!r} in this folder or on the Python path; write module:function"
        ) from error
    finally:
        sys.path.remove("")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{option}={spec!r}: {module_name} has no function {function_name!r}; write module:function")
    return function


def would_get(spec: str, column: str) -> bool:
    """Whether `spec` is a function that gets `column` if there is one: it names it, or takes any."""
    if spec.partition(":")[0] in RULES or names_model(spec):
        return False
    parameters = _parameters(find_function(spec))
    return any(parameter.name == column or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def call_function(function: Callable[..., Any], answers: Answers, view: RunView | None = None) -> Any:
    """The result of `function` for `answers`, awaited if it is asynchronous, as a list if it is iterable.

    The values that it logs are in `view`.

    Raises:
        TypeError: its signature has a parameter that is not available.
    """
    offered = {**answers.columns, **everything_given(answers, view or RunView())}
    parameters = _parameters(function)
    first = first_positional(parameters)
    positional = [answers.prompts, answers.responses] if first else []
    named = {name: value for name, value in offered.items() if name not in first}
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        wanted = {parameter.name for parameter in parameters if parameter.kind in BY_NAME}
        named = {name: value for name, value in named.items() if name in wanted}
    returned = function(*positional, **named)
    if inspect.isawaitable(returned):
        returned = _wait_for(returned)
    return list(returned) if hasattr(returned, "__iter__") and not isinstance(returned, str) else returned


def everything_given(answers: Answers, view: RunView) -> dict[str, Any]:
    """Values of the parameters that functions may have by the names `GIVEN`."""
    completions: Sequence[Any] = answers.conversations or [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(answers.prompts, answers.responses, strict=True)
    ]
    values = (
        answers.prompts,
        answers.responses,
        completions,
        answers.prompt_ids,
        answers.response_ids,
        answers.is_cut_off,
    )
    given = dict(zip(OF_ANSWERS, map(list, values), strict=True))
    given |= dict.fromkeys(("completion_ids", "completions_ids"), given["response_ids"])
    return given | {"trainer_state": view.state, "log_extra": view.log_extra, "log_metric": view.log_metric}


def columns_needed(function: Callable[..., Any]) -> frozenset[str]:
    """The columns that `function` requires."""
    return frozenset(parameter.name for parameter in _columns(function) if parameter.default is parameter.empty)


def columns_optional(function: Callable[..., Any]) -> frozenset[str]:
    """The columns that `function` names and has a default for."""
    return frozenset(parameter.name for parameter in _columns(function) if parameter.default is not parameter.empty)


def _columns(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = _parameters(function)
    known = {*GIVEN, *first_positional(parameters)}
    return [parameter for parameter in parameters if parameter.kind in BY_NAME and parameter.name not in known]


def first_positional(parameters: Collection[inspect.Parameter]) -> list[str]:
    """The names of the first two parameters if the function chose them itself, else none.

    Such a function gets prompts and responses by position; one without an inspectable signature gets only these.
    """
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in by_position and p.default is p.empty][:2]
    any_given = any(parameter.name in GIVEN for parameter in parameters)
    return names if len(names) == 2 and not any_given else []


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions that are written in C
        kinds = inspect.Parameter.POSITIONAL_ONLY
        return [inspect.Parameter(name, kinds) for name in ("first", "second")]


def _wait_for(awaitable: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as pool:  # in a notebook, whose own loop runs in this thread
        return pool.submit(asyncio.run, wait()).result()
