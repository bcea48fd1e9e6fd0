"""The tutorial's job on the real model, with three seeds, and a shorter one beside TRL: gain, time and memory.

    python benchmarks/real_run.py --list
    python benchmarks/real_run.py                           # goes on for nine minutes; status 3 while something is left
    until python benchmarks/real_run.py; do [ $? = 3 ] || break; done       # all of it, in commands of nine minutes
    python benchmarks/real_run.py --updates 8 --seeds 0 --trl-seeds 0 --folder runs/beside_trl \\
        --csv benchmarks/results/real_run_trl.csv --picture runs/beside_trl.png
    python benchmarks/real_run.py --table                   # what is finished: the table, the CSV and the picture

GRPO with a LoRA adapter and of all weights, by `hybrid-engine grpo` and by TRL's `GRPOTrainer`: the same questions in
the same order, groups, sampling, rewards, learning rate, schedule, clipping and loss (`--preset trl`). Ours packs
sequences without padding and shares a group's prompt (`--tokens-per-micro-batch`). One after the other, so that a slow
hour of the machine meets both. A part that is stopped goes on from its last checkpoint.

Each saved model answers the same held-out questions by `hybrid-engine evaluate` with one seed; a gain is the mean of
the differences by question to the model before, with Student's 95% interval. Seconds are those of the updates, without
loading, evaluation and checkpoints; memory is the most that the process held.
"""

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_engine.rl.estimates import Interval, mean_interval
from hybrid_engine.rlhf.data.prompts import load_prompt_rows, select_prompts
from hybrid_engine.rlhf.runs.run_folder import has_checkpoint

FOLDER = Path(__file__).parent
TASK = "reasoning_gym:letter_counting:min_words=3,max_words=6,shots=3,held_out=120,held_out_seed=3000000000"
REWARD = "reasoning_gym"
G, QUESTIONS, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS = 8, 8, 8, 320
TOKENS_PER_PASS = 1024
TRL_ROWS_PER_PASS = 16
"""All 64 at once need more than 24 GB."""
LORA_RANK = 8
RATES = {"lora": 3e-4, "full": 1e-5}
WARMUP = 4
TEMPERATURE = 1.0
EVAL_SAMPLES = 8
CHECKPOINT_EVERY = 10
LEFT = 3
"""Exit status while something is left to do."""


class Part(NamedTuple):
    """One training run and the evaluation of what it leaves; or the evaluation of the model before."""

    side: str
    kind: str = ""
    seed: int = 0

    @property
    def name(self) -> str:
        """As `--parts` takes it."""
        return self.side if self.side == "before" else f"{self.side}-{self.kind}-{self.seed}"


class Job(NamedTuple):
    """What all parts are run with."""

    folder: Path
    model: Path
    task: str
    updates: int
    threads: int
    deadline: float

    @property
    def seconds_left(self) -> float:
        """Until the command ends."""
        return self.deadline - time.monotonic()


def all_parts(seeds: list[int], trl_seeds: list[int]) -> list[Part]:
    """Ours and TRL's in turns."""
    parts = [Part("before")]
    for seed in seeds:
        for kind in ("lora", "full"):
            parts.append(Part("ours", kind, seed))
            parts += [Part("trl", kind, seed)] if seed in trl_seeds else []
    return parts


def run_part(job: Job, part: Part) -> bool:
    """Goes on with a part; True when it is done, False when the time is up."""
    folder = job.folder / part.name
    folder.mkdir(parents=True, exist_ok=True)
    if part.side != "before" and not (folder / "trained.json").exists():
        command = our_command(job, part) if part.side == "ours" else trl_command(job, part)
        done = run_process(job, command, folder)
        if not done:
            return False
        if part.side == "ours":
            write_trained(folder, [row["e2e_seconds"] for row in read_lines(folder / "run" / "metrics.jsonl")])
    if not (folder / "evaluation" / "result.json").exists():
        return run_process(job, evaluation_command(job, part), folder)
    return True


