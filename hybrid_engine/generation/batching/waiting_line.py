"""The line of waiting sequences, fair between clients; the scheduler starts the first one. Plain Python.

Each sequence names a share (`Sequence.share`), the key that its request came with. Within a share, sequences start in
order of arrival. Between shares, the one with the fewest running rows goes first, and of several with equally few the
one that was first least recently. With one share, this is a queue.

Example: share a has 64 sequences in line and 2 running; share b enters with one sequence and none running. b goes
first.
"""

from collections import Counter, deque
from collections.abc import Iterator

from hybrid_engine.generation.batching.blocks import KeptBlocks
from hybrid_engine.generation.request.core import Sequence


class WaitingLine:
    """The line of waiting sequences.

    Args:
        kept: knows the sequence of whose tokens some have been fed, which stays first.
    """

    def __init__(self, kept: KeptBlocks):
        self._kept = kept
        self._lines: dict[str, deque[Sequence]] = {}  # by share, none empty; least recently served first
        self.num_running: Counter[str] = Counter()
        """Number of running rows of each share."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Sequence]:
        """Yields all sequences in the order in which they would start if no running sequence ended."""
        if len(self._lines) == 1:
            yield from next(iter(self._lines.values()))
            return
        coming = WaitingLine(self._kept)
        coming._lines = {share: line.copy() for share, line in self._lines.items()}
        coming.num_running = self.num_running.copy()
        while coming:
            yield coming.start_first()

    @property
    def first(self) -> Sequence:
        """The sequence that starts next."""
        begun = self._kept.begun
        if begun is not None and len(self._lines) > 1:
            line = self._lines.get(begun.sequence.share)
            if line and line[0] is begun.sequence:
                return begun.sequence
        return self._lines[self._first_share][0]

    @property
    def _first_share(self) -> str:
        return min(self._lines, key=self.num_running.__getitem__)

    @property
    def largest_share(self) -> str:
        """The share with the most running rows."""
        return max(self.num_running, key=self.num_running.__getitem__)

    @property
    def num_shares(self) -> int:
        """Number of shares with waiting or running sequences."""
        return len(self._lines.keys() | {share for share, count in self.num_running.items() if count})

    def append(self, sequence: Sequence) -> None:
        """Appends a sequence to its share's line."""
        self._lines.setdefault(sequence.share, deque()).append(sequence)

    def append_first(self, sequence: Sequence) -> None:
        """Puts a sequence at the head of its share's line."""
        self._lines.setdefault(sequence.share, deque()).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from its share's line."""
        self._lines[sequence.share].remove(sequence)
        self._drop_if_empty(sequence.share)

    def start_first(self) -> Sequence:
        """Removes the first sequence, which counts as running until `leave`."""
        sequence = self.first
        line = self._lines.pop(sequence.share)
        line.popleft()
        if line:
            self._lines[sequence.share] = line  # after the other shares
        self.num_running[sequence.share] += 1
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """Stops counting a sequence as running."""
        self.num_running[sequence.share] -= 1
        if not self.num_running[sequence.share]:
            del self.num_running[sequence.share]

    def _drop_if_empty(self, share: str) -> None:
        if not self._lines[share]:
            del self._lines[share]
