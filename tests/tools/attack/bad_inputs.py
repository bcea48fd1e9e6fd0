"""Several hundred calls with bad input, each of which must end in a clear error before any work.

    python -m tests.tools.attack.bad_inputs [--kind config] [--all]

An answer is

    clear    a ValueError, TypeError or OSError (of a command: exit status 2 and one line on stderr) of at most
             `LONGEST` characters in which every word stands that the call expects: the name of the option or argument
             and its value, as Python writes it; and of the engine and its files nothing was changed
    unclear  another error, or one without these words, or after something was changed
    silent   no error
    crash    the process died, ended, or did not answer within `PATIENCE` seconds
"""

import argparse
import os
import select
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LONGEST = 1500
PATIENCE = 60
VERDICTS = ("clear", "unclear", "silent", "crash")


@dataclass(frozen=True)
class Call:
    """A call with bad input."""

    kind: str
    name: str
    """What is bad, for people."""
    run: Callable[[], Any]
    words: tuple[str, ...]
    """What the error must say."""
    state: Callable[[], Any] = lambda: None
    """What must be the same before and after."""


@dataclass(frozen=True)
class Answer:
    """What came of a call."""

    kind: str
    name: str
    verdict: str
    text: str


def judge(call: Call) -> Answer:
    """Makes the call in this process."""
    verdict, text = "silent", ""
    before = call.state()
    try:
        call.run()
    except (ValueError, TypeError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        missing = [word for word in call.words if word not in text]
        verdict = "unclear" if missing or len(text) > LONGEST or not _is_on_purpose(error) else "clear"
        text += f" [misses {missing}]" if missing else ""
    except SystemExit as error:
        text = f"SystemExit: {error}"
        verdict = "unclear"
    except Exception as error:
        verdict, text = "unclear", f"{type(error).__name__}: {error}"
    if verdict == "clear" and call.state() != before:
        verdict, text = "unclear", f"{text} [something was changed]"
    return Answer(call.kind, call.name, verdict, text.replace("\n", " ")[: LONGEST + 200])


def _is_on_purpose(error: BaseException) -> bool:
    """Whether the error was raised by a `raise` of Python code, and not by an operation that failed by accident."""
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line or ""
    return "raise" in line or isinstance(error, TypeError | OSError)


def ask_all(calls: list[Call]) -> Iterator[Answer]:
    """Every call's answer; they are made in a child process, a new one after each that takes it down."""
    first = 0
    while first < len(calls):
        for answer in _ask_from(calls, first):
            first += 1
            yield answer


def _ask_from(calls: list[Call], first: int) -> Iterator[Answer]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(calls[first:], reader, writer)
    os.close(writer)
    number, rest = first, b""
    try:
        while number < len(calls):
            part = os.read(reader, 65536) if select.select([reader], [], [], PATIENCE)[0] else b""
            if not part:
                os.kill(pid, signal.SIGKILL)
                call = calls[number]
                yield Answer(call.kind, call.name, "crash", "the process died or did not answer")
                return
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                yield Answer(calls[number].kind, calls[number].name, *line.decode().split("\t", 1))
                number += 1
    finally:
        os.close(reader)
        os.waitpid(pid, 0)


def _answer(calls: list[Call], reader: int, writer: int) -> None:
    """The child's life: one line for each call."""
    try:
        os.close(reader)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        for call in calls:
            answer = judge(call)
            os.write(writer, f"{answer.verdict}\t{answer.text}\n".encode(errors="replace"))
    finally:
        os._exit(0)


def count(answers: list[Answer]) -> dict[str, Counter[str]]:
    """How many answers of each verdict, by kind."""
    counts: dict[str, Counter[str]] = {}
    for answer in answers:
        counts.setdefault(answer.kind, Counter())[answer.verdict] += 1
    return counts


def build_calls() -> list[Call]:
    """The whole table."""
    from .bad_calls import build_argument_calls
    from .bad_commands import build_command_calls
    from .bad_config import build_config_calls
    from .bad_files import build_file_calls

    return [*build_config_calls(), *build_argument_calls(), *build_command_calls(), *build_file_calls()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", help="only calls of this kind")
    parser.add_argument("--all", action="store_true", help="show the clear answers too")
    options = parser.parse_args()
    calls = [call for call in build_calls() if options.kind in (None, call.kind)]
    answers = []
    for answer in ask_all(calls):
        answers.append(answer)
        if options.all or answer.verdict != "clear":
            print(f"{answer.verdict}\t{answer.kind}: {answer.name}\t{answer.text}", flush=True)
    for kind, counts in count(answers).items():
        print(f"{kind}: {', '.join(f'{counts[verdict]} {verdict}' for verdict in VERDICTS)}")
    return int(any(answer.verdict != "clear" for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
