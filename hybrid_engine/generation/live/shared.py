"""One live batch on all processes that share its model: one process leads, the others follow its calls.

Sequences with a guide join once each process has compiled it on a thread of its own, so that no turn waits for a
compiler.
"""

import io
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from hybrid_engine.containers.device import give_back_openmp_pool
from hybrid_engine.distributed.groups import host_group
from hybrid_engine.distributed.verdict import ErrorNotice, FollowedError, LostError, attempt, describe_error
from hybrid_engine.generation.core import Prompt, Sequence
from hybrid_engine.generation.guides import CompiledGuide, compile_guide, prepare_guides
from hybrid_engine.generation.live.batches import KVUsage, LiveBatch, Progress
from hybrid_engine.generation.model.weights import ModelGroup
from hybrid_engine.generation.options import Rules

Result = TypeVar("Result")
_LEAVES, _STAYS, _FAILED = range(3)
NUM_COMPILING = 2
"""Number of guides that a process compiles at once."""
SECONDS_BETWEEN_POLLS = 0.01
"""Time that the leader waits where nothing but guides is to come."""


class LeaderCall(NamedTuple):
    """A call of the leader's batch."""

    name: str
    """"add", "cancel", "take_out", "turn", "stay", "end", or "compile" and "compiled" for guides."""
    sequences: list[Sequence]


