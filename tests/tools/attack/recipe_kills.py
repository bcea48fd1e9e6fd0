"""Runs of every recipe, stopped by SIGKILL, SIGTERM or SIGINT at random moments and resumed until they end.

    python -m tests.tools.attack.recipe_kills [--stops 10] [--cases dpo kto "ppo, two processes"]

On two processes SIGKILL meets one of them, upon which the other gets SIGTERM, as from torchrun; SIGTERM and SIGINT meet
both. Whatever a run leaves must then be, to the bit, what a run leaves that was never stopped: figures, answers,
results and the weights of the last and of the best model; nothing but that, and what `--restart` moved aside of a run
that was stopped before its first checkpoint. The processes are forked from one that has imported everything.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_engine.checkpoint.saving import LOCK_FILE
from hybrid_engine.cli import cli
from hybrid_engine.recipes import dpo, grpo, kto, online_dpo, ppo, reward, sft
from hybrid_engine.rlhf.reports import is_time
from hybrid_engine.rlhf.runs.run_folder import checkpoints_of, has_checkpoint, left_behind, read_metrics, results_of
from tests.support.chat import MARKED_TEMPLATE, build_chat_tokenizer
from tests.support.distributed import free_port

PATIENCE = 300
"""Seconds after which a run counts as hanging."""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
IMPORTED = (dpo, grpo, kto, online_dpo, ppo, reward, sft)
"""Before the first fork; engines import the rest when they are made."""
SAMPLED = "--reward length:target=3 --steps 4 --rollout-size 4 --micro-batch-size 2 --max-new-tokens 4 --eval-prompts 2"
PREFERRED = "--batch-size 4 --micro-batch-size 2 --max-new-tokens 4 --eval-prompts 2 --eval-rows 4"
SHARDED = "--zero-stage 3"


class Case(NamedTuple):
    """A run of four steps with a checkpoint and an evaluation after each."""

    recipe: str
    options: str
    processes: int = 1


OPTIONS = {
    "grpo": f"{SAMPLED} --group-size 2 --minibatch-size 4 --eval-samples 1 --dynamic-sampling 1 "
    "--kl-place loss --kl-coef 0.1 --kl-estimator k3 --kl-target 0.1",
    "online-dpo": f"{SAMPLED} --group-size 2 --minibatch-size 4",
    "ppo": f"{SAMPLED} --minibatch-size 4 --ppo-epochs 1",
    "dpo": f"{PREFERRED} --max-pairs 16 --lora-rank 2",
    "kto": f"{PREFERRED} --max-answers 16",
    "sft": "--batch-size 4 --max-examples 16 --epochs 1",
    "reward": "--batch-size 4 --max-pairs 16",
}
CASES = {recipe: Case(recipe, options) for recipe, options in OPTIONS.items()}
CASES |= {
    "ppo, two processes": Case("ppo", f"{OPTIONS['ppo']} {SHARDED}", 2),
    "grpo, two processes": Case("grpo", f"{OPTIONS['grpo']} {SHARDED}", 2),
    "ppo on one base, two processes": Case("ppo", f"{OPTIONS['ppo']} {SHARDED} --lora-rank 2 --shared-base", 2),
}


def write_sources(folder: Path) -> None:
    """A tiny model with a chat template, and data that serves every recipe."""
    tokenizer = build_chat_tokenizer(MARKED_TEMPLATE)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")

    def turn(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    rows = [
        {"prompt": turn("user", f"{n}?"), "chosen": turn("assistant", "yes"), "rejected": turn("assistant", f"no {n}")}
        for n in range(48)
    ]
    write_lines(folder / "pairs.jsonl", rows)
    write_lines(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
    write_lines(folder / "chats.jsonl", [{"messages": [*row["prompt"], *row["chosen"]]} for row in rows])


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass
class Outcome:
    """What the stops of a case came to."""

    num_stops: int = 0
    num_runs: int = 0
    """From the first start to the end."""
    failures: list[str] = field(default_factory=list)


class Stopper:
    """Stops runs of one case and compares what they leave."""

    def __init__(self, name: str, sources: Path, folder: Path, seed: int):
        recipe, options, processes = CASES[name]
        data = "pairs" if recipe in ("dpo", "kto", "reward") else "chats" if recipe == "sft" else "prompts"
        self.name, self.processes = name, processes
        self.recipe, self.folder, self.random, self.outcome = recipe, folder, random.Random(seed), Outcome()
        self.arguments = [
            *(recipe, "--model", str(sources / "model"), "--dataset", str(sources / f"{data}.jsonl")),
            *("--save-every", "1", "--eval-every", "1", "--seed", "3", *options.split()),
        ]
        started = time.monotonic()
        process = self._start(folder / "whole")
        code = process.wait(PATIENCE)
        assert code == 0, f"status {code}, None: it hung; {process.said()}"
        self.seconds = time.monotonic() - started
        """Of a whole run; stops lie within it."""
        self.expected = left_by(recipe, folder / "whole")

    def run_once(self, max_stops: int) -> None:
        """One run to its end, stopped at most `max_stops` times."""
        self.outcome.num_runs += 1
        out = self.folder / f"run-{self.outcome.num_runs}"
        for _ in range(max_stops):
            started = time.monotonic()
            process = self._start(out)
            code = process.wait(self.random.uniform(0, self.seconds))
            if code == 0:  # a machine that others use too was busier when the first run was timed
                self.seconds = min(self.seconds, time.monotonic() - started)
            if code is None:
                self.outcome.num_stops += 1
                code = process.stop(self.random.choice(SIGNALS))
            if code == 0:
                break
            if code not in (-signal.SIGKILL, -signal.SIGTERM, 130):
                self._fail(f"status {code}: {process.said()}")
                return
        else:
            process = self._start(out)
            code = process.wait(PATIENCE)
            if code is None:
                process.stop(signal.SIGKILL)
            if code != 0:
                self._fail(f"status {code}: {process.said()}")
                return
        left = left_by(self.recipe, out)
        names = sorted(name for name in self.expected | left if self.expected.get(name) != left.get(name))
        if names:
            self._fail(f"not as in a run that was never stopped: {', '.join(names)}")

    def _fail(self, failure: str) -> None:
        self.outcome.failures.append(f"{self.name}: {failure}")

    def _start(self, out: Path) -> "Process | Processes":
        """The command as somebody would give it who sees what is in the folder."""
        going_on = []
        if has_checkpoint(out, self.recipe):
            going_on = ["--resume"]
        elif left_behind(out, results_of(self.recipe)):
            going_on = ["--restart"]
        action = partial(cli.main, [*self.arguments, "--out", str(out), *going_on])
        if self.processes == 1:
            return Process(action, out.with_suffix(".log"))
        return Processes(action, out, self.processes, self.random)


class Process:
    """A fork that runs the command."""

    def __init__(self, action: Callable[[], int], log: Path):
        self.log = log
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return
        status = 1
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            status = 130  # of a command that is interrupted before it begins
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            status = 1
            status = action()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def wait(self, seconds: float) -> int | None:
        """Its exit status, negative for a signal; None if it still runs after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            time.sleep(0.005)

    def stop(self, number: int) -> int:
        """Sends the signal; the exit status, also of a run that had just ended."""
        os.kill(self.pid, number)
        code = self.wait(PATIENCE)
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return 1
        return code

    def said(self) -> str:
        """The end of what it printed."""
        return self.log.read_text()[-2000:]


