"""Any command as an agent: `--harness "COMMAND {base_url} {api_key} {task}"` starts it for every episode.

    with Harnesses(...) as harnesses:
        played = harnesses.play(tasks, addresses)

It takes the place of a `Playground`: an episode is one run of the command in a folder of its own, in which rewards
look at what it left. What it said to the policy is not seen here: the server records it under the session inside the
API key.
"""

import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from hybrid_engine.rlhf.environments.child import ChildLimits, Ended, can_cut_network, run_child
from hybrid_engine.rlhf.environments.playing import DONE, FAILED, SECONDS, Limits, Played, Task
from hybrid_engine.rlhf.options.reinforcement import AgentConfig
from hybrid_engine.rlhf.rewards.scores import Answers, Reward
from hybrid_engine.rlhf.runs.run_log import say

HARNESS = "harness"
"""The name of its episodes' environment."""
FILES, TESTS, FOLDERS, OUTPUTS, TRAJECTORIES = "files", "tests", "folders", "outputs", "trajectories"
"""Columns: the files that a folder begins with, those of the tests, and what rewards get of an episode."""
PLACEHOLDERS = ("base_url", "address", "api_key", "model", "task", "folder", "python")
KEPT_VARIABLES = ("PATH", "LANG")
HOME = ".home"
"""The folder of a harness's own files, below its folder."""
TEST_LIMITS = ChildLimits(60.0, memory_bytes=2**31, file_bytes=2**26, has_network=False)
LAST_CHARACTERS = 300
"""Characters of the output that an error shows."""


class Address(NamedTuple):
    """The policy for one episode."""

    base_url: str
    """With `/v1`, as OpenAI's clients take it."""
    api_key: str
    """With the episode's session inside."""
    model: str


