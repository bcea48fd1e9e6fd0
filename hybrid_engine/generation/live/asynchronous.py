"""Live batches in threads of their own: `LiveThread` for servers, and over it asynchronous rollouts.

`LiveThread` owns the model and runs a live batch turn by turn. Other threads only leave notes for it. Between two
turns it reads them: sequences that join, canceled ones, and whether to end. After each turn it passes the progress to
the listener.

`AsyncRollout` yields groups of answers as they finish, and ends rollouts before all have finished: partial rollouts.
While the caller uses a finished group, the thread continues to decode the others. The caller leaves when it has
enough; unfinished answers keep their tokens and continue in the next rollout, under the weights of that time. Every
token is stamped with the version of the weights that drew it, and its log-probability is that of those weights, as an
importance ratio requires. `generate_until` does the same without a thread, and ends at a turn that no clock decides.
Source: Kimi Team, "Kimi k1.5", arXiv 2501.12599, section 2.6.2 (partial rollouts).
"""

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import partial
from types import TracebackType
from typing import Any

from hybrid_engine.containers.device import give_back_openmp_pool
from hybrid_engine.generation.core import GenerateCall, Prompt, Sequence
from hybrid_engine.generation.live.batches import KVUsage, LiveBatch, Progress
from hybrid_engine.generation.live.opening import live_batch
from hybrid_engine.generation.memory import MAX_RUNNING
from hybrid_engine.generation.options import NO_RULES, GenerationOptions
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.generation.rollout.preparing import prepare

NOT_FINITE = "generate_async(): the model's logits are not finite; check the weights for NaN or inf"
Listener = Callable[[list[Progress]], None]
"""Called on the worker's thread with the progress of a turn."""


@dataclass(frozen=True)
class Answer:
    """One answer; all lists have the length T."""

    tokens: list[int]
    """Token ids, including the end-of-sequence token."""
    logprobs: list[float]
    """Log-probability of each token under the weights that drew it, as in `GenerateOutput`."""
    versions: list[int]
    """Version of the weights that drew each token."""
    finish_reason: str
    """"stop" or "length"."""


@dataclass(frozen=True)
class Group:
    """All answers to one prompt."""

    index: int
    """Index of the prompt, counted from the first prompt of the first rollout in the chain."""
    prompt_ids: list[int]
    answers: list[Answer]
    """Answers in the order of their samples."""


@dataclass
class _Open:
    """An unfinished group."""

    index: int
    sequences: list[Sequence]
    versions: dict[Sequence, list[int]] = field(default_factory=dict)
    num_left: int = 0

    def note(self, progress: Progress, version: int) -> bool:
        """Records the progress of one of its answers by weights of `version`; returns whether it was the last one."""
        self.versions[progress.sequence] += [version] * len(progress.tokens)
        self.num_left -= progress.finish_reason is not None
        return progress.finish_reason is not None and self.num_left == 0


@dataclass(frozen=True)
class Carried:
    """Unfinished answers of a rollout, for the next one."""

    groups: list[_Open]
    num_prompts: int
    """Number of prompts of all rollouts so far."""

    @property
    def num_unfinished(self) -> int:
        """Number of answers that have not ended."""
        return sum(group.num_left for group in self.groups)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with its answer; 0 if nothing is left."""
        return max((s.most_fed + 1 for group in self.groups for s in group.sequences), default=0)

    def counts(self) -> Counter[str]:
        """Numbers of answers that have ended, and of tokens, by the names of `latency_stats()`."""
        sequences = [sequence for group in self.groups for sequence in group.sequences]
        num_ended = sum(sequence.finish_reason is not None for sequence in sequences)
        num_tokens = sum(len(sequence.tokens) for sequence in sequences)
        return Counter({"num_samples": num_ended, "generated_tokens": num_tokens})

    @property
    def whole(self) -> list[int]:
        """Indices of the groups all of whose answers have ended."""
        return [group.index for group in self.groups if group.num_left == 0]

    def take(self, indices: Collection[int]) -> "tuple[list[Group], Carried]":
        """The whole groups `indices`, in that order, and the others."""
        by_index = {group.index: group for group in self.groups}
        taken = [_closed(by_index[index]) for index in indices]
        left = [group for group in self.groups if group.index not in set(indices)]
        return taken, Carried(left, self.num_prompts)

    def state(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts from which `restored` makes an equal object."""
        return {"groups": [_state_of(group) for group in self.groups], "num_prompts": self.num_prompts}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Carried":
        """The object whose `state` was saved; its answers continue as they would have."""
        return cls([_restored_group(group) for group in state["groups"]], state["num_prompts"])