class Processes:
    """Forks that run the command together, in torchrun's environment."""

    def __init__(self, action: Callable[[], int], out: Path, number: int, chance: random.Random):
        self.random, port = chance, free_port()
        self.members = [
            Process(partial(_as_rank, rank, number, port, action), out.with_suffix(f".{rank}.log"))
            for rank in range(number)
        ]
        self.codes: dict[int, int] = {}

    def wait(self, seconds: float) -> int | None:
        """0, or the status of one that failed; None if any still runs after `seconds`."""
        end = time.monotonic() + seconds
        for member in self.members:
            if member.pid not in self.codes:
                code = member.wait(max(0, end - time.monotonic()))
                if code is None:
                    return None
                self.codes[member.pid] = code
        return next((code for code in self.codes.values() if code), 0)

    def stop(self, number: int) -> int:
        """Stops them as torchrun would: the status of one that was met, 0 of a run that had just ended, 1 of one that
        stays."""
        running = [member for member in self.members if member.pid not in self.codes]
        met = [self.random.choice(running)] if number == signal.SIGKILL else running
        for member in met:
            os.kill(member.pid, number)
        if number == signal.SIGKILL:
            time.sleep(self.random.choice((0, 0.1)))
            for member in running:
                os.kill(member.pid, signal.SIGTERM)
        if self.wait(PATIENCE) is None:
            for member in running:
                if member.pid not in self.codes:
                    os.kill(member.pid, signal.SIGKILL)
                    member.wait(PATIENCE)
            return 1
        # Of the others some end by the error that the connection is lost.
        expected = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}[number]
        return expected if any(self.codes.values()) else 0

    def said(self) -> str:
        """The ends of what they printed."""
        return "\n".join(member.said() for member in self.members)


def _as_rank(rank: int, number: int, port: int, action: Callable[[], int]) -> int:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return action()


def left_by(recipe: str, out: Path) -> dict[str, Any]:
    """By its name everything that a run left below its folder, checkpoints and what was moved aside left out."""
    left: dict[str, Any] = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = str(path.relative_to(out))
        if path.name == LOCK_FILE:
            continue
        if name.startswith(("previous-", checkpoints_of(recipe), f".{checkpoints_of(recipe)}")):
            continue
        if path.name == "metrics.jsonl":
            lines = read_metrics(path)
            left[name] = [{figure: line[figure] for figure in line if not is_time(figure)} for line in lines]
        elif path.name == "result.json":
            result = json.loads(path.read_text())
            of_a_process = [figure for figure in result if figure.endswith("seconds") or figure == "memory"]
            left[name] = {figure: result[figure] for figure in result if figure not in of_a_process}
        elif path.suffix in (".png", ".md") or path.name == "config.yaml":
            left[name] = None  # with times, or the name of the folder, in them
        else:
            left[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return left


def attack(case: str, num_stops: int, seed: int = 0, stops_per_run: int = 4) -> Outcome:
    """Stops runs of a case `num_stops` times in all."""
    with tempfile.TemporaryDirectory() as name:
        write_sources(Path(name))
        stopper = Stopper(case, Path(name), Path(name), seed)
        while stopper.outcome.num_stops < num_stops and not stopper.outcome.failures:
            stopper.run_once(min(stops_per_run, num_stops - stopper.outcome.num_stops))
        return stopper.outcome


def attack_all(num_stops: int, cases: Sequence[str] = tuple(CASES)) -> dict[str, Outcome]:
    """Every case `num_stops` times."""
    outcomes = {}
    for number, case in enumerate(cases):
        outcomes[case] = attack(case, num_stops, seed=number)
        print(f"{case}: {outcomes[case]}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=10, help="of each case")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    return int(any(outcome.failures for outcome in attack_all(given.stops, given.cases).values()))


if __name__ == "__main__":
    sys.exit(main())
