"""Environments of other libraries, by the names that `--environment` takes; each is made of the kinds in `contract.py`.

    gymnasium:MODULE:FACTORY or ID      text games
    reasoning_gym:NAME                  questions of reasoning-gym, made from seeds and scored by it
    mcp:COMMAND or URL                  the tools of a server by the Model Context Protocol, over stdio or HTTP
    openenv:URL                         an environment that an OpenEnv server has, as a text game

The libraries are imported when they are named.
"""

import asyncio
import importlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hybrid_engine.rlhf.environments.contract import BrokenEnvironment, Environment, TextGame, ToolEnvironment, Wait
from hybrid_engine.rlhf.rewards.loading import find_function

Builder = Callable[[], Environment]
Adapter = Callable[[str, Sequence[Callable[..., Any]], str | None, Wait], Builder]
"""From what follows the colon, further tools, the pattern of actions, and a function that finishes what is
asynchronous."""


CONNECTION_CLOSED = -32000
"""The protocol's code for a server that is gone."""


def require(module: str, package: str, adapter: str) -> Any:
    """The module; ValueError, with the package to install, if there is none."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"--environment={adapter}:... needs the package {package}: pip install {package}") from error


def gymnasium(rest: str, functions: Sequence[Callable[..., Any]], pattern: str | None, wait: Wait) -> Builder:
    """A game that `module:factory` builds, or one that is registered under an id."""
    if ":" in rest:
        factory = find_function(rest, "--environment")
    else:
        factory = partial(require("gymnasium", "gymnasium", "gymnasium").make, rest)
    return lambda: TextGame(wait(factory()), pattern, wait)


class Questions:
    """Questions of one dataset of reasoning-gym as games of one action; question i is made from seed i.

    Source: reasoning-gym's README: `create_dataset(name, seed=..., size=...)`, `dataset.score_answer(answer, entry)`.
    """

    def __init__(self, name: str, options: Mapping[str, Any]):
        self._library = require("reasoning_gym", "reasoning-gym", "reasoning_gym")
        self._name, self._options = name, options

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The question of a seed."""
        self._dataset = self._library.create_dataset(self._name, **(dict(self._options) | {"seed": seed, "size": 1}))
        self._entry = self._dataset[0]
        return self._entry["question"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The score of an answer, from 0 to 1."""
        score = self._dataset.score_answer(answer=action.strip(), entry=self._entry)
        return "", float(score), True, False, {}


def reasoning_gym(rest: str, functions: Sequence[Callable[..., Any]], pattern: str | None, wait: Wait) -> Builder:
    """`NAME` or `NAME:option=value,option=value`; a value is JSON, or otherwise text."""
    name, _, given = rest.partition(":")
    options = dict(_read_pair(rest, pair) for pair in given.split(",") if pair)
    require("reasoning_gym", "reasoning-gym", "reasoning_gym")
    return lambda: TextGame(Questions(name, options), pattern, wait)


def _read_pair(rest: str, pair: str) -> tuple[str, Any]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise ValueError(f"--environment='reasoning_gym:{rest}': {pair!r} is not an option; write name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


class ToolServer:
    """A server by the Model Context Protocol; each episode gets a connection, and a local server a process, of its own.

    Source: the package `mcp` (its README, "Writing MCP Clients").
    """

    def __init__(self, address: str):
        self._library = require("mcp", "mcp", "mcp")
        self._address, self._leave, self._is_used = address, asyncio.Event(), False
        self._holder: asyncio.Task[None] | None = None

    async def open(self) -> list[Any]:
        """Connects; returns the server's tools."""
        opened: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._holder = asyncio.ensure_future(self._hold(opened))
        return await opened

    async def _hold(self, opened: "asyncio.Future[list[Any]]") -> None:
        """Keeps the connection: one task must open and close it."""
        try:
            async with self._transport() as streams, self._library.ClientSession(*streams[:2]) as session:
                await session.initialize()
                self._session = session
                opened.set_result((await session.list_tools()).tools)
                await self._leave.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    def _transport(self) -> Any:
        if self._address.startswith(("http://", "https://")):
            return importlib.import_module("mcp.client.streamable_http").streamable_http_client(self._address)
        command, *arguments = shlex.split(self._address)
        return self._library.stdio_client(self._library.StdioServerParameters(command=command, args=arguments))

    async def reset(self, **columns: Any) -> None:
        """Begins an episode: with the first connection, or a new one."""
        if self._is_used:
            await self.close()
            await self.open()
        self._is_used = True

    async def _call(self, name: str, **arguments: Any) -> str:
        try:
            result = await self._session.call_tool(name, arguments)
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", CONNECTION_CLOSED)
            if code != CONNECTION_CLOSED:
                raise  # the server answered
            raise BrokenEnvironment(f"mcp:{self._address} is gone: {error}") from error
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.isError:
            raise RuntimeError(text)
        return text

    async def close(self) -> None:
        """Disconnects; ends a local server."""
        self._leave.set()
        if self._holder is not None:
            await self._holder


def mcp(rest: str, functions: Sequence[Callable[..., Any]], pattern: str | None, wait: Wait) -> Builder:
    """A command with its arguments, or an address."""
    require("mcp", "mcp", "mcp")

    def build() -> Environment:
        server = ToolServer(rest)
        listed = wait(server.open())
        environment = ToolEnvironment(server, functions, wait, f"mcp:{rest}", methods=False)
        for tool in listed:
            schema = {"name": tool.name, "description": tool.description or "", "parameters": tool.inputSchema}
            environment.add_tool({"type": "function", "function": schema}, partial(server._call, tool.name))
        return environment

    return build


class ServedGame:
    """An environment of an OpenEnv server as a text game, by its client for any environment.

    An action is a JSON object in the policy's answer, or any text as the value of `field`. An observation is shown as
    JSON, without reward and end. The columns of the data are arguments of the server's `reset`.

    Source: the class `GenericEnvClient` of the package `openenv`.
    """

    def __init__(self, url: str, field: str):
        client = require("openenv.core.generic_client", "openenv", "openenv").GenericEnvClient(base_url=url)
        self._client, self._field = client.sync(), field

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins an episode."""
        arguments = {name: value for name, value in (options or {}).items() if name != "prompt"}
        return _shown(self._client.reset(**arguments).observation), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes an action."""
        try:
            sent = json.loads(action)
        except ValueError:
            sent = None
        result = self._client.step(sent if isinstance(sent, dict) else {self._field: action})
        return _shown(result.observation), float(result.reward or 0.0), bool(result.done), False, {}

    def close(self) -> None:
        """Disconnects."""
        self._client.close()


def _shown(observation: Any) -> str:
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)


def openenv(rest: str, functions: Sequence[Callable[..., Any]], pattern: str | None, wait: Wait) -> Builder:
    """`URL`, or `URL#field` with the field of an action that an answer's text becomes; default: message."""
    url, _, field = rest.partition("#")
    require("openenv", "openenv", "openenv")
    return lambda: TextGame(ServedGame(url, field or "message"), pattern, wait)


ADAPTERS: dict[str, Adapter] = {
    "gymnasium": gymnasium,
    "reasoning_gym": reasoning_gym,
    "mcp": mcp,
    "openenv": openenv,
}
"""Adapters by the word before the colon."""