class AsyncRollout:
    """Iterates over groups in the order in which they finish; a context manager whose exit stops the unfinished ones.

    `carried` is set at the exit.

    Args:
        opening: opens the live batch.
        sequences: `num_samples` consecutive sequences for each prompt.
        num_samples: number of answers to each prompt.
        version: version of the weights.
        earlier: unfinished answers of the previous rollout; they go first.
    """

    def __init__(
        self,
        opening: Callable[[], AbstractContextManager[LiveBatch]],
        sequences: list[Sequence],
        num_samples: int,
        version: int,
        earlier: Carried | None = None,
    ):
        self.version = version
        groups, self._num_prompts = _open_groups(sequences, num_samples, earlier)
        self._open = {group.index: group for group in groups}
        self._group_of = {sequence: group for group in groups for sequence in group.sequences}
        self._complete = deque(group for group in groups if group.num_left == 0)  # not yielded yet
        self._progress: queue.SimpleQueue[list[Progress]] = queue.SimpleQueue()
        waiting = [s for group in groups for s in group.sequences if s.finish_reason is None]
        self._thread = LiveThread(opening, self._progress.put, max_waiting=max(1, len(waiting)))
        self._waiting = waiting
        self.carried: Carried | None = None

    def __enter__(self) -> "AsyncRollout":
        self._thread.start()
        if self._waiting:
            self._thread.submit(self._waiting)
        return self

    def __iter__(self) -> Iterator[Group]:
        while self._open:
            if not self._complete:
                self._take(self._progress.get())
                continue
            group = self._complete.popleft()
            del self._open[group.index]
            yield _closed(group)

    def _take(self, progress: list[Progress]) -> None:
        """Records the progress of a turn."""
        for told in progress:
            if told.finish_reason == "error":
                raise RuntimeError(NOT_FINITE) from (told.sequence.error or self._thread.error)
            group = self._group_of[told.sequence]
            if group.note(told, self.version):
                self._complete.append(group)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._thread.stop()
            while not self._progress.empty():
                self._take(self._progress.get())
        except Exception:
            if kind is None:
                raise
        for group in self._open.values():
            _detach(group)
        self.carried = Carried(list(self._open.values()), self._num_prompts)


def _closed(group: _Open) -> Group:
    answers = [
        Answer(list(s.tokens), list(s.logprobs), list(group.versions[s]), str(s.finish_reason)) for s in group.sequences
    ]
    return Group(group.index, list(group.sequences[0].prompt.tokens), answers)


SAVED = ("row", "key", "tokens", "logprobs", "finish_reason")
"""Fields of a sequence that `Carried.state` has."""


def _state_of(group: _Open) -> dict[str, Any]:
    options = group.sequences[0].options
    assert options.rules == NO_RULES, "rules hold tokenizers and functions"
    named = {option.name: getattr(options, option.name) for option in fields(options) if option.name != "rules"}
    return {
        "index": group.index,
        "prompt": group.sequences[0].prompt.tokens,
        "options": named | {"eos_token_ids": list(options.eos_token_ids)},
        "answers": [
            {name: getattr(sequence, name) for name in SAVED} | {"versions": group.versions[sequence]}
            for sequence in group.sequences
        ],
    }


def _restored_group(state: Mapping[str, Any]) -> _Open:
    options = GenerationOptions(**{**state["options"], "eos_token_ids": tuple(state["options"]["eos_token_ids"])})
    prompt, versions = Prompt(state["prompt"]), {}
    for answer in state["answers"]:
        saved = {name: answer[name] for name in SAVED}
        versions[Sequence(prompt, options=options, **saved)] = answer["versions"]
    num_left = sum(sequence.finish_reason is None for sequence in versions)
    return _Open(state["index"], list(versions), versions, num_left)


def _detach(group: _Open) -> None:
    """Detaches the sequences from the workspace that they used."""
    prompt = group.sequences[0].prompt.with_own_blocks()
    for sequence in group.sequences:
        sequence.prompt, sequence.blocks, sequence.slot = prompt, [], -1


def start_async(generator: Generator, call: GenerateCall, earlier: Carried | None, version: int) -> AsyncRollout:
    """Returns a rollout that starts when it is entered; all checks of the input are made here. Collective.

    Raises:
        ValueError: on all processes, if the input is invalid; if the model's own `generate()` would run and cannot
            answer row by row; for scores that an Answer does not hold; and if processes share the model, because each
            leaves when it has enough, and all must take the same turns.
    """
    if generator.group.size > 1:
        raise ValueError(
            f"generate_async(): {generator.group.size} processes share the model and must take every turn together, "
            f"but each may leave this rollout early; call generate(), or set {generator.group.remedy}"
        )
    sequences, num_samples = _read(generator, call, earlier)
    opening = partial(live_batch, generator, _longest(sequences, earlier), caller="generate_async()")
    return AsyncRollout(opening, sequences, num_samples, version, earlier)


