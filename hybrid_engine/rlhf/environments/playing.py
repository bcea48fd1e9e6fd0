"""Plays episodes: the conversation of the policy with one environment, many at a time, each within its limits.

    with Playground(kinds, limits, num_concurrent) as playground:
        played = playground.play(tasks, policies)

Every instance of an environment has a thread of its own, on which it is built and called, and takes one episode after
the other. An instance that hangs is left behind with its thread; the episode ends. An error of the policy's server is
raised; an error of the environment ends its episode alone, and is counted.
"""

import asyncio
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # another class before Python 3.11
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from hybrid_engine.rlhf.data.rows import Message
from hybrid_engine.rlhf.environments.contract import Environment, is_awaitable, with_observation

Result = TypeVar("Result")
DONE, TURNS, TOKENS, SECONDS, FAILED = "done", "turns", "tokens", "seconds", "failed"
REASONS = (DONE, TURNS, TOKENS, SECONDS, FAILED)
"""Why episodes end: the policy or the environment ended it, one of three limits, an error of the environment."""
CLOSE_SECONDS = 10.0
"""Time for one environment to close."""
TOO_LONG = "context_length_exceeded"
"""The server's code for a conversation that leaves no room for an answer."""


class Kind(NamedTuple):
    """One environment of a run."""

    name: str
    """As in the column `environment` of the data."""
    spec: str
    """As given to `--environment`."""
    build: Callable[[], Environment]


class Task(NamedTuple):
    """The beginning of an episode."""

    environment: str
    """The name of its kind."""
    messages: list[Message]
    arguments: Mapping[str, Any]
    """Arguments of the environment's `reset`."""
    columns: Mapping[str, Any]
    """Values that rewards may read by name."""


class Limits(NamedTuple):
    """Limits of one episode."""

    turns: int
    """Answers of the policy."""
    seconds: float
    """Time from its beginning until its last call of the environment, without its reward."""
    reward_seconds: float
    """Time for `get_reward`."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """The outcome of one episode."""

    environment: str
    messages: list[Message]
    """The whole conversation."""
    finish_reason: str
    """One of REASONS."""
    num_turns: int = 0
    """Answers of the policy."""
    num_cut_off: int = 0
    """Answers that reached the limit of tokens of an answer."""
    is_cut_off: bool = False
    """Whether the last of them did."""
    reward: float | None = None
    """The environment's own reward; None if it has none, or gave none."""
    reward_name: str | None = None
    error: str | None = None
    """The environment's error; the episode is not learned from."""
    trace: str = ""
    """The traceback of the error."""
    instance: Any = field(default=None, compare=False)
    """The user's object, while the playground holds it."""


class PolicyAnswer(NamedTuple):
    """One answer of the policy."""

    message: Message
    is_cut_off: bool


class OutOfRoom(Exception):
    """The conversation leaves no room for another answer."""


@dataclass(frozen=True, kw_only=True)
class PolicyClient:
    """The policy under its address, for one episode."""

    client: Any
    """An `openai.OpenAI`."""
    session_id: str
    seed: int
    """Answer number n of the episode, from 1, is drawn with `seed` + n."""
    sampling: Mapping[str, Any]
    """Arguments of every request, with `extra_body`."""

    def ask(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], turn: int) -> PolicyAnswer:
        """The answer to a conversation; OutOfRoom if there is no room for one."""
        body = self.sampling.get("extra_body", {}) | {"session_id": self.session_id}
        offered = {"tools": list(tools)} if tools else {}
        request = {**self.sampling, **offered, "extra_body": body, "seed": self.seed + turn}
        try:
            choice = self.client.chat.completions.create(messages=list(messages), **request).choices[0]
        except Exception as error:  # openai's classes need not be installed to import this
            if getattr(error, "code", None) == TOO_LONG:
                raise OutOfRoom from error
            raise
        calls = [call.model_dump() for call in getattr(choice.message, "tool_calls", None) or []]
        message: Message = {"role": "assistant", "content": choice.message.content or ""}
        return PolicyAnswer(message | ({"tool_calls": calls} if calls else {}), choice.finish_reason == "length")


class Hung(Exception):
    """An environment did not return in time."""


class Loop:
    """An event loop on a thread of its own, for asynchronous environments: their connections belong to one loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def wait(self, value: Any) -> Any:
        """`value`, or its result if it is awaitable; called on any thread but the loop's."""
        if not is_awaitable(value):
            return value

        async def finish() -> Any:
            return await value

        return asyncio.run_coroutine_threadsafe(finish(), self._started()).result()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environments' loop", daemon=True).start()
            return self._loop

    def close(self) -> None:
        """Stops the loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class Instance:
    """An environment on a thread of its own; objects such as a database's connection may belong to one thread."""

    def __init__(self, kind: Kind):
        self.kind = kind
        self.environment: Environment | None = None
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=f"environment {kind.name}", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # also sys.exit() of the user's code
                future.set_exception(error)

    def call(self, function: Callable[[], Result], seconds: float) -> Result:
        """The result of `function` on the environment's thread, or its error; Hung after `seconds`."""
        future: Future[Result] = Future()
        self._calls.put((future, function))
        try:
            return future.result(max(seconds, 0.0))
        except FutureTimeout:
            if future.done():
                raise
            raise Hung(f"it did not return within {seconds:.3g} s") from None

    def build(self, seconds: float) -> Environment:
        """The environment, built on its thread when it is first needed."""
        if self.environment is None:
            self.environment = self.call(self.kind.build, seconds)
        return self.environment

    def close(self) -> None:
        """Closes the environment and ends its thread; errors, and one that hangs, are left behind."""
        if self.environment is not None:
            try:
                self.call(self.environment.close, CLOSE_SECONDS)
            except Hung:
                pass
            except (Exception, SystemExit):  # nothing that is still needed
                traceback.print_exc()
        self._calls.put(None)