def our_command(job: Job, part: Part) -> list[str]:
    """`hybrid-engine grpo` with the options of the tutorial; goes on where there is a checkpoint."""
    run = job.folder / part.name / "run"
    options: dict[str, Any] = {
        "model": job.model, "dataset": job.task, "reward": REWARD, "out": run, "seed": part.seed,
        "steps": job.updates, "rollout_size": QUESTIONS, "group_size": G, "minibatch_size": QUESTIONS * G,
        "max_new_tokens": MAX_NEW_TOKENS, "max_prompt_tokens": MAX_PROMPT_TOKENS, "preset": "trl",
        "learning_rate": RATES[part.kind], "warmup_steps": WARMUP, "lora_rank": LORA_RANK * (part.kind == "lora"),
        "tokens_per_micro_batch": TOKENS_PER_PASS, "eval_every": 0, "eval_prompts": 8, "eval_samples": 1,
        "save_every": CHECKPOINT_EVERY, "dtype": "fp32", "temperature": TEMPERATURE,
    }  # fmt: skip
    command = [sys.executable, "-m", "hybrid_engine.cli.cli", "grpo", "--no-measure-kl"]
    command += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*command, "--resume" if has_checkpoint(run, "grpo") else "--restart"]


def trl_command(job: Job, part: Part) -> list[str]:
    """This file in a process of its own, which trains by TRL."""
    options = [f"--{name}={getattr(job, name)}" for name in ("folder", "model", "task", "updates", "threads")]
    minutes = f"--minutes={max(job.seconds_left - 30, 1) / 60}"  # to write a checkpoint in
    return [sys.executable, __file__, "--only-trl", part.kind, "--seeds", str(part.seed), *options, minutes]


def evaluation_command(job: Job, part: Part) -> list[str]:
    """`hybrid-engine evaluate` on the held-out questions."""
    folder = job.folder / part.name
    saved = {"before": job.model, "ours": folder / "run" / "actor", "trl": folder / "model"}[part.side]
    options: dict[str, Any] = {
        "model": saved, "dataset": job.task, "reward": REWARD, "out": folder / "evaluation", "k": EVAL_SAMPLES,
        "max_new_tokens": MAX_NEW_TOKENS, "max_prompt_tokens": MAX_PROMPT_TOKENS, "dtype": "fp32",
        "temperature": TEMPERATURE,
    }  # fmt: skip
    command = [sys.executable, "-m", "hybrid_engine.cli.cli", "evaluate", "--held-out", "--restart"]
    return command + [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run_process(job: Job, command: list[str], folder: Path) -> bool:
    """Runs a command until it ends or the time is up; its most memory goes to `peak_bytes`.

    Raises:
        RuntimeError: it failed; what it printed is in `log`.
    """
    print(f"{folder.name}: {' '.join(map(str, command[3:5]))} ...", flush=True)
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": str(job.threads)}
        )
        while process.poll() is None and job.seconds_left > 0:
            note_peak(process.pid, folder / "peak_bytes")
            time.sleep(0.5)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # the next command goes on from the last checkpoint
            process.wait()
            return False
    if process.returncode == LEFT:
        return False
    if process.returncode:
        raise RuntimeError(f"{folder.name} failed with status {process.returncode}; see {folder / 'log'}")
    return True