def generate_until(
    generator: Generator,
    call: GenerateCall,
    earlier: Carried | None,
    version: int,
    is_enough: Callable[[Collection[int]], bool],
) -> Carried:
    """Takes turns until `is_enough` of the indices of whole groups is true, or all are whole; collective.

    Returns all groups, whole or not. The turn at which it ends depends on the answers alone, not on any clock. Raises
    as `start_async`; RuntimeError if logits are not finite.
    """
    sequences, num_samples = _read(generator, call, earlier)
    groups, num_prompts = _open_groups(sequences, num_samples, earlier)
    group_of = {sequence: group for group in groups for sequence in group.sequences}
    carried = Carried(groups, num_prompts)

    def take(progress: list[Progress]) -> None:
        for told in progress:
            if told.finish_reason == "error":
                raise RuntimeError(NOT_FINITE) from told.sequence.error
            group_of[told.sequence].note(told, version)

    waiting = [s for group in groups for s in group.sequences if s.finish_reason is None]
    most = generator.config.max_running or MAX_RUNNING.get(generator.device.type, 256)
    rows = max(1, min(most, len(waiting)))  # for which the KV workspace is sized
    with live_batch(generator, _longest(sequences, earlier), rows, caller="generate_async()") as batch:
        batch.add(waiting)
        while batch.has_work and not is_enough(carried.whole):
            take(batch.turn())
        take(batch.take_out())
    for group in groups:
        _detach(group)
    return carried


def _read(generator: Generator, call: GenerateCall, earlier: Carried | None) -> tuple[list[Sequence], int]:
    """The checked sequences of the new prompts, and the number for each prompt."""
    if call.input_ids is None and earlier is not None:
        return [], 1
    request = prepare(generator, call)
    sequences = request.sequences if request.plan is None else request.plan.sequences
    if request.plan is None and not request.local.is_drawn:
        raise ValueError(
            f"generate_async(): {request.local.fallback}, and the model's own generate() returns all rows at "
            "the end; leave it out, or call generate()"
        )
    _check_scores(sequences)
    return sequences, request.local.options.num_return_sequences


