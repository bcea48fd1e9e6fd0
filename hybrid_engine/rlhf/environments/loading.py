"""Finds the environments that `--environment` and `--tools` name; each becomes a `Kind` that builds instances.

    my_game:Wordle                      a factory (a class, or a function) in a module
    gymnasium:my_game:Maze              a text game by gymnasium's contract, or the id of a registered one
    game=my_game:Wordle code=my:Code    several, with the names of the data's column `environment`

`adapters.py` has the environments of other libraries.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hybrid_engine.rlhf.environments.adapters import ADAPTERS
from hybrid_engine.rlhf.environments.contract import Environment, TextGame, ToolEnvironment, Wait
from hybrid_engine.rlhf.environments.playing import Kind
from hybrid_engine.rlhf.options.reinforcement import CALCULATOR, AgentConfig
from hybrid_engine.rlhf.rewards.loading import find_function
from hybrid_engine.rlhf.tasks.calculator import Calculator

_NAMED = re.compile(r"([A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
TOOLS_ALONE = "tools"
"""The name of the environment of a run that has functions as tools, and no environment."""


def load_kinds(config: AgentConfig, wait: Wait) -> list[Kind]:
    """The environments of a run; nothing is built yet.

    Raises:
        ValueError: a spec names nothing, its module cannot be imported, a pattern is wrong, or two environments have
            one name.
    """
    functions = [find_function(spec, "--tools") for spec in config.tools]
    pattern = check_pattern(config.action_pattern)
    if config.plays_calculator:
        return [Kind(CALCULATOR, CALCULATOR, lambda: TextGame(Calculator(), None, wait))]
    if not config.environment:
        return [Kind(TOOLS_ALONE, TOOLS_ALONE, lambda: ToolEnvironment(None, functions, wait, TOOLS_ALONE))]
    kinds = []
    for given in config.environment:
        named = _NAMED.fullmatch(given)
        spec = named[2] if named else given
        name = named[1] if named else short_name(spec)
        kinds.append(Kind(name, spec, find_builder(spec, name, functions, pattern, wait)))
    check_names(kinds)
    return kinds


def short_name(spec: str) -> str:
    """The name of an environment that is given none: the factory, or what follows an adapter's name."""
    kind, _, rest = spec.partition(":")
    return rest if kind in ADAPTERS else rest or kind


def check_names(kinds: Sequence[Kind]) -> None:
    """Raises ValueError if two environments have one name."""
    for name, count in Counter(kind.name for kind in kinds).items():
        if count > 1:
            specs = [kind.spec for kind in kinds if kind.name == name]
            named = " ".join(f"{name}_{place}={spec}" for place, spec in enumerate(specs, 1))
            raise ValueError(f"--environment: {count} are named {name!r}; give each its own name, such as {named}")


def check_pattern(pattern: str | None) -> str | None:
    """The pattern; ValueError if Python's `re` cannot read it."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"--action-pattern={pattern!r} is not a regular expression: {error}; fix it") from error
    return pattern


def find_builder(
    spec: str, name: str, functions: Sequence[Callable[..., Any]], pattern: str | None, wait: Wait
) -> Callable[[], Environment]:
    """A function that builds an instance of the environment that `spec` names."""
    kind, _, rest = spec.partition(":")
    if kind in ADAPTERS:
        if not rest:
            raise ValueError(f"--environment={spec!r} names nothing after {kind}:; write {kind}:NAME")
        return ADAPTERS[kind](rest, functions, pattern, wait)
    try:
        factory = find_function(spec, "--environment")
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"--environment={spec!r} cannot be imported: {type(error).__name__}: {error}; fix the module"
        ) from error
    return partial(build, factory, name, functions, pattern, wait)


def build(
    factory: Callable[[], Any], name: str, functions: Sequence[Callable[..., Any]], pattern: str | None, wait: Wait
) -> Environment:
    """An instance of a user's environment: a text game if it is gymnasium's, otherwise an object with tools."""
    instance = wait(factory())
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and isinstance(instance, gymnasium.Env):
        return TextGame(instance, pattern, wait)
    return ToolEnvironment(instance, functions, wait, name)