def note_peak(pid: int, file: Path) -> None:
    """Writes the most memory that a process has held so far, if that is more than what is written."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return
    most = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    if most > (int(file.read_text()) if file.exists() else 0):
        file.write_text(str(most))


def train_by_trl(job: Job, part: Part) -> int:
    """Trains by TRL's `GRPOTrainer` until the time is up; 0 when all updates are done, `LEFT` otherwise."""
    import reasoning_gym
    import transformers
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    folder = job.folder / part.name
    rows, _ = load_prompt_rows(job.task)
    order = select_prompts(len(rows), 0, job.updates * QUESTIONS, part.seed)
    data = [{"prompt": rows[i].prompt, "answer": rows[i].columns["answer"], "row": i} for i in order]
    metadata = [row.columns["metadata"] for row in rows]
    first = metadata[0]
    scorer = reasoning_gym.create_dataset(first["source_dataset"], **first["source_config"]).score_answer

    def score(completions: Any, answer: list[str], row: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"].strip() for completion in completions]
        return [
            scorer(text, {"answer": right, "metadata": metadata[index]})
            for text, right, index in zip(texts, answer, row, strict=True)
        ]

    arguments = GRPOConfig(
        output_dir=str(folder / "checkpoints"), max_steps=job.updates, per_device_train_batch_size=TRL_ROWS_PER_PASS,
        gradient_accumulation_steps=QUESTIONS * G // TRL_ROWS_PER_PASS, num_generations=G, temperature=TEMPERATURE,
        max_completion_length=MAX_NEW_TOKENS, learning_rate=RATES[part.kind], lr_scheduler_type="linear",
        warmup_steps=WARMUP, adam_beta2=0.95, adam_epsilon=1e-5, seed=part.seed, shuffle_dataset=False, report_to=[],
        use_cpu=True, bf16=False, activation_checkpointing=False, disable_tqdm=True, logging_steps=1,
        save_strategy="steps", save_steps=CHECKPOINT_EVERY, save_total_limit=1,
    )  # fmt: skip
    adapter = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype="float32"),
        reward_funcs=score, args=arguments, train_dataset=Dataset.from_list(data),
        processing_class=transformers.AutoTokenizer.from_pretrained(job.model),
        peft_config=adapter if part.kind == "lora" else None,
    )  # fmt: skip

    class Clock(transformers.TrainerCallback):
        """Writes the seconds and the mean reward of each update, and stops in time."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with (folder / "steps.jsonl").open("a") as file:
                seconds = time.perf_counter() - self.start
                file.write(json.dumps({"step": state.global_step, "seconds": seconds}) + "\n")
            if job.seconds_left < 1.5 * seconds:
                control.should_save = control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "reward" in logs:
                with (folder / "rewards.jsonl").open("a") as file:
                    file.write(json.dumps({"step": state.global_step, "score": logs["reward"]}) + "\n")

    trainer.add_callback(Clock())
    trainer.train(resume_from_checkpoint=any((folder / "checkpoints").glob("checkpoint-*")) or None)
    if trainer.state.global_step < job.updates:
        return LEFT
    model = trainer.model.merge_and_unload() if part.kind == "lora" else trainer.model
    model.save_pretrained(folder / "model")
    trainer.processing_class.save_pretrained(folder / "model")
    write_trained(folder, [row["seconds"] for row in last_of_each(read_lines(folder / "steps.jsonl"))])
    return 0


def write_trained(folder: Path, seconds: list[float]) -> None:
    """Says that the training is done, and how long its updates took."""
    (folder / "trained.json").write_text(json.dumps({"updates": len(seconds), "seconds": sum(seconds)}))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def last_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each step: an update that was made again after a stop counts once."""
    return list({row["step"]: row for row in rows}.values())


class Measured(NamedTuple):
    """One row of the table."""

    side: str
    kind: str
    seed: int
    updates: int
    seconds: float
    peak_gib: float
    before: float
    after: Interval
    gain: Interval


def pass_rates(folder: Path) -> list[float]:
    """The share of right answers to each held-out question; an answer is right at a score of 1."""
    lines = read_lines(folder / "evaluation" / "samples.jsonl")
    return [statistics.fmean(float((score or 0.0) >= 1.0) for score in line["scores"]) for line in lines]


def measured_rows(folder: Path, parts: list[Part]) -> list[Measured]:
    """A row for each part that is finished."""
    before, rows = pass_rates(folder / "before"), []
    for part in parts:
        place = folder / part.name
        if part.side == "before" or not before or not (place / "evaluation" / "result.json").exists():
            continue
        trained, after = json.loads((place / "trained.json").read_text()), pass_rates(place)
        gain = mean_interval([late - early for early, late in zip(before, after, strict=True)])
        peak = int((place / "peak_bytes").read_text()) / 2**30
        mean = statistics.fmean(before)
        rows.append(Measured(*part, trained["updates"], trained["seconds"], peak, mean, mean_interval(after), gain))
    return rows