class NoEnvironment:
    """An `Environment` in name only, whose tasks are texts: the command plays."""

    tools: list[dict[str, Any]] = []  # noqa: RUF012
    reward_name = None
    longest_reply = None
    reply_role = "user"
    instance = None

    def accepted(self, arguments: Mapping[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
        """All `arguments`."""
        return dict(arguments)


@dataclass(frozen=True)
class HarnessRun:
    """One run of the command; rewards get its folder and its output."""

    folder: Path
    ended: Ended


class Harnesses:
    """The runs of a command.

    Args:
        command: with PLACEHOLDERS in braces; no shell reads it.
        variables: names of this process's environment, or NAME=VALUE with placeholders.
        limits: of each episode.
        num_concurrent: commands at a time.
    """

    def __init__(self, command: str, variables: Sequence[str], limits: Limits, num_concurrent: int):
        self.command, self.variables, self.limits = command, variables, limits
        self._num_concurrent, self._stopping = num_concurrent, threading.Event()
        self._root = Path(tempfile.mkdtemp(prefix="hybrid-engine-harness-"))

    def __enter__(self) -> "Harnesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes all folders."""
        shutil.rmtree(self._root, ignore_errors=True)

    def release(self) -> None:
        """Removes the folders of episodes that were scored."""
        for folder in self._root.iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    def play(self, tasks: Sequence[Task], addresses: Sequence[Address]) -> list[Played]:
        """An episode for each task, in the order of the tasks; their folders are there until `release`."""
        assert len(tasks) == len(addresses), f"{len(tasks)=} {len(addresses)=}"
        pool = ThreadPoolExecutor(self._num_concurrent)
        try:
            return list(pool.map(self._play_one, tasks, addresses))
        except BaseException:
            self._stopping.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _play_one(self, task: Task, address: Address) -> Played:
        folder = Path(tempfile.mkdtemp(dir=self._root))
        try:
            write_files(folder, task.columns.get(FILES) or {})
            (folder / HOME).mkdir()
            values = placeholder_values(address, task, folder)
            argv = [filled(word, values) for word in shlex.split(self.command)]
            limits = ChildLimits(self.limits.seconds)
            ended = run_child(argv, folder, self._environment(folder, values), limits, self._stopping)
        except (OSError, ValueError) as error:
            return _played(task, FAILED, f"{HARNESS}: {error}")
        run = HarnessRun(folder, ended)
        if ended.status:
            shown = ended.output[-LAST_CHARACTERS:].strip()
            return _played(task, FAILED, f"{HARNESS}: it ended with status {ended.status}: {shown}", run)
        return _played(task, SECONDS if ended.status is None else DONE, run=run)

    def _environment(self, folder: Path, values: Mapping[str, str]) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        given = {}
        for variable in self.variables:
            name, equals, value = variable.partition("=")
            if equals:
                given[name] = filled(value, values)
            elif name in os.environ:
                given[name] = os.environ[name]
        return kept | {"HOME": str(folder / HOME)} | given


def _played(task: Task, reason: str, error: str | None = None, run: HarnessRun | None = None) -> Played:
    trace = "" if run is None or error is None else run.ended.output
    messages = list(task.messages)
    return Played(environment=HARNESS, messages=messages, finish_reason=reason, error=error, trace=trace, instance=run)


def placeholder_values(address: Address, task: Task, folder: Path) -> dict[str, str]:
    """The values of PLACEHOLDERS."""
    text = "\n\n".join(str(message["content"]) for message in task.messages)
    url = address.base_url
    return {
        "base_url": url,
        "address": url.removesuffix("/v1"),
        "api_key": address.api_key,
        "model": address.model,
        "task": text,
        "folder": str(folder),
        "python": sys.executable,
    }


def filled(word: str, values: Mapping[str, str]) -> str:
    """`word` with the values of its placeholders; other braces stay."""
    parts = []
    while word:
        begin = min((place for name in values if (place := word.find(f"{{{name}}}")) >= 0), default=len(word))
        parts.append(word[:begin])
        name = word[begin + 1 :].partition("}")[0]
        parts.append(values.get(name, "") if begin < len(word) else "")
        word = word[begin + len(name) + 2 :]
    return "".join(parts)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes texts below a folder; ValueError for a name that leads out of it."""
    if not isinstance(files, Mapping):
        raise ValueError(f"the column has a {type(files).__name__}; it must map names of files to their texts")
    for name, text in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()) or path == folder.resolve():
            raise ValueError(f"the file {name!r} is outside the folder of the episode; give a relative name")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def tests_reward(command: str) -> Reward:
    """A reward of 1 for a folder in which `command` succeeds, in a child with TEST_LIMITS, otherwise 0.

    The files of the column `tests` are written first, over what the agent made of them.
    """

    def judge(answers: Answers) -> list[float]:
        tests = answers.columns.get(TESTS, [None] * len(answers))
        return [
            run_tests(command, folder, files or {})
            for folder, files in zip(answers.columns[FOLDERS], tests, strict=True)
        ]

    return Reward(spec=f"--harness-tests={command}", name=TESTS, weight=1.0, judge=judge)


def run_tests(command: str, folder: Path, files: Mapping[str, str]) -> float:
    """1 if `command` succeeds in a copy of `folder` to which `files` were added, otherwise 0."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "tests"
        shutil.copytree(folder, place, symlinks=True, ignore=shutil.ignore_patterns(HOME))
        for file in files:
            if (place / file).is_symlink():
                (place / file).unlink()
        write_files(place, files)
        kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        argv = [filled(word, {"python": sys.executable}) for word in shlex.split(command)]
        return float(run_child(argv, place, kept | {"HOME": name}, TEST_LIMITS).status == 0)


def check_harness(config: AgentConfig) -> None:
    """Says what the system cannot isolate; ValueError for a command that cannot be started."""
    for option, command in (("harness", config.harness), ("harness_tests", config.harness_tests)):
        program = filled(shlex.split(command or "")[0], {"python": sys.executable}) if command else None
        if program is not None and shutil.which(program) is None:
            raise ValueError(
                f"--{option.replace('_', '-')}={command!r}: {program!r} is not a program that can be started; fix it"
            )
    if config.harness_tests and not can_cut_network():
        say("--harness-tests: this system does not let a child run without a network, so the tests have one")
    if not sys.platform.startswith("linux"):
        say("--harness: processes that leave the command's group are not found on this system")