class LiveLink:
    """One end of the link between a leader and its followers; messages arrive in the order in which they were sent.

    Args:
        group: the processes that share the model, including this one. Its collectives must not be in flight meanwhile.
    """

    def __init__(self, group: ModelGroup):
        self.leader = group.ranks[0]
        """The leader's rank among all processes."""
        self.is_leader = group.rank == 0
        self._group, self._partners, self._codec = host_group(group.process_group), group.partners, _Codec()
        self._model_group = group
        self.guides = GuidesAhead()
        """Guides of sequences that are to join."""

    def share_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Gives the followers the leader's tokenizer and reads it for guides; collective."""
        if self.is_leader:
            assert tokenizer is not None
            self.send(self._codec.encode_tokenizer(tokenizer))
        else:
            self.guides.prepare(self._codec.decode_tokenizer(self.receive()))

    def send_call(self, name: str, sequences: list[Sequence] | None = None) -> None:
        """Sends a call to the followers; waits until they have received it."""
        self.send((name, self._codec.encode(sequences or [])))

    def receive_call(self) -> LeaderCall:
        """Waits for the leader's next call and returns it."""
        name, sequences = self.receive()
        return LeaderCall(name, self._codec.decode(sequences))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Inside, the followers make the leader's calls; the exit ends them. Raises an error of one on all."""
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the error may be that the link is broken
                self.send_call("end")
            self.part(error)
            raise
        self.send_call("end")
        self.part(None)

    def making_call(self) -> AbstractContextManager[None]:
        """Wraps a call of a batch: an error in it ends the sums that the other processes wait in."""
        sums = self._model_group.sums
        return nullcontext() if sums is None else sums.ending_others()

    def part(self, error: BaseException | None) -> None:
        """Ends the link after the last call: raises `error`, this process's, or that of another one; collective."""
        if isinstance(error, LostError):
            raise error
        if self._partners.highest([int(error is not None)]) == [0]:
            return
        found = self._partners.exchange_errors(error)
        self._model_group.renew_sums(self._partners)
        raise found

    def send(self, value: Any) -> None:
        """Sends `value` to every follower; collective with their `receive`."""
        dist.broadcast_object_list([value], src=self.leader, group=self._group)

    def receive(self) -> Any:
        """Returns the value that the leader sends next; collective with its `send`."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=self.leader, group=self._group)
        return received[0]

    def led(self, action: Callable[[], Result]) -> Result | None:
        """Runs `action` on the leader and returns its result there; raises its error on all."""
        if self.is_leader:
            result, error = attempt(action)
            self.send(None if error is None else describe_error(error))
            if error is not None:
                raise error
            return result
        problem: ErrorNotice | None = self.receive()
        if problem is not None:
            raise problem.raised_on(self.leader)
        return None

    def highest(self, state: int) -> int:
        """Returns the highest state of the processes."""
        return self._partners.highest([state])[0]

    def poll_guides(self) -> set["GuideKey"]:
        """Returns the guides that all processes have compiled since the last call; collective."""
        return self.guides.take(self._partners.highest(self.guides.states()))


GuideKey = tuple[tuple[str, str] | None, int]


def _key(rules: Rules) -> GuideKey:
    """Identifies a guide on this process."""
    return rules.guide, id(rules.tokenizer)


class GuidesAhead:
    """Compiles guides on threads. Every process that shares the model makes the same calls in the same order."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_COMPILING, "hybrid-engine-guide")
        self._coming: dict[GuideKey, Future[CompiledGuide]] = {}
        self._ready: dict[GuideKey, CompiledGuide] = {}
        self._of_sequences: weakref.WeakKeyDictionary[Sequence, CompiledGuide] = weakref.WeakKeyDictionary()

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Reads the tokenizer for guides."""
        prepare_guides(tokenizer)

    def begin(self, rules: Rules) -> None:
        """Starts to compile the guide of `rules`, unless that is under way."""
        if _key(rules) not in self._coming:
            compiling = self._threads.submit(compile_guide, rules.guide, rules.tokenizer)  # type: ignore[arg-type]
            self._coming[_key(rules)] = compiling

    def states(self) -> list[int]:
        """1 for each guide that is still being compiled here, 0 for each other one that is to come."""
        return [int(not compiling.done()) for compiling in self._coming.values()]

    def take(self, states: list[int]) -> set[GuideKey]:
        """Returns the guides whose highest state of all processes is 0; they are compiled, or failed, everywhere.

        What failed fails again where it is used, which tells the client.
        """
        done = {key for key, state in zip(list(self._coming), states, strict=True) if state == 0}
        compiled = {key: self._coming.pop(key) for key in done}
        self._ready = {key: each.result() for key, each in compiled.items() if each.exception() is None}
        return done

    def hold(self, sequences: list[Sequence]) -> None:
        """Keeps the guides of `sequences`, which join after `take`, as long as the sequences exist."""
        for sequence in sequences:
            compiled = self._ready.get(_key(sequence.options.rules))
            if compiled is not None:
                self._of_sequences[sequence] = compiled

    def forget(self) -> None:
        """Drops the guides that are to come."""
        for compiling in self._coming.values():
            compiling.cancel()
        self._coming, self._ready = {}, {}

    def close(self) -> None:
        """Ends the threads."""
        self.forget()
        self._threads.shutdown(wait=False)


class _Codec:
    """Encodes sequences and tokenizers as bytes: each is sent once and is a number from then on.

    If a follower no longer has a sequence, its batch has no keys of it, and neither does the leader's.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._sequences: weakref.WeakValueDictionary[int, Sequence] = weakref.WeakValueDictionary()
        self._tokenizers: list[PreTrainedTokenizerBase] = []
        self._num_sequences = 0

    def encode_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> bytes:
        """Encodes a tokenizer that sequences will need."""
        self._tokenizers.append(tokenizer)
        return pickle.dumps(tokenizer)

    def decode_tokenizer(self, data: bytes) -> PreTrainedTokenizerBase:
        """Decodes a tokenizer on a follower."""
        self._tokenizers.append(pickle.loads(data))
        return self._tokenizers[-1]

    def encode(self, sequences: list[Sequence]) -> bytes:
        """Encodes `sequences` on the leader; their tokenizers are sent once."""
        needed = {id(s.options.rules.tokenizer): s.options.rules.tokenizer for s in sequences}
        known = {id(tokenizer) for tokenizer in self._tokenizers}
        new = [tokenizer for key, tokenizer in needed.items() if tokenizer is not None and key not in known]
        self._tokenizers += new
        places = {id(tokenizer): place for place, tokenizer in enumerate(self._tokenizers)}

        def name(value: Any) -> tuple[str, int] | None:
            if isinstance(value, Sequence):
                return ("sequence", self._numbers[value]) if value in self._numbers else None
            if isinstance(value, PreTrainedTokenizerBase):
                return ("tokenizer", places[id(value)])
            return None

        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer)
        pickler.persistent_id = name  # type: ignore[method-assign, assignment]
        pickler.dump(sequences)
        for sequence in sequences:
            if sequence not in self._numbers:
                self._numbers[sequence] = self._num_sequences
                self._num_sequences += 1
        return pickle.dumps((new, buffer.getvalue()))

    def decode(self, data: bytes) -> list[Sequence]:
        """Decodes sequences on a follower; leaves out those that it no longer has."""
        new, body = pickle.loads(data)
        self._tokenizers += new

        def find(name: tuple[str, int]) -> Any:
            kind, number = name
            return self._tokenizers[number] if kind == "tokenizer" else self._sequences.get(number)

        unpickler = pickle.Unpickler(io.BytesIO(body))
        unpickler.persistent_load = find  # type: ignore[method-assign, assignment]
        sequences = [sequence for sequence in unpickler.load() if sequence is not None]
        known = set(self._sequences.values())
        for sequence in sequences:
            if sequence not in known:
                self._sequences[self._num_sequences] = sequence
                self._num_sequences += 1
        return sequences


