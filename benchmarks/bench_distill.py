"""One step of on-policy distillation, rollout and update: this project's recipe against TRL's trainer.

    python benchmarks/bench_distill.py --threads 2

Both train one Llama in fp32 by the reverse KL from a teacher of the same size, with AdamW in micro-batches of as many
rows; TRL by its own `DistillationTrainer`, which like ours never has all logits, we by the functions of
`recipes/distill.py`. The model counts down (countdown.py), and its teacher is the same one with a head that is less
sure: at fixed lengths both sample the very same tokens, with long tails both draw lengths of one log-normal
distribution. The learning rate is so small that it goes on counting. The steps are taken in turns, each side's in a
process of its own (`step_sides.py`). At fixed lengths the losses of both must agree before a time is reported.
"""

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from bench_step import MEAN_SHARE, SIGMA, WARM_UP, word_tokenizer
from common import FULL, SMALL, add_shape_options, append_rows, chosen_shape, environment, parse_run, run_options
from countdown import build_countdown_model, build_prompts, log_normal_mu, log_normal_probabilities, start_token
from rich.console import Console
from rich.table import Table
from step_sides import LEARNING_RATE, MICRO_BATCH, AtTurns, Clock, Job, Step, take_turns
from transformers import LlamaForCausalLM

from hybrid_engine.cli.cli import keep_freed_memory
from hybrid_engine.recipes import distill
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.policy import build_policy
from hybrid_engine.rlhf.experience.teacher_loading import load_frozen
from hybrid_engine.rlhf.experience.teachers import ModelTeacher
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.runs.engine_config import Schedule

ROWS = 32
SURENESS, NOISE = 0.25, 0.02
"""Factor of the teacher's head, which makes it less sure of its tokens, and the deviation of the noise in it."""


def reward(completions: list[str], **others: Any) -> list[float]:
    """Ours reports a score with each step; it is not learned from."""
    return [0.0] * len(completions)


def take_our_steps(job: Job, turns: Connection) -> None:
    """A step of `hybrid-engine distill` at each turn."""
    keep_freed_memory()
    rows, shape, taught_by = len(job.prompts), job.shape, f"{job.folder}/teacher"
    config = distill.Config(
        model=job.folder, teacher=taught_by, rollout_size=rows, minibatch_size=rows,
        micro_batch_size=MICRO_BATCH, tokens_per_micro_batch=job.tokens_per_micro_batch,
        max_prompt_tokens=shape.prompt_tokens, max_new_tokens=shape.new_tokens, learning_rate=LEARNING_RATE,
        reward=("bench_distill:reward",),
    )  # fmt: skip
    policy = build_policy(config, job.folder, LEARNING_RATE, Schedule.of(config, 1000, "distill"))
    teacher, actor = ModelTeacher(model=load_frozen(taught_by, config, policy), temperature=1.0), policy.actor
    start: Any = SimpleNamespace(
        train=[PromptRow(prompt=prompt) for prompt in job.prompts], rewards=load_rewards(config.reward)
    )
    start.rewards.begin_step(0, job.num_steps)
    clock = Clock()
    actor.generate = clock.timing("generation", actor.generate)
    for number in range(job.num_steps):
        turns.recv()
        clock.take()
        begin = time.perf_counter()
        actor.eval()
        answered, _ = distill.own_answers(policy, start, list(range(rows)), config, number)
        actor.train()
        teacher.begin_step(answered)
        figures = distill.update(policy, teacher, answered.sequences, config, number)
        seconds = clock.take() | {"whole": time.perf_counter() - begin, "loss": figures["divergence"]}
        turns.send(Step(seconds, answered.sequences.response_mask.sum(dim=1).tolist()))