def _open_groups(sequences: list[Sequence], num_samples: int, earlier: Carried | None) -> tuple[list[_Open], int]:
    """The earlier groups and those of the new sequences, and the number of prompts so far."""
    first = 0 if earlier is None else earlier.num_prompts
    groups = [] if earlier is None else list(earlier.groups)
    for place in range(0, len(sequences), num_samples):
        own = sequences[place : place + num_samples]
        groups.append(_Open(first + place // num_samples, own, {sequence: [] for sequence in own}, num_samples))
    return groups, first + len(sequences) // num_samples


def _longest(sequences: list[Sequence], earlier: Carried | None) -> int:
    return max([2, *(s.most_fed + 1 for s in sequences), 0 if earlier is None else earlier.longest])


def _check_scores(sequences: list[Sequence]) -> None:
    for rules in (sequence.options.rules for sequence in sequences):
        for name, is_wanted in (
            ("top_logprobs", rules.top_logprobs > 0),
            ("prompt_logprobs", rules.prompt_logprobs is not None),
            ("record_supports", rules.record_supports),
            ("record_routing", rules.record_routing),
        ):
            if is_wanted:
                raise ValueError(
                    f"generate_async(): {name} is not part of its groups of answers; leave it out, or call "
                    "generate() with return_dict_in_generate=True"
                )


class TooManyWaitError(Exception):
    """The maximum number of sequences already waits to start."""


class EndedError(Exception):
    """The batch has ended, or is about to."""


@dataclass
class _Notes:
    """Requests of other threads, read between two turns."""

    joining: list[Sequence] = field(default_factory=list)
    leaving: list[Sequence] = field(default_factory=list)
    is_closing: bool = False
    is_stopping: bool = False
    is_dropping: bool = False


class LiveThread:
    """Runs a LiveBatch in a thread of its own, from `start()` to `close()`.

    Args:
        opening: opens the batch; entered and left on the worker's thread.
        listener: called with every turn's progress; must not block.
        max_waiting: number of sequences that may wait to start, in addition to running ones.
    """

    def __init__(self, opening: Callable[[], AbstractContextManager[LiveBatch]], listener: Listener, max_waiting: int):
        self._opening, self._listener, self.max_waiting = opening, listener, max_waiting
        self._notes, self._changed = _Notes(), threading.Condition()
        self._joining: list[Sequence] = []  # sequences that the batch is adding
        self._opened = threading.Event()
        self._waiting: Counter[str] = Counter()  # number of sequences not started, by share
        self._shares: set[str] = set()  # all shares seen so far
        self._thread = threading.Thread(target=self._run, name="hybrid-engine-live", daemon=True)
        self.batch: LiveBatch | None = None
        self.error: BaseException | None = None
        self.has_ended = False
        """Whether turns are no longer reported."""

    def start(self) -> None:
        """Opens the batch; raises the error of opening it."""
        give_back_openmp_pool()
        self._thread.start()
        self._opened.wait()
        if self.error is not None:
            self._thread.join()
            raise self.error

    def submit(self, sequences: list[Sequence]) -> None:
        """Queues `sequences`, which form one request of one share.

        Raises:
            TooManyWaitError: no sequence was queued; some waiting ones have to start first. If others fill the line, a
                share may still have its part of it.
            EndedError: the batch has ended, or is about to.
        """
        with self._changed:
            if self._notes.is_closing or self.error is not None:
                raise EndedError
            if not sequences:
                return
            share = sequences[0].share
            if self._waiting and not self._has_room(share, len(sequences)):
                raise TooManyWaitError
            self._shares.add(share)
            self._notes.joining += sequences
            self._waiting[share] += len(sequences)
            self._changed.notify()

    def _has_room(self, share: str, count: int) -> bool:
        if self.num_waiting + count <= self.max_waiting:
            return True
        part = self.max_waiting // len(self._waiting.keys() | {share})
        return self._waiting[share] + count <= part

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes sequences that are no longer wanted; a finished one is not changed."""
        with self._changed:
            self._notes.leaving += sequences
            self._changed.notify()

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started."""
        return self._waiting.total()

    @property
    def num_running(self) -> int:
        """Number of sequences in the batch that decode now."""
        return 0 if self.batch is None else self.batch.num_running

    @property
    def kv_blocks(self) -> KVUsage:
        """Use of the blocks of the batch's KV workspace."""
        return KVUsage(0, 0, 0) if self.batch is None else self.batch.kv_blocks

    def stop(self) -> None:
        """Ends at once; unfinished sequences keep their tokens, and may join another batch.

        Raises the error that ended the thread, if any.
        """
        with self._changed:
            self._notes.is_stopping = self._notes.is_closing = True
            self._changed.notify()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def drop(self) -> None:
        """Reports at once that nothing more comes, and ends after this turn; `close()` waits for the end."""
        with self._changed:
            self._notes.is_dropping = True
            self._changed.notify()
        self._tell_of_the_end()

    def close(self) -> None:
        """Waits for all queued sequences, then releases what the batch holds.

        Raises the error that ended the thread, if any.
        """
        with self._changed:
            self._notes.is_closing = True
            self._changed.notify()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with self._opening() as self.batch:
                self._opened.set()
                self._serve(self.batch)
        except BaseException as error:
            self.error = error
        finally:
            self._opened.set()
            self._tell_of_the_end()

    def _serve(self, batch: LiveBatch) -> None:
        seconds, stayed = batch.seconds_between_stays, time.monotonic()
        while True:
            with self._changed:
                while not (self._has_notes or batch.has_work):
                    if not self._changed.wait(seconds):
                        break
                notes, self._notes = self._notes, _Notes(is_closing=self._notes.is_closing)
                self._joining = notes.joining
            if seconds is not None and time.monotonic() - stayed >= seconds:
                batch.stay()
                stayed = time.monotonic()
            if notes.is_dropping:
                return
            batch.add(notes.joining)
            self._joining = []
            if notes.is_stopping:
                self._listener(batch.take_out())
                return
            if notes.is_closing and not batch.has_work:
                return
            batch.cancel(notes.leaving)
            progress = batch.turn() if batch.has_work else []
            self._waiting = self._count_waiting(batch)
            if progress:
                self._listener(progress)

    def _count_waiting(self, batch: LiveBatch) -> Counter[str]:
        """Counts sequences that have not started, or start again, by share; no count is zero."""
        joining = Counter(sequence.share for sequence in self._notes.joining)
        if len(self._shares) > 1:
            return joining + Counter(sequence.share for sequence in batch.unfinished if sequence.slot < 0)
        return +Counter(dict.fromkeys(self._shares, batch.num_waiting + joining.total()))

    @property
    def _has_notes(self) -> bool:
        return bool(self._notes.joining or self._notes.leaving or self._notes.is_closing)

    def _tell_of_the_end(self) -> None:
        """Reports an error for every unfinished sequence."""
        with self._changed:
            self._notes.is_closing = self.has_ended = True
            left = self._joining + self._notes.joining
        if self.batch is not None:
            left += [sequence for sequence in self.batch.unfinished if sequence not in left]
        if left:
            self._listener([Progress(sequence, [], [], "error") for sequence in left])
