"""What the processes that share a served model tell each other: one of them is asked, the others do as it does.

The first rank of those that share the model leads. It sends each call of its live batch before it makes it, and the
others make the same calls: tokens are drawn alike on all of them, so that nothing else needs to be told.

One that stops at an error inside a call ends the sums of layers that the others wait in. The leader, whose own call
fails by that, ends the calls, and then a verdict says on all what the error was.
"""

import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.host_groups import host_group
from hybrid_engine.distributed.verdict import LostError, Problem, attempt, describe_error
from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.model_group import ModelGroup

Result = TypeVar("Result")


class Call(NamedTuple):
    """A call of the leader's batch."""

    name: str
    """"add", "cancel", "take_out", "turn", "stay" or "end"."""
    sequences: list[Sequence]


class LiveLink:
    """One end of the line between a leader and those that follow it; messages arrive in the order they were sent.

    Args:
        group: the processes that share the model, this one among them. Its collectives must not be under way meanwhile.
    """

    def __init__(self, group: ModelGroup):
        self.leader = group.ranks[0]
        """Its rank among all processes."""
        self.is_leader = group.rank == 0
        self._group, self._partners, self._codec = host_group(group.process_group), group.partners, _Codec()
        self._model_group = group

    def send_call(self, name: str, sequences: list[Sequence] | None = None) -> None:
        """Tells the followers of a call; waits until they have it."""
        self.send((name, self._codec.encode(sequences or [])))

    def receive_call(self) -> Call:
        """The leader's next call; waits for it."""
        name, sequences = self.receive()
        return Call(name, self._codec.decode(sequences))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Inside, the followers make the leader's calls; they hear that it ends. An error of one is raised on all."""
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # what ended this process may be that there is no link any more
                self.send_call("end")
            self.part(error)
            raise
        self.send_call("end")
        self.part(None)

    def making_call(self) -> AbstractContextManager[None]:
        """Around a call of a batch: an error in it ends the sums that the other processes wait in."""
        sums = self._model_group.sums
        return nullcontext() if sums is None else sums.ending_others()

    def part(self, error: BaseException | None) -> None:
        """After the last call: raises `error`, this process's, or another one's; collective."""
        if isinstance(error, LostError):
            raise error
        if self._partners.highest([int(error is not None)]) == [0]:
            return
        found = self._partners.exchange_errors(error)
        self._model_group.renew_sums(self._partners)
        raise found

    def send(self, value: Any) -> None:
        """Gives `value` to every follower; collective with their `receive`."""
        dist.broadcast_object_list([value], src=self.leader, group=self._group)

    def receive(self) -> Any:
        """The value that the leader sends next; collective with its `send`."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=self.leader, group=self._group)
        return received[0]

    def led(self, action: Callable[[], Result]) -> Result | None:
        """Runs `action` on the leader, which returns its result; an error of it is raised on all."""
        if self.is_leader:
            result, error = attempt(action)
            self.send(None if error is None else describe_error(error))
            if error is not None:
                raise error
            return result
        problem: Problem | None = self.receive()
        if problem is not None:
            raise problem.raised_on(self.leader)
        return None

    def highest(self, state: int) -> int:
        """The highest state of the processes."""
        return self._partners.highest([state])[0]


class _Codec:
    """Sequences and tokenizers as bytes: each travels once and is a number from then on.

    A sequence that a follower has forgotten is one that its batch has no keys of, and the leader's has none either.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._sequences: weakref.WeakValueDictionary[int, Sequence] = weakref.WeakValueDictionary()
        self._tokenizers: list[PreTrainedTokenizerBase] = []
        self._num_sequences = 0

    def encode(self, sequences: list[Sequence]) -> bytes:
        """`sequences` as bytes, on the leader; their tokenizers are told once."""
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
        """On a follower; what it has forgotten is left out."""
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