def show_table(rows: list[Measured]) -> None:
    """The rows as the table of docs/tutorial.md."""
    print("| | seed | pass@1 before | after | gain (95%) | seconds an update | peak memory |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        name = f"{'hybrid-engine' if row.side == 'ours' else 'TRL'}, {'LoRA' if row.kind == 'lora' else 'all weights'}"
        gain = f"{row.gain.mean:+.1%} ({row.gain.low:+.1%} to {row.gain.high:+.1%})"
        print(
            f"| {name} | {row.seed} | {row.before:.1%} | {row.after.mean:.1%} | {gain} "
            f"| {row.seconds / row.updates:.1f} | {row.peak_gib:.1f} GiB |"
        )


def write_csv(rows: list[Measured], file: Path) -> None:
    """The rows with where they are from."""
    from common import environment

    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        origin = environment("cpu")
        intervals = [f"{name}{end}" for name in ("after", "gain") for end in ("", "_low", "_high")]
        writer.writerow([*Measured._fields[:7], *intervals, *origin])
        for row in rows:
            numbers = [f"{number:.4f}" for number in (*row[4:7], *row.after, *row.gain)]
            writer.writerow([*row[:4], *numbers, *origin.values()])


def draw(folder: Path, parts: list[Part], file: Path) -> None:
    """The mean reward of each update: a line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for part in parts:
        if part.side == "before":
            continue
        name = "run/metrics.jsonl" if part.side == "ours" else "rewards.jsonl"
        rows = last_of_each(read_lines(folder / part.name / name))
        panel = panels[int(part.kind == "full")]
        style = {"color": "C0"} if part.side == "ours" else {"color": "C1", "linestyle": "--"}
        scores = [row["score"] for row in rows]
        smooth = [statistics.fmean(scores[max(0, index - 4) : index + 1]) for index in range(len(scores))]
        label = {"ours": "hybrid-engine", "trl": "TRL"}[part.side] if part.seed == 0 else None
        panel.plot(range(1, len(rows) + 1), smooth, label=label, **style)
    for panel, title in zip(panels, ("LoRA", "all weights"), strict=True):
        panel.set(title=title, xlabel="update")
        panel.legend()
    panels[0].set_ylabel("reward, mean of five updates")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", help="only these; --list names them")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--trl-seeds", nargs="+", type=int, default=[], help="seeds that TRL trains too")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which the command stops (default 9)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", default=TASK, help="the dataset")
    parser.add_argument("--folder", type=Path, default=Path("runs/real_run"))
    parser.add_argument("--model", type=Path, default=Path(".venv/smollm2"), help="as make real writes it")
    parser.add_argument("--csv", type=Path, default=FOLDER / "results" / "real_run.csv")
    parser.add_argument("--picture", type=Path, default=FOLDER.parent / "docs" / "tutorial.png")
    parser.add_argument("--list", action="store_true", help="name the parts, and which are finished")
    parser.add_argument("--table", action="store_true", help="show and write what is finished, and run nothing")
    parser.add_argument("--only-trl", choices=("lora", "full"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Runs what is left; returns the exit status."""
    args = parse()
    deadline = time.monotonic() + args.minutes * 60
    job = Job(args.folder, args.model, args.task, args.updates, args.threads, deadline)
    if args.only_trl:
        return train_by_trl(job, Part("trl", args.only_trl, args.seeds[0]))
    if not args.model.exists():
        print(f"--model={str(args.model)!r} does not exist; write it by make real, or by hybrid-engine real-model")
        return 2
    parts = all_parts(args.seeds, args.trl_seeds)
    chosen = [part for part in parts if not args.parts or part.name in args.parts]
    unknown = set(args.parts or ()) - {part.name for part in parts}
    if unknown:
        print(f"--parts: there is no {', '.join(sorted(unknown))}; there are {' '.join(part.name for part in parts)}")
        return 2
    if args.list:
        for part in parts:
            print(part.name, "done" if (args.folder / part.name / "evaluation" / "result.json").exists() else "")
        return 0
    left = [] if args.table else [part for part in chosen if job.seconds_left < 20 or not run_part(job, part)]
    rows = measured_rows(args.folder, parts)
    show_table(rows)
    if rows:
        write_csv(rows, args.csv)
        draw(args.folder, [part for part in parts if (args.folder / part.name).exists()], args.picture)
    if left:
        print(f"left: {' '.join(part.name for part in left)}; the same command goes on")
    return LEFT if left else 0


if __name__ == "__main__":
    sys.exit(main())