class Playground:
    """The instances of a run's environments, and their episodes.

    Args:
        kinds: of the environments.
        limits: of each episode.
        num_concurrent: episodes at a time, each with an instance of its own.
    """

    def __init__(self, kinds: Sequence[Kind], limits: Limits, num_concurrent: int, loop: Loop):
        self.kinds = {kind.name: kind for kind in kinds}
        self.limits, self._num_concurrent, self.loop = limits, num_concurrent, loop
        self._idle: dict[str, list[Instance]] = defaultdict(list)
        self._held: list[Instance] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Playground":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all instances."""
        self.release()
        for instance in (instance for idle in self._idle.values() for instance in idle):
            instance.close()
        self._idle.clear()
        self.loop.close()

    @property
    def num_instances(self) -> int:
        """Number of instances that wait for an episode or are held."""
        return sum(map(len, self._idle.values())) + len(self._held)

    def take(self, name: str) -> Instance:
        """An idle instance of a kind, or a new one whose environment is not built yet."""
        with self._lock:
            return self._idle[name].pop() if self._idle[name] else Instance(self.kinds[name])

    def give_back(self, instance: Instance) -> None:
        """Makes an instance free for another episode."""
        with self._lock:
            self._idle[instance.kind.name].append(instance)

    def release(self) -> None:
        """Makes the instances that `play` has held free."""
        held, self._held = self._held, []
        for instance in held:
            self.give_back(instance)

    def play(self, tasks: Sequence[Task], policies: Sequence[PolicyClient], *, holds: bool = False) -> list[Played]:
        """An episode for each task with its policy, in the order of the tasks.

        With `holds`, the instances take no other episode until `release`, so that rewards can look at them.

        Raises:
            Exception: the first error of the policy's server.
        """
        assert len(tasks) == len(policies), f"{len(tasks)=} {len(policies)=}"
        with ThreadPoolExecutor(self._num_concurrent) as pool:
            return list(pool.map(partial(self._play_one, holds=holds), tasks, policies))

    def _play_one(self, task: Task, policy: PolicyClient, *, holds: bool) -> Played:
        instance = self.take(task.environment)
        episode = RunningEpisode(instance, task, policy, self.limits)
        try:
            played = episode.play()
        except BaseException:
            instance.close()
            raise
        if played.error is not None:
            threading.Thread(target=instance.close, daemon=True).start()  # may take as long as it has hung
        elif holds:
            with self._lock:
                self._held.append(instance)
        else:
            self.give_back(instance)
        return played


class RunningEpisode:
    """One episode while it is played."""

    def __init__(self, instance: Instance, task: Task, policy: PolicyClient, limits: Limits):
        self._instance, self._task, self._policy, self._limits = instance, task, policy, limits
        self._deadline = time.monotonic() + limits.seconds
        self.messages = list(task.messages)
        self._answers: list[PolicyAnswer] = []
        self._doing = "building it"

    def play(self) -> Played:
        """Plays the episode to its end."""
        try:
            environment = self._within(lambda: self._instance.build(self._left))
            reason = self._converse(environment)
            return self._outcome(reason, reward=self._reward_of(environment), reward_name=environment.reward_name)
        except Fault as fault:
            cause = fault.__cause__
            shown = f"{type(cause).__name__}: {cause}" if not isinstance(cause, Hung) else str(cause)
            trace = "".join(traceback.format_exception(cause))
            reason = SECONDS if isinstance(cause, Hung) else FAILED
            return self._outcome(reason, error=f"{self._task.environment}: {fault}: {shown}", trace=trace)

    def _converse(self, environment: Environment) -> str:
        """Plays until the episode is over; returns why."""
        self._doing = "reset()"
        arguments = self._task.arguments
        observation = self._within(lambda: self._instance.call(lambda: environment.reset(arguments), self._left))
        self.messages = with_observation(self.messages, observation)
        while len(self._answers) < self._limits.turns:
            if self._left <= 0:
                return SECONDS
            try:
                answer = self._policy.ask(self.messages, environment.tools, len(self._answers) + 1)
            except OutOfRoom:
                return TOKENS
            self._answers.append(answer)
            self.messages.append(answer.message)
            self._doing = f"the reply to answer {len(self._answers)}"
            respond = partial(environment.respond, answer.message)
            reply = self._within(lambda: self._instance.call(respond, self._left))  # noqa: B023
            if reply is None:
                return DONE
            self.messages += reply
        return TURNS

    def _reward_of(self, environment: Environment) -> float | None:
        if environment.reward_name is None:
            return None
        self._doing = "get_reward()"
        return self._within(lambda: self._instance.call(environment.get_reward, self._limits.reward_seconds))

    @property
    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _within(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except (Exception, SystemExit) as error:
            raise Fault(self._doing) from error

    def _outcome(self, reason: str, **more: Any) -> Played:
        return Played(
            environment=self._task.environment,
            messages=self.messages,
            finish_reason=reason,
            num_turns=len(self._answers),
            num_cut_off=sum(answer.is_cut_off for answer in self._answers),
            is_cut_off=bool(self._answers) and self._answers[-1].is_cut_off,
            instance=getattr(self._instance.environment, "instance", None),
            **more,
        )


class Fault(Exception):
    """An environment's error or its silence, which is the cause; the message says at what."""
