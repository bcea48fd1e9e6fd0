"""Peak memory of runs of the recipes, as it was planned and as it was measured at their end.

    python benchmarks/bench_run_memory.py    # the demo's jobs, shorter, and others; half an hour on two cores
    python benchmarks/bench_run_memory.py --only kto

Each run is the command that a user gives, on one process or by torchrun on two, and both figures are those that it
leaves in its `result.json`: planned for the lengths that answers had, and the most bytes of tensors at once.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import common

from hybrid_engine.rlhf.experience.start import SUMMARIES

PACKED = "--tokens-per-micro-batch 2048"
SAMPLED = "--model {demo}/sft --dataset {prompts} --reward length:target=60 --steps 2 --eval-prompts 16 --eval-every 0"
GROUPED = f"{SAMPLED} --rollout-size 8 --group-size 8 --minibatch-size 64"
PREFERRED = "--model {demo}/sft --eval-prompts 16 --eval-rows 32 --eval-every 0"
SHARDED = "--zero-stage 3"


class Job(NamedTuple):
    """A command on so many processes."""

    processes: int
    command: str


JOBS = [
    Job(1, f"sft --max-examples 640 --epochs 1 {PACKED} --out {{demo}}"),
    Job(1, f"reward --max-pairs 640 {PACKED} --out {{demo}}"),
    Job(1, f"ppo --steps 3 --eval-prompts 16 {PACKED} --out {{demo}}"),
    Job(1, f"dpo {PREFERRED} --max-pairs 320"),
    Job(1, f"dpo {PREFERRED} --max-pairs 320 --lora-rank 8"),
    Job(1, f"kto {PREFERRED} --max-answers 640"),
    Job(2, f"sft --max-examples 640 --epochs 1 {SHARDED}"),
    Job(2, f"reward --model {{demo}}/sft --max-pairs 640 {SHARDED}"),
    Job(2, f"ppo {SAMPLED} {SHARDED}"),
    Job(2, f"ppo {SAMPLED} {PACKED} {SHARDED}"),
    Job(2, f"ppo {SAMPLED} --lora-rank 8 --shared-base {SHARDED}"),
    Job(2, f"grpo {GROUPED} {SHARDED}"),
    Job(2, f"grpo {GROUPED} {PACKED} {SHARDED}"),
    Job(2, f"grpo {GROUPED} --lora-rank 8 {SHARDED}"),
    Job(2, f"grpo {GROUPED} --preset rloo {SHARDED}"),
    Job(2, f"online-dpo {SAMPLED} --rollout-size 64 {SHARDED}"),
    Job(2, f"dpo {PREFERRED} --max-pairs 320 {SHARDED}"),
    Job(2, f"dpo {PREFERRED} --max-pairs 320 --lora-rank 8 {SHARDED}"),
    Job(2, f"kto {PREFERRED} --max-answers 640 {SHARDED}"),
    Job(2, f"kto {PREFERRED} --max-answers 640 {PACKED} {SHARDED}"),
]
"""The first two leave the models that others begin with."""


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Runs the command; the `memory` of its result."""
    recipe = job.command.split()[0]
    command = job.command.format(demo=folder / "demo", prompts=folder / "prompts.jsonl").split()
    out = folder / "demo"
    if "--out" not in command:
        out = Path(tempfile.mkdtemp(dir=folder))
        command += ["--out", str(out)]
    module = ["-m", "hybrid_engine.cli.cli", *command]
    if job.processes > 1:
        module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.processes}", *module]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *module], capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(f"{job.command}: {result.stdout[-1500:]}{result.stderr[-3000:]}")
    log = f"{recipe}-log" if recipe in ("sft", "reward") else "."
    return json.loads((out / log / "result.json").read_text())["memory"]


def main() -> None:
    parser = common.run_options(__doc__)
    parser.add_argument("--only", nargs="+", help="words that a job's command must have one of, behind the first two")
    options = common.parse_run(parser, "run_memory")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [json.dumps({"prompt": row.prompt}) for row in itertools.chain(*SUMMARIES.load_rows(0))]
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        for number, job in enumerate(JOBS[:2] if options.small else JOBS):
            if number > 1 and options.only and not any(word in job.command.split() for word in options.only):
                continue
            memory = run(job, folder)
            planned, measured = memory["planned_for_lengths_bytes"] or memory["planned_bytes"], memory["measured_bytes"]
            row = {"run": job.command.format(demo="demo", prompts="prompts"), "processes": job.processes}
            row |= {
                "planned_mib": round(planned / 2**20, 1),
                "measured_mib": round(measured / 2**20, 1),
                "ratio": round(planned / measured, 3),
                "longest_answers_mib": round(memory["planned_bytes"] / 2**20, 1),
            }
            print(*row.values(), memory, sep="  ", flush=True)
            common.append_rows(options.csv, [row | common.environment("cpu")])


if __name__ == "__main__":
    main()
