"""Rewards that are functions of the user's, `module:function`: found, called with what their signature asks for.

A function gets lists with an entry for each answer, by name:

    prompts                            texts, or conversations where the data has them
    responses                          the answers as text
    completions                        the same; for conversations `[{"role": "assistant", "content": ...}]`
    prompt_ids, response_ids           token ids; the latter also as completion_ids and completions_ids
    is_cut_off                         True where an answer met the longest length before it ended
    trainer_state, log_extra, log_metric   TRL's, no lists: see `answers.RunView`
    any other name                     that column of the data set

One that takes `**kwargs` gets all of them, so that reward functions written for TRL run as they are. One that asks for
nothing of the above by name gets prompts and responses as its first two arguments.
"""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybrid_engine.rlhf.rewards.answers import Answers, RunView

OF_ANSWERS = ("prompts", "responses", "completions", "prompt_ids", "response_ids", "is_cut_off")
GIVEN = (*OF_ANSWERS, "completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric")
"""What every function may ask for by name; a column of the same name is hidden."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find_function(spec: str) -> Callable[..., Any]:
    """The function that `module:function` names, of a module on the path or in the present folder.

    What the module raises while it is imported passes as it is.

    Raises:
        ValueError: there is no such module or function, or it cannot be called.
    """
    module_name, _, function_name = spec.partition(":")
    for part, name in (("module", module_name), ("function", function_name)):
        if not name:
            raise ValueError(f"--reward={spec!r} names no {part}; write module:function")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # the module is there, and imports one that is not
            raise
        raise ValueError(
            f"--reward={spec!r}: no module {error.name!r} here or on the path; write module:function"
        ) from error
    finally:
        sys.path.remove("")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--reward={spec!r}: {module_name} has no function {function_name!r}; write module:function")
    return function


def call_function(function: Callable[..., Any], answers: Answers, view: RunView | None = None) -> Any:
    """What `function` returns for `answers`, awaited if it is asynchronous, as a list if it can be gone through.

    What it logs meanwhile is in `view`.

    Raises:
        TypeError: its signature asks for what there is not.
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
    """What functions may ask for by the names `GIVEN`."""
    completions = [
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
    """The columns that `function` cannot be called without."""
    return frozenset(parameter.name for parameter in _columns(function) if parameter.default is parameter.empty)


def columns_optional(function: Callable[..., Any]) -> frozenset[str]:
    """The columns that `function` names and has a default for."""
    return frozenset(parameter.name for parameter in _columns(function) if parameter.default is not parameter.empty)


def _columns(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = _parameters(function)
    known = {*GIVEN, *first_positional(parameters)}
    return [parameter for parameter in parameters if parameter.kind in BY_NAME and parameter.name not in known]


def first_positional(parameters: Collection[inspect.Parameter]) -> list[str]:
    """The names of the first two parameters where these are names of the function's own, else none.

    A function that says nothing of its parameters has none, and gets all by position.
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
