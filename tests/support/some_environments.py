"""Environments as users write them, for tests that name them as `tests.support.some_environments:NAME`."""

import threading
import time

from hybrid_engine.rlhf.environments.contract import BrokenEnvironment


class Notes:
    """Notes with a tool to read them; the class runs in TRL's GRPOTrainer too."""

    def __init__(self):
        self.num_read = 0

    def reset(self, **row) -> str | None:
        self.num_read = 0
        self.answer = row.get("answer")
        return " Read the notes." if row.get("hint") else None

    def read_note(self, name: str, lines: int = 1) -> str:
        """
        Reads a note.

        Args:
            name: The note's name.
            lines: How many lines to read.

        Returns:
            The text of the note.
        """
        if name != "today":
            raise KeyError(name)
        self.num_read += 1
        return "milk\n" * lines

    def get_reward(self) -> float:
        return float(self.num_read)

    def close(self):
        self.is_closed = True

    def _hidden(self):
        raise AssertionError


class Gone(Notes):
    """A tool whose server is gone."""

    def look(self) -> str:
        """Looks around."""
        raise BrokenEnvironment("no server")


class Tomorrow(Notes):
    """The same, asynchronous."""

    async def reset(self, **row):
        return [{"type": "text", "text": "hello"}]

    async def look(self) -> str:
        """Looks around."""
        return "nothing"

    async def get_reward(self) -> float:
        return 0.5


class Hangs(Notes):
    """Hangs in the tool of every other instance."""

    released = threading.Event()

    def read_note(self, name: str) -> str:
        """
        Hangs.

        Args:
            name: Ignored.
        """
        self.released.wait(20)
        return "late"


class Breaks(Notes):
    """Does not begin an odd task."""

    def reset(self, seed: int = 0, prompt: object = None, **row):
        if seed % 2:
            raise OSError("the disk is full")
        return f"{seed}"[:3]


class Silent:
    """Has no reward."""

    def reset(self, **row):
        return None


class NoReset:
    """Cannot begin."""

    def get_reward(self):
        return 0.0


class Undocumented(Notes):
    """A tool without type hints."""

    def look(self, where):
        """
        Looks.

        Args:
            where: A place.
        """


class Seedless(Silent):
    """Takes no seed."""

    def reset(self):
        return None

    def get_reward(self):
        return 1.0


class Slow(Notes):
    """Takes a while to be built."""

    def __init__(self):
        time.sleep(0.05)
        super().__init__()


class Guess:
    """A text game: the number that is looked for, in at most three guesses."""

    def reset(self, *, seed=None, options=None):
        self.number, self.left = int((options or {}).get("number", (seed or 0) % 10)), 3
        return "guess", {}

    def step(self, action):
        self.left -= 1
        is_right = action == str(self.number)
        return ("higher" if action < str(self.number) else "lower"), float(is_right), is_right, self.left == 0, {}


class Flaky(Guess):
    """The same, which fails at every odd number."""

    def step(self, action):
        if self.number % 2:
            raise ConnectionError("the server is away")
        return super().step(action)


def broken():
    """Raises when it is built."""
    raise RuntimeError("no such server")


def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: Any number.
    """
    return 2 * number


def num_read(environments, **columns):
    """A reward that looks at the environments, as TRL's may."""
    return [float(10 * environment.num_read) for environment in environments]


def same(completions, answer, **columns):
    """A reward that reads the whole conversation and a column."""
    return [float(turns[-1]["content"] == right) for turns, right in zip(completions, answer, strict=True)]
