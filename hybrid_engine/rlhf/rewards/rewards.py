"""The rewards of a run: they score answers, and an error names the reward and the prompt.

    rewards.check_columns(rows)
    for row in rows:
        rewards.check_row(row)
    scores = rewards(answers)

`loading.py` builds one from the options of a recipe, which calls it on the answers of every rollout.
"""

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from typing import Any, TypeVar

from hybrid_engine.distributed.processes import gather_objects
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.rlhf.data.rows import Row
from hybrid_engine.rlhf.rewards.scores import (
    Answers,
    Judge,
    Reward,
    RewardError,
    RunView,
    Scores,
    UnreachableJudge,
    UnusableReference,
    Value,
    WrongCount,
    combine,
    read_values,
    with_logged,
)
from hybrid_engine.rlhf.runs.run_log import say

TIME_LIMIT_SECONDS = 300.0
"""For one call of one reward; other processes wait meanwhile, which gloo allows for 30 minutes."""
SHORTEST_SECONDS = 1e-3
Result = TypeVar("Result")
SECONDS_TO_NEXT_TRY = 1.0
"""Time after which a function that swallowed the interruption is interrupted again."""
SMALLEST_DELAY = 1e-3
"""Seconds; a timer of 0 would be off."""
_deadlines: list[float] = []
"""Deadlines of the limits that the main thread is in, outermost first; an inner limit must not outlast them."""


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Scores answers with all rewards of a run."""

    rewards: tuple[Reward, ...]
    time_limit_seconds: float = TIME_LIMIT_SECONDS
    view: RunView = field(default_factory=RunView, compare=False)
    """The run as reward functions see it."""
    told: set[str] = field(default_factory=set, init=False, compare=False)
    """The first prompt with an answer that no reward judged, once it was logged; the same on every process."""

    @property
    def specs(self) -> list[str]:
        """The spec of each reward."""
        return [reward.spec for reward in self.rewards]

    @property
    def weights(self) -> list[float]:
        """The weight of each reward, in the order of `Scores.by_name`."""
        return [reward.weight for reward in self.rewards]

    @property
    def task_columns(self) -> frozenset[str]:
        """The columns of the data that the rewards read by name, without reference answers."""
        read = (reward.columns - reward.references | reward.optional_columns for reward in self.rewards)
        return frozenset().union(*read)

    def begin_step(self, step: int, num_steps: int) -> None:
        """Sets the progress that reward functions see: `step` of `num_steps` are done."""
        self.view.state.global_step, self.view.state.max_steps = step, num_steps

    def check_columns(self, rows: Sequence[Row]) -> None:
        """Raises ValueError if a reward reads a column that no row has."""
        found = set().union(*(row.columns for row in rows))
        for reward in self.rewards:
            for column in sorted(reward.columns - found):
                raise ValueError(
                    f"--reward={reward.spec!r} reads the column {column!r}, but the data has "
                    f"{', '.join(map(repr, sorted(found))) or 'no other columns'}; rename a column, or name "
                    "another in the reward (docs/rewards.md)"
                )

    def check_row(self, row: Row) -> None:
        """Raises ValueError, with the place of `row`, if it lacks a reward's column or has an unreadable value."""
        for reward in self.rewards:
            check_row(reward, row)

    def __call__(self, answers: Answers) -> Scores:
        """The scores of this process's answers; collective: an error of one process is raised on all.

        To name the prompt, a function that raised an error, timed out or returned a wrong number of values is called
        again for single answers, for at most one more time limit.

        Raises:
            RewardError: a reward raised an error, which is the cause, or reached the time limit.
            ValueError: a reward returned values that are not scores, or a row has no reference answer that a rule can
                read.
        """
        together = {reward.name: reward.judge(answers) for reward in self.rewards if reward.is_collective}
        scores = agree(lambda: self._score(answers, together))
        if not self.told:
            self._tell_unjudged(answers, scores)
        return scores

    def _tell_unjudged(self, answers: Answers, scores: Scores) -> None:
        """Logs the first prompt of all processes with an answer that no reward judges; collective."""
        mine = (answers.shown_prompt(index) for index, number in enumerate(scores.total) if isnan(number))
        found = next(filter(None, gather_objects(next(mine, None))), None)
        if found is not None:
            self.told.add(found)
            say(
                f"--reward: none of {', '.join(map(repr, self.specs))} scores the answer to the prompt {found}; such "
                "answers are not learned from, and unjudged_share counts them"
            )

    def _score(self, answers: Answers, together: Mapping[str, Any]) -> Scores:
        """Scores answers; `together` has the results of collective rewards by name."""
        values: list[list[Value]] = []
        self.view.clear()
        for reward in self.rewards:
            if reward.is_collective:
                values.append(read_values(reward.spec, together[reward.name], answers))
            else:
                values.append(judge(reward, answers, self.time_limit_seconds) if len(answers) else [])
        return with_logged(combine(self.rewards, values, answers), self.view, len(answers))

    def judged_by(self, judges: Mapping[str, Judge]) -> "Rewards":
        """These rewards with collective `judges` in place of those with the same specs."""
        rewards = (
            replace(reward, judge=judges[reward.spec], is_collective=True) if reward.spec in judges else reward
            for reward in self.rewards
        )
        return replace(self, rewards=tuple(rewards))