class LeadingBatch:
    """The batch of a leading process: the followers repeat each call of it."""

    seconds_between_stays = 0.5

    def __init__(self, batch: LiveBatch, link: LiveLink):
        self._batch, self.longest = batch, batch.longest
        self.link, self.is_needed = link, True
        """Whether a follower's caller still used this batch at the last `stay`."""
        self._guided: list[Sequence] = []  # they join once their guides are compiled everywhere

    @property
    def has_work(self) -> bool:
        """Whether a turn has a result, or a guide is to come."""
        return self._batch.has_work or bool(self._guided)

    @property
    def num_running(self) -> int:
        """Number of sequences that decode now."""
        return self._batch.num_running

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not started, or start again."""
        return self._batch.num_waiting + len(self._guided)

    @property
    def kv_blocks(self) -> KVUsage:
        """Use of the KV blocks of this process; those of the others are equal."""
        return self._batch.kv_blocks

    @property
    def unfinished(self) -> list[Sequence]:
        """All sequences for which progress is still to come."""
        return self._batch.unfinished + self._guided

    def add(self, sequences: list[Sequence]) -> None:
        """Queues `sequences` on all processes. See `LiveBatch.add`."""
        guided = [sequence for sequence in sequences if sequence.options.rules.guide is not None]
        for rules in {_key(sequence.options.rules): sequence.options for sequence in guided}.values():
            self.link.send_call("compile", [Sequence(Prompt([0]), 0, rules)])
            self.link.guides.begin(rules.rules)
        self._guided += guided
        self._join([sequence for sequence in sequences if sequence.options.rules.guide is None])

    def _join(self, sequences: list[Sequence]) -> None:
        if sequences:
            self.link.send_call("add", sequences)
            with self.link.making_call():
                self.link.guides.hold(sequences)
                self._batch.add(sequences)

    def _join_guided(self) -> None:
        """Queues the sequences whose guides have been compiled on all processes."""
        if self._guided:
            self.link.send_call("compiled")
            done = self.link.poll_guides()
            joining = [sequence for sequence in self._guided if _key(sequence.options.rules) in done]
            self._guided = [sequence for sequence in self._guided if sequence not in joining]
            self._join(joining)

    def cancel(self, sequences: list[Sequence]) -> None:
        """Removes those of `sequences` that have not finished, on all processes."""
        unfinished = set(self.unfinished) if sequences else set()
        known = [sequence for sequence in sequences if sequence in unfinished]
        for sequence in [sequence for sequence in known if sequence in self._guided]:
            self._guided.remove(sequence)
            known.remove(sequence)
            sequence.finish_reason = "cancelled"
        if known:
            self.link.send_call("cancel", known)
            self._batch.cancel(known)

    def take_out(self) -> list[Progress]:
        """Removes all sequences on all processes; returns the progress not reported yet."""
        self.link.send_call("take_out")
        self._guided = []
        self.link.guides.forget()
        with self.link.making_call():
            return self._batch.take_out()

    def turn(self) -> list[Progress]:
        """Makes one pass over the layers on all processes; returns its progress."""
        self._join_guided()
        if not self._batch.has_work:
            time.sleep(SECONDS_BETWEEN_POLLS if self._guided else 0)
            return []
        self.link.send_call("turn")
        with self.link.making_call():
            return self._batch.turn()

    def stay(self) -> None:
        """Shows the followers that the leader is alive, and asks whether they still use it."""
        self.link.send_call("stay")
        state = self.link.highest(_LEAVES)
        if state == _FAILED:
            raise FollowedError("a following process stopped with an error")
        self.is_needed = state == _STAYS


def follow(batch: LiveBatch, link: LiveLink, is_staying: Callable[[], bool]) -> None:
    """Makes the leader's calls on this process's batch until the leader ends.

    `is_staying` returns whether the caller of this process still uses the leader. After an error here no call is made
    any more, until the leader has noticed. Raises this error, or that of another process.
    """
    error: BaseException | None = None
    while True:
        call = link.receive_call()
        if call.name == "end":
            link.part(error)
            return
        if call.name == "stay":
            link.highest(_FAILED if error is not None else _STAYS if is_staying() else _LEAVES)
        elif call.name == "compile":
            link.guides.begin(call.sequences[0].options.rules)
        elif call.name == "compiled":
            link.poll_guides()
        elif error is None:
            error = attempt(lambda call=call: _make(call, batch, link))[1]  # type: ignore[misc]
            if isinstance(error, LostError):
                raise error


def _make(call: LeaderCall, batch: LiveBatch, link: LiveLink) -> None:
    with link.making_call():
        if call.name == "add":
            link.guides.hold(call.sequences)
            batch.add(call.sequences)
        elif call.name == "cancel":
            batch.cancel(call.sequences)
        elif call.name == "take_out":
            link.guides.forget()
            batch.take_out()
        else:
            assert call.name == "turn", call.name
            batch.turn()


class LiveFollower:
    """Makes the leader's calls on a batch in a thread of its own, from `start()` until the leader ends.

    Args:
        opening: opens the batch; entered and left on the thread.
    """

    def __init__(self, opening: Callable[[], AbstractContextManager[LiveBatch]], link: LiveLink):
        self._opening, self._link = opening, link
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybrid-engine-follower", daemon=True)
        self.is_staying = True
        """Whether this process still uses the leader."""
        self.error: BaseException | None = None

    def start(self) -> None:
        """Opens the batch; raises the error of opening it."""
        give_back_openmp_pool()
        self._thread.start()
        self._opened.wait()
        if self.error is not None:
            self.close()

    def close(self) -> None:
        """Waits until the leader has ended; raises the error that ended the thread, if any."""
        self.is_staying = False
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with self._opening() as batch:
                self._opened.set()
                follow(batch, self._link, lambda: self.is_staying)
        except BaseException as error:
            self.error = error
        finally:
            self._opened.set()