def take_trl_steps(job: Job, turns: Connection) -> None:
    """The same by TRL's own trainer."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    rows = len(job.prompts)
    arguments = DistillationConfig(
        output_dir=tempfile.mkdtemp(), max_steps=job.num_steps, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=rows // MICRO_BATCH, max_completion_length=job.shape.new_tokens, beta=1.0,
        learning_rate=LEARNING_RATE, logging_steps=1000, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", disable_tqdm=True, shuffle_dataset=False, top_k=0,
    )  # fmt: skip
    trainer = DistillationTrainer(
        model=LlamaForCausalLM.from_pretrained(job.folder),
        teacher_model=LlamaForCausalLM.from_pretrained(f"{job.folder}/teacher"),
        args=arguments, train_dataset=Dataset.from_dict({"prompt": job.prompts}),
        processing_class=transformers.AutoTokenizer.from_pretrained(job.folder),
    )  # fmt: skip
    clock, lengths = Clock(), list[int]()

    def keeping_lengths(generate: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*args: Any, **kwargs: Any) -> Any:
            output = generate(*args, **kwargs)
            lengths.extend(output["completion_mask"].sum(dim=1).tolist())
            return output

        return kept

    def adding_losses(compute: Callable[..., Any]) -> Callable[..., Any]:
        def added(*args: Any, **kwargs: Any) -> Any:
            loss = compute(*args, **kwargs)
            clock.seconds["loss"] += (loss[0] if isinstance(loss, tuple) else loss).item()
            return loss

        return added

    internals: Any = trainer
    internals._generate = clock.timing("generation", internals._generate)
    internals._generate_and_score_completions = keeping_lengths(internals._generate_and_score_completions)
    internals.compute_loss = adding_losses(internals.compute_loss)
    trainer.add_callback(AtTurns(turns, clock, lengths))
    trainer.train()


def check_losses(pairs: list[tuple[Step, Step]]) -> None:
    """Raises RuntimeError unless both sides learned from the same samples, and with the same loss."""
    for ours, theirs in pairs:
        losses = [step.seconds["loss"] for step in (ours, theirs)]
        if sorted(ours.lengths) != sorted(theirs.lengths) or abs(losses[0] - losses[1]) > 1e-4 * abs(losses[1]):
            raise RuntimeError(f"not the same step: {losses=} {ours.lengths=} {theirs.lengths=}")


def main() -> None:
    """Takes the steps of both cases, prints and records them."""
    parser = run_options(__doc__)
    full, small = (dataclasses.replace(shape, prompts=ROWS) for shape in (FULL, SMALL))
    add_shape_options(parser, full, small)
    parser.add_argument("--only", default="", help='the case whose name contains this: "fixed" or "long tail"')
    parser.add_argument(
        "--tokens-per-micro-batch", type=int, default=0, help="ours packs so many tokens a pass (0: rows)"
    )
    args = parse_run(parser, "distill")
    shape = chosen_shape(args, full, small)
    mean = MEAN_SHARE * shape.new_tokens
    probabilities = log_normal_probabilities(shape.new_tokens, log_normal_mu(shape.new_tokens, mean, SIGMA), SIGMA)
    model, rows = build_countdown_model(shape, probabilities), []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        word_tokenizer(shape.vocab).save_pretrained(folder)
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head *= SURENESS
            head += NOISE * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        model.save_pretrained(Path(folder) / "teacher")
        word_tokenizer(shape.vocab).save_pretrained(Path(folder) / "teacher")
        for name, last in {"fixed lengths": shape.new_tokens + 1, "long tail": start_token(shape)}.items():
            if args.only not in name:
                continue
            ids = build_prompts(shape, torch.full((shape.prompts,), last))
            prompts = [" ".join(f"w{token}" for token in row) for row in ids.tolist()]
            job = Job(
                folder=folder, prompts=prompts, shape=shape, tokens_per_micro_batch=args.tokens_per_micro_batch,
                num_steps=WARM_UP + args.repeats, threads=torch.get_num_threads(),
            )  # fmt: skip
            pairs = take_turns(job, (take_our_steps, take_trl_steps))
            if name == "fixed lengths":
                check_losses(pairs)
            rows += report(name, pairs[WARM_UP:])
    same = environment("cpu") | dataclasses.asdict(shape) | {"tokens_per_micro_batch": args.tokens_per_micro_batch}
    append_rows(args.csv, [same | row for row in rows])


def report(case: str, pairs: list[tuple[Step, Step]]) -> list[dict[str, Any]]:
    """Prints one case; its rows."""
    sides = {"ours": [ours for ours, _ in pairs], "TRL": [theirs for _, theirs in pairs]}
    ratio = statistics.median(theirs.seconds["whole"] / ours.seconds["whole"] for ours, theirs in pairs)
    title = f"{case}: TRL's step / ours = {ratio:.2f}"
    table = Table("side", "generation s", "whole s", "answer tokens", "loss", title=title)
    rows = []
    for side, steps in sides.items():
        names = ("generation", "whole", "loss")
        found = {name: statistics.median(step.seconds[name] for step in steps) for name in names}
        tokens = statistics.mean(sum(step.lengths) for step in steps)
        table.add_row(
            side, f"{found['generation']:.3f}", f"{found['whole']:.3f}", f"{tokens:.0f}", f"{found['loss']:.4f}"
        )
        rows.append(
            {"case": case, "side": side, "generation_seconds": round(found["generation"], 4),
             "seconds": round(found["whole"], 4), "tokens": round(tokens), "loss": round(found["loss"], 6),
             "step_ratio": round(ratio, 3)}
        )  # fmt: skip
    Console(width=100).print(table)
    return rows


if __name__ == "__main__":
    main()