def check_row(reward: Reward, row: Row) -> None:
    """Raises ValueError, with the place of `row`, if it lacks a column of the reward or has an unreadable value."""
    for column in sorted(reward.columns - set(row.columns)):
        raise ValueError(
            f"{row.place} has no {column!r}, which other rows have and --reward={reward.spec!r} reads; fix the row"
        )
    if reward.check is not None:
        try:
            reward.check(row.columns)
        except ValueError as error:
            raise ValueError(f"{row.place} {error}") from error


def judge(reward: Reward, answers: Answers, seconds: float) -> list[Value]:
    """The checked values of one reward; an error names the prompt that it comes from."""
    try:
        returned = within(seconds, lambda: reward.judge(answers))
    except (UnusableReference, UnreachableJudge):
        raise
    except OutOfTime as error:
        raise RewardError(
            f"--reward={reward.spec!r} did not finish within {seconds:g} s for {len(answers)} answers; "
            f"{first_failure(reward, answers, seconds)}; fix it, or raise --reward-time-limit"
        ) from error
    except Exception as error:
        raise RewardError(
            f"--reward={reward.spec!r} raised {type(error).__name__}: {error}; "
            f"{first_failure(reward, answers, seconds)}"
        ) from error
    try:
        return read_values(reward.spec, returned, answers)
    except WrongCount as error:
        raise ValueError(f"{error}; {first_failure(reward, answers, seconds)}") from error


def first_failure(reward: Reward, answers: Answers, seconds: float) -> str:
    """A description of the answer that a failing reward fails at, from calls for single answers within `seconds`."""
    if len(answers) == 1:
        return f"the prompt is {answers.shown_prompt(0)}"
    deadline = time.monotonic() + seconds
    for index in range(len(answers)):
        row = answers.choose([index])
        try:
            left = max(deadline - time.monotonic(), SHORTEST_SECONDS)
            read_values(reward.spec, within(left, partial(reward.judge, row)), row)
        except (Exception, OutOfTime) as error:
            reason = "out of time" if isinstance(error, OutOfTime) else type(error).__name__
            return f"for each answer alone it fails first ({reason}) at the prompt {answers.shown_prompt(index)}"
    return f"for each answer alone it fails at none; the first prompt is {answers.shown_prompt(0)}"


class OutOfTime(BaseException):
    """The time limit is over. Not an `Exception`, so that a function that catches those does not swallow it."""


def within(seconds: float, action: Callable[[], Result]) -> Result:
    """The result of `action`, or its error.

    Raises:
        OutOfTime: it did not finish within `seconds`.
    """
    can_interrupt = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    return interrupting(seconds, action) if can_interrupt else giving_up(seconds, action)


def interrupting(seconds: float, action: Callable[[], Result]) -> Result:
    """`within` for the main thread; limits may be nested, and a timer of the user continues afterwards."""
    is_running = True

    def stop(signum: int, frame: object) -> None:
        if is_running:
            raise OutOfTime(f"it did not finish within {seconds:g} s")

    started = time.monotonic()
    seconds = min([seconds, *(deadline - started for deadline in _deadlines)])
    _deadlines.append(started + seconds)
    handler_before = signal.signal(signal.SIGALRM, stop)
    delay_before, interval_before = signal.setitimer(
        signal.ITIMER_REAL, max(seconds, SMALLEST_DELAY), SECONDS_TO_NEXT_TRY
    )
    try:
        try:
            return action()
        finally:
            is_running = False  # from here on a late signal must not prevent the restoration of timer and handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _deadlines.pop()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler_before is None else handler_before)
        if delay_before:
            rest = max(delay_before - (time.monotonic() - started), SMALLEST_DELAY)
            signal.setitimer(signal.ITIMER_REAL, rest, interval_before)


def giving_up(seconds: float, action: Callable[[], Result]) -> Result:
    """`within` for all other threads."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="time limit", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise OutOfTime(f"it did not finish within {seconds:g} s")
    return results[0]
