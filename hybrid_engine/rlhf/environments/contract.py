"""The seam between an episode and its environment, and the two kinds of environments that users write.

`playing.py` drives an `Environment`: it shows its tools to the policy, passes on each answer and adds the reply to the
conversation. `ToolEnvironment` holds an object by TRL's contract (`environment_factory` of TRL 1.16's GRPOTrainer):
`reset(**row)`, public methods as tools, `get_reward()`. `TextGame` holds one by gymnasium's (v1): `reset` and `step`.
Adapters of other libraries (`adapters.py`) are made of these two.
"""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from transformers.utils import get_json_schema

from hybrid_engine.rlhf.data.rows import Message

Content = str | list[dict[str, Any]]
"""Text, or parts of a content such as `{"type": "text", "text": "..."}`."""
Wait = Callable[[Any], Any]
"""Returns a value, or the result of it if it is awaitable."""
NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods of an environment that the policy cannot call."""
MAX_CHARACTERS = 2**17
"""Maximum number of characters of a text that an environment gives the policy; the rest is cut off."""
NO_ACTION = "There is no action in your answer: it must match {pattern!r}."


class BrokenEnvironment(Exception):
    """The environment cannot go on: raised by a tool, it ends the episode in place of going to the model."""


class Environment(Protocol):
    """One environment: it plays one episode at a time, and others after it. Every method may raise any error."""

    tools: list[dict[str, Any]]
    """JSON schemas of the tools that the policy may call, as OpenAI has them."""
    reward_name: str | None
    """The name of its own reward; None if it has none."""
    longest_reply: str | None
    """The longest text that comes back after an answer; None if it is not known."""
    reply_role: str
    """The role of the messages that come back."""
    instance: Any
    """The user's object, which rewards may look at."""

    def accepted(self, arguments: Mapping[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
        """The `arguments` of `reset`, without those of the `optional` ones that it does not take; else ValueError."""

    def reset(self, arguments: Mapping[str, Any]) -> Content | None:
        """Begins an episode; returns what is appended to the last user message, None for nothing."""

    def respond(self, answer: Message) -> list[Message] | None:
        """The messages that follow the policy's answer; None if the episode is over."""

    def get_reward(self) -> float | None:
        """The environment's own reward for the finished episode; None if it does not judge it."""

    def close(self) -> None:
        """Ends the environment."""


class ToolEnvironment:
    """An object by TRL's contract, and functions as further tools.

    Args:
        instance: has `reset`; None: there are only functions.
        functions: tools that do not belong to it.
        wait: finishes asynchronous methods.
        name: of the environment, for errors.
        methods: whether the public methods of the instance are tools.

    Raises:
        ValueError: there is no `reset`, a tool has no type hints or docstring, or two tools have one name.
    """

    longest_reply: str | None = None
    reply_role = "tool"

    def __init__(
        self,
        instance: Any | None,
        functions: Sequence[Callable[..., Any]],
        wait: Wait,
        name: str,
        *,
        methods: bool = True,
    ):
        self.instance, self._wait, self._name = instance, wait, name
        if instance is not None and not callable(getattr(instance, "reset", None)):
            raise ValueError(
                f"--environment={name!r}: {type(instance).__name__} has no method reset(); add one that begins an "
                "episode (docs/environments.md)"
            )
        self._callable: dict[str, Callable[..., Any]] = {}
        self.tools: list[dict[str, Any]] = []
        for function in [*functions, *(methods_of(instance) if methods else ())]:
            self.add_tool(schema_of(function, name), function)
        has_reward = callable(getattr(instance, "get_reward", None))
        self.reward_name = type(instance).__name__ if has_reward else None

    def add_tool(self, schema: dict[str, Any], function: Callable[..., Any]) -> None:
        """Adds a tool; ValueError if there is one of its name."""
        name = schema["function"]["name"]
        if name in self._callable:
            raise ValueError(f"--environment={self._name!r}: two tools are named {name!r}; rename one")
        self._callable[name] = function
        self.tools.append(schema)

    def accepted(self, arguments: Mapping[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
        """The `arguments` of `reset`, without those of the `optional` ones that it does not take.

        Raises:
            ValueError: it does not take one of the others, or needs one that is not there.
        """
        if self.instance is None:
            return dict(arguments)
        return accepted(self.instance.reset, arguments, optional)

    def reset(self, arguments: Mapping[str, Any]) -> Content | None:
        """See `Environment`."""
        return None if self.instance is None else read_content(self._wait(self.instance.reset(**arguments)))

    def respond(self, answer: Message) -> list[Message] | None:
        """The results of the answer's calls, in their order; an error of a tool is a result."""
        return [self._result(call) for call in answer.get("tool_calls") or []] or None

    def _result(self, call: Mapping[str, Any]) -> Message:
        function = call["function"]
        try:
            if function["name"] not in self._callable:
                raise ValueError(f"Tool {function['name']} not found.")
            result = self._wait(self._callable[function["name"]](**read_arguments(function["arguments"])))
        except BrokenEnvironment:
            raise
        except Exception as error:  # goes to the model
            result = {"error": str(error)}
        content = bounded(result if isinstance(result, list) else str(result))
        return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": content}

    def get_reward(self) -> float | None:
        """See `Environment`."""
        reward = self._wait(self.instance.get_reward())  # type: ignore[union-attr]
        return None if reward is None else float(reward)

    def close(self) -> None:
        """See `Environment`."""
        if callable(close := getattr(self.instance, "close", None)):
            self._wait(close())


class TextGame:
    """A game by gymnasium's contract (v1) whose actions and observations are text; its reward is the sum of all steps.

    `reset(seed=..., options=row)` returns (observation, info); `step(action)` returns (observation, reward, terminated,
    truncated, info). A game may say in `observation_role` with which role the policy sees observations (default: user),
    and in `longest_observation` the longest one.

    Args:
        game: the game; gymnasium need not be installed.
        pattern: finds the action in an answer: its first group, or all of the match; None: the action is the answer.
        wait: finishes asynchronous methods.

    Raises:
        ValueError: the pattern is not a regular expression of Python's `re`.
    """

    def __init__(self, game: Any, pattern: str | None, wait: Wait):
        self.tools: list[dict[str, Any]] = []
        self.instance, self._wait = game, wait
        self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        self.reward_name: str | None = type(getattr(game, "unwrapped", game)).__name__
        self.reply_role: str = getattr(game, "observation_role", "user")
        self.longest_reply: str | None = getattr(game, "longest_observation", None)
        self._reward = 0.0

    def accepted(self, arguments: Mapping[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
        """All `arguments`: they are the options of `reset`."""
        return dict(arguments)

    def reset(self, arguments: Mapping[str, Any]) -> Content | None:
        """See `Environment`."""
        self._reward = 0.0
        observation, _ = self._wait(self.instance.reset(seed=arguments.get("seed"), options=dict(arguments)))
        return read_content(observation)

    def respond(self, answer: Message) -> list[Message] | None:
        """The observation after the action in the answer."""
        action = self.action_in(answer.get("content") or "")
        if action is None:
            assert self._pattern is not None
            return [{"role": self.reply_role, "content": NO_ACTION.format(pattern=self._pattern.pattern)}]
        observation, reward, terminated, truncated, _ = self._wait(self.instance.step(action))
        self._reward += float(reward)
        if terminated or truncated:
            return None
        return [{"role": self.reply_role, "content": bounded(read_content(observation) or "")}]

    def action_in(self, answer: str) -> str | None:
        """The action in an answer, of several the last; None if there is none."""
        if self._pattern is None:
            return answer
        found = list(self._pattern.finditer(answer))
        return (found[-1][1] if self._pattern.groups else found[-1][0]) if found else None

    def get_reward(self) -> float | None:
        """The sum of the rewards of all steps."""
        return self._reward

    def close(self) -> None:
        """See `Environment`."""
        if callable(close := getattr(self.instance, "close", None)):
            self._wait(close())


def methods_of(instance: Any | None) -> list[Callable[..., Any]]:
    """The public methods that are tools, as TRL lists them: on the class, so that no property is read."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction) if instance is not None else []
    return [getattr(instance, name) for name, _ in members if name not in NOT_TOOLS and not name.startswith("_")]


def schema_of(function: Callable[..., Any], environment: str) -> dict[str, Any]:
    """The JSON schema of a tool, from its signature and its docstring in Google's form.

    Raises:
        ValueError: it has no type hints or no docstring, or they do not describe every argument.
    """
    try:
        return get_json_schema(function)
    except Exception as error:  # of transformers, whose classes differ between versions
        raise ValueError(
            f"--environment={environment!r}: {function.__qualname__}() cannot be a tool, because it has no complete "
            f"type hints and docstring with Args: {' '.join(str(error).split())} Complete them, or begin its name with "
            "an underscore"
        ) from error


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any], optional: Sequence[str]) -> dict[str, Any]:
    """The `arguments` of `function`, without those of the `optional` ones that it does not take.

    Raises:
        ValueError: it does not take one of the others, or needs one that is not there.
    """
    signature = inspect.signature(function)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    chosen = {
        name: value
        for name, value in arguments.items()
        if takes_any or name in signature.parameters or name not in optional
    }
    try:
        signature.bind(**chosen)
    except TypeError as error:
        raise ValueError(
            f"{function.__qualname__}{signature} {error}: it gets a row's columns by name "
            f"({', '.join(arguments) or 'none'}); give it these parameters, or **columns"
        ) from error
    return chosen


def read_arguments(text: Any) -> dict[str, Any]:
    """The arguments of a call; ValueError, whose message goes to the model, if they are not a JSON object."""
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ValueError(f"The arguments are not JSON: {error}.") from error
    if not isinstance(arguments, dict):
        raise ValueError("The arguments must be a JSON object.")
    return arguments


def read_content(value: Any) -> Content | None:
    """An observation; TypeError unless it is None, text, or parts of a content."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value):
        return value
    raise TypeError(f"an observation must be None, text or parts of a content, not {type(value).__name__}")


def bounded(content: Content) -> Content:
    """The content, without the end of a text of more than MAX_CHARACTERS."""
    if not isinstance(content, str) or len(content) <= MAX_CHARACTERS:
        return content
    return f"{content[:MAX_CHARACTERS]}\n[{len(content) - MAX_CHARACTERS} more characters were cut off]"


def with_observation(messages: Sequence[Message], observation: Content | None) -> list[Message]:
    """The messages, with the observation appended to the last one as TRL does: text to text, or parts to parts."""
    if observation is None:
        return list(messages)
    last = messages[-1]
    content = last["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*messages[:-1], {**last, "content": content + bounded(observation)}]


def is_awaitable(value: Any) -> bool:
    """Whether `value` is the unfinished result of an asynchronous function."""
    return isinstance(value, Awaitable)
