"""Trainings that save often, killed by SIGKILL at random moments and started again until they end.

    python -m tests.tools.attack.kills [--kills 300]

What was reported as saved must be there when the run is started again, and every loss and the last weights must be,
to the bit, those of a run that was never killed. Half of the kills are aimed at a save under way. The processes are
forked from one that has imported everything, which spares each the seconds of an import.
"""

import argparse
import hashlib
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hybrid_engine
from tests.support.distributed import free_port
from tests.support.training_reference import VOCABULARY, tiny_llama, whole_weights

NUM_STEPS = 10
PATIENCE = 120
"""Seconds after which a run that says nothing counts as hanging."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training to kill."""

    num_processes: int = 1
    stage: int = 0
    save_every: int = 1
    tag: str | None = None
    """One tag for every checkpoint, which each save then replaces; None: one for each step."""
    config: dict[str, Any] = field(default_factory=dict)


JOBS = {
    "one process, every step": Job(),
    "one process, bf16, one tag replaced": Job(tag="last", config={"bf16": {"enabled": True}}),
    "one process, fp16, every other step": Job(save_every=2, config={"fp16": {"enabled": True}}),
    "two processes, stage 1": Job(num_processes=2, stage=1),
    "two processes, stage 3, one tag replaced": Job(num_processes=2, stage=3, tag="last"),
}


@dataclass
class Outcome:
    """What the kills of a job came to."""

    num_kills: int = 0
    num_in_save: int = 0
    num_runs: int = 0
    """Runs from the first start to the end, each killed several times."""
    lost: list[str] = field(default_factory=list)
    """Saved according to the run, and not there afterwards."""
    different: list[str] = field(default_factory=list)
    """Losses or weights that are not those of the run that was left alone."""
    errors: list[str] = field(default_factory=list)
    """Runs that ended with an error of their own, or hung."""

    @property
    def num_failures(self) -> int:
        return len(self.lost) + len(self.different) + len(self.errors)


def train(job: Job, folder: Path, report: Callable[[str], None]) -> None:
    """Goes on from the latest checkpoint, if there is one, to the end, and reports every event in a line."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": job.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    engine, *_ = hybrid_engine.initialize(model=tiny_llama(dropout=0.1), config=config | job.config)
    if (folder / "latest").exists():
        engine.load_checkpoint(folder)
        report(f"resumed {engine.global_steps}")
    engine.train()
    while engine.global_steps < NUM_STEPS:
        tokens = torch.randint(VOCABULARY, (2, 12))  # from the generator that a checkpoint holds
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        step = engine.global_steps
        report(f"loss {step} {loss.item().hex()}")
        if step % job.save_every == 0:
            report(f"saving {step}")
            engine.save_checkpoint(folder, job.tag)
            report(f"saved {step}")
    weights = whole_weights(engine)
    report(f"weights {hashlib.sha256(b''.join(w.float().numpy().tobytes() for w in weights.values())).hexdigest()}")


class Attempt:
    """The processes of one start of a job, and what rank 0 reported."""

    def __init__(self, job: Job, folder: Path):
        self.lines: list[str] = []
        self.log = folder.with_suffix(".log")
        self._rest = ""
        port = free_port()
        self._reader, writer = os.pipe()
        self.pids = [self._fork(job, folder, rank, port, writer) for rank in range(job.num_processes)]
        os.close(writer)

    def _fork(self, job: Job, folder: Path, rank: int, port: int, writer: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if job.num_processes > 1:
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.num_processes, "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")

            def report(line: str) -> None:
                if rank == 0:
                    os.write(writer, f"{line}\n".encode())

            train(job, folder, report)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def read(self, timeout: float) -> bool:
        """Waits for lines for `timeout` seconds; False once the run has ended."""
        if not select.select([self._reader], [], [], timeout)[0]:
            return True
        text = os.read(self._reader, 65536).decode()
        *lines, self._rest = (self._rest + text).split("\n")
        self.lines += lines
        return bool(text)

    def kill(self, order: list[int]) -> list[int]:
        """Kills what still runs, in that order; returns the exit codes, negative for signals."""
        while self.read(0) and select.select([self._reader], [], [], 0)[0]:
            pass
        for index in order:
            os.kill(self.pids[index], signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        while self.read(0):  # what was on its way
            pass
        os.close(self._reader)
        return codes

    def values(self, word: str) -> list[str]:
        """What followed `word` in the lines that begin with it."""
        return [line.removeprefix(f"{word} ") for line in self.lines if line.startswith(f"{word} ")]


def run_to_end(attempt: Attempt) -> list[int]:
    """Lets a run end, or kills it where it hangs; the exit codes of its processes."""
    num_lines = -1
    while attempt.read(PATIENCE):
        if len(attempt.lines) == num_lines:
            return attempt.kill(list(range(len(attempt.pids))))
        num_lines = len(attempt.lines)
    return attempt.kill([])


class Killer:
    """Kills runs of one job and checks what they leave."""

    def __init__(self, job: Job, seed: int):
        self.job, self.random = job, random.Random(seed)
        self.outcome = Outcome()
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            attempt = Attempt(job, Path(folder) / "run")
            codes = run_to_end(attempt)
            self.seconds = time.monotonic() - start
            assert not any(codes), attempt.log.read_text()
        self.expected_losses, self.expected_weights = attempt.values("loss"), attempt.values("weights")

    def run_once(self, max_kills: int) -> None:
        """One run from the start to the end, killed at most `max_kills` times."""
        self.outcome.num_runs += 1
        num_saved = 0
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "run"
            for _ in range(max_kills):
                attempt = Attempt(self.job, folder)
                was_killed = self._kill_somewhere(attempt)
                if not self._check(attempt, folder, num_saved) or not was_killed:
                    return
                num_saved = max([num_saved, *map(int, attempt.values("saved"))])
            attempt = Attempt(self.job, folder)
            self._end(attempt, run_to_end(attempt))
            self._check(attempt, folder, num_saved)

    def _kill_somewhere(self, attempt: Attempt) -> bool:
        """Whether the run was killed before its end."""
        is_aimed = self.random.random() < 0.5
        end = time.monotonic() + self.random.uniform(0, self.seconds)
        wanted = self.random.randrange(1, NUM_STEPS // self.job.save_every // 2 + 1)
        while len(attempt.values("saving")) < wanted if is_aimed else time.monotonic() < end:
            timeout = PATIENCE if is_aimed else max(0.0, end - time.monotonic())
            if not attempt.read(timeout):
                self._end(attempt, attempt.kill([]))
                return False
        if is_aimed:
            time.sleep(self.random.uniform(0, self.seconds / NUM_STEPS))
        order = self.random.sample(range(self.job.num_processes), self.job.num_processes)
        codes = attempt.kill(order)
        if any(code > 0 for code in codes):
            self.outcome.errors.append(attempt.log.read_text()[-2000:])
        self.outcome.num_kills += 1
        self.outcome.num_in_save += len(attempt.values("saving")) > len(attempt.values("saved"))
        return True

    def _end(self, attempt: Attempt, codes: list[int]) -> None:
        if any(codes):
            self.outcome.errors.append(attempt.log.read_text()[-2000:])
        elif attempt.values("weights") != self.expected_weights:
            self.outcome.different.append("the last weights")

    def _check(self, attempt: Attempt, folder: Path, num_saved: int) -> bool:
        """Compares what an attempt reported with what was saved before it, and with the run that was left alone."""
        failures = self.outcome.num_failures
        resumed = [int(step) for step in attempt.values("resumed")]
        losses = attempt.values("loss")
        if losses and num_saved > (resumed or [0])[0]:
            self.outcome.lost.append(f"step {num_saved} was saved, {resumed or 'nothing'} was found")
        expected = {loss.split()[0]: loss for loss in self.expected_losses}
        self.outcome.different += [loss for loss in losses if expected[loss.split()[0]] != loss]
        return self.outcome.num_failures == failures


def attack(job: Job, num_kills: int, seed: int = 0, kills_per_run: int = 6) -> Outcome:
    """Kills runs of `job` `num_kills` times in all."""
    killer = Killer(job, seed)
    while killer.outcome.num_kills < num_kills and not killer.outcome.num_failures:
        killer.run_once(min(kills_per_run, num_kills - killer.outcome.num_kills))
    return killer.outcome


def attack_all(num_kills: int) -> dict[str, Outcome]:
    """All jobs, three in four kills at those of one process, which are quicker to start."""
    alone = [name for name, job in JOBS.items() if job.num_processes == 1]
    shares = {name: 0.75 / len(alone) if name in alone else 0.25 / (len(JOBS) - len(alone)) for name in JOBS}
    outcomes = {}
    for number, (name, share) in enumerate(shares.items()):
        outcomes[name] = outcome = attack(JOBS[name], -(-int(num_kills * share * 100) // 100), seed=number)
        print(f"{name}: {outcome}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    torch.set_num_threads(1)
    return int(any(outcome.num_failures for outcome in attack_all(parser.parse_args().kills).values()))


if __name__ == "__main__":
    sys.exit(main())
