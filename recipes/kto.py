"""KTO: trains a policy on single answers, each labelled desirable or not, without pairs and without a reward model.

    hybrid-engine kto --out runs/kto
    hybrid-engine kto --model Qwen/Qwen3-0.6B --dataset labelled.jsonl --out runs/mine

As in `dpo.py`, the reference is the policy at the start and is read once, before the first step. Each step measures how
much likelier the policy makes any answer than the reference, on prompts with other prompts' answers, and moves
desirable answers above that point and undesirable ones below it (`rl/preferences.py`). Without `--dataset` the answers
are those of the reward stage's pairs, and the rules of PEP 257 judge answers to held-out prompts before and after.

Writes to `--out`: metrics.jsonl (one line per step), plot.png, samples.json, result.json, checkpoints/, best/ and
actor/, Hugging Face folders.

Conventions: Ethayarajh et al., arXiv 2402.01306. The reference point is that of the whole step, over all processes and
micro-batches; every answer of a step has the weight of its label, however they are split.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import gather_objects, get_rank, get_world_size
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.rl.preferences import kto_loss, kto_metrics, kto_reference_point
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, TrainingPasses, check_budget, measure_in_parts
from hybrid_engine.rlhf.batches.passes import Items, RunPasses
from hybrid_engine.rlhf.data.encoding import encode_completion
from hybrid_engine.rlhf.data.prompts import fit_prompts, select_prompts
from hybrid_engine.rlhf.data.rows import told_together
from hybrid_engine.rlhf.experience.answers import (
    LabelledAnswer,
    Reading,
    all_logprobs,
    answer_logprobs,
    labels_of,
    load_answers,
    refer_answers,
    reference_logprobs,
    without_adapter,
)
from hybrid_engine.rlhf.experience.evaluation import Evaluation, follow, show_comparison, step_means
from hybrid_engine.rlhf.experience.start import (
    answer_prompts,
    build_actor,
    check_run,
    find_first_actor,
    keep_what_fits,
    prompts_of,
    with_preference_lengths,
)
from hybrid_engine.rlhf.options.preference import KTOConfig as Config
from hybrid_engine.rlhf.options.shared import is_due
from hybrid_engine.rlhf.planning.comparison import follow_memory, write_result
from hybrid_engine.rlhf.planning.reading import read_preferences
from hybrid_engine.rlhf.runs.checkpoints import SavedRun, begin_run, load_checkpoints, save_checkpoints
from hybrid_engine.rlhf.runs.engine_config import Schedule, gradient_figures
from hybrid_engine.rlhf.runs.run_folder import CHECKPOINTS, METRICS, RUN_RESULTS, read_metrics
from hybrid_engine.rlhf.runs.run_log import RunLog, plot_metrics, say
from hybrid_engine.rlhf.runs.stages import (
    Best,
    keep_lowest,
    load_config,
    load_tokenizer,
    move_aside,
    save_stage,
    seed_everything,
)

PLOT_PANELS = {
    "loss": ["loss", "held_out_loss"],
    "reward": ["chosen_reward", "rejected_reward"],
    "accuracy": ["accuracy", "held_out_accuracy"],
    "reference point (nats)": ["reference_point"],
}
SHOWN = ["loss", "accuracy", "chosen_reward", "rejected_reward", "reference_point"]
"""Figures in the log line of a step."""


def run(config: Config) -> Path:
    """Trains the actor on the answers; returns its folder. Collective."""
    out = Path(config.out)
    config = begin_run(config, "kto")
    check_run(config)
    with told_together(waits=config.model is not None):
        parts = load_answers(config)
        prompts = prompts_of(parts[1], config)
        if config.restart and config.model is None:
            move_aside(out, RUN_RESULTS)  # before the first actor is trained in this folder
        source = find_first_actor(config, sft_stage.run)
        tokenizer, first = load_tokenizer(source), load_config(source)
        fitting = keep_what_fits(config, first, parts, partial(encode_completion, tokenizer), "answers")
        (rows, encoded), (held_out_rows, held_out_encoded) = fitting
        config = with_preference_lengths(config, first, tokenizer, prompts, encoded)
    if config.restart and config.model is not None:
        move_aside(out, RUN_RESULTS)
    longest = max(len(answer.prompt_ids) for answer in encoded) + max(len(answer.response_ids) for answer in encoded)
    check_budget(config.tokens_per_micro_batch, [(longest,)])  # mismatched: any answer after any prompt
    prompts = fit_prompts(prompts, tokenizer, config.max_prompt_tokens, skips=config.skip_too_long)
    seed_everything(config.seed)
    num_steps = config.epochs * (len(encoded) // config.batch_size)
    schedule = Schedule.of(config, num_steps, "kto")
    actor = build_actor(config, source, schedule)
    reading = Reading(tokenizer.pad_token_id, sizes=RunPasses.of(config))
    read = read_preferences(config, actor.module.config, encoded)
    memory = follow_memory("kto", config, read, reading.sizes, [actor])
    say(f"KTO: {len(rows)} answers, {len(held_out_rows)} held out, {num_steps} steps")
    say(schedule.describe())

    with without_adapter(actor.module):
        answers = refer_answers(actor, encoded, [row.label for row in rows], config.seed, reading)
        held_out = refer_answers(actor, held_out_encoded, [row.label for row in held_out_rows], config.seed, reading)

    def measure() -> Evaluation:
        answered = answer_prompts(actor, tokenizer, prompts, config, config.dataset is None)
        figures = held_out_figures(actor, held_out, config, reading)
        return Evaluation(figures=figures | answered.figures, groups=answered.groups)

    before = measure()
    followed = follow(out, actor, tokenizer, config.temperature, reading.sizes, before)

    def look(step: int) -> Evaluation:
        evaluation = measure()
        followed.keep(step, evaluation)
        return evaluation

    started = time.perf_counter()
    saved = load_checkpoints({"actor": actor}, out / CHECKPOINTS, config) if config.resume else SavedRun()
    log = RunLog(out, "KTO", num_steps, config, saved.step)
    steps, best = range(saved.step, num_steps), Best(**saved.state)
    best = train_loop(actor, tokenizer, answers, config, reading, log, steps, best, look)
    seconds = time.perf_counter() - started
    after = followed.after(num_steps, measure)
    show_comparison(before, after, out)
    result = {"before": before.figures, "after": after.figures, "seconds": seconds}
    write_result(out / "result.json", result | best.result("loss"), memory)
    plot_metrics(read_metrics(out / METRICS), PLOT_PANELS, out / "plot.png")
    save_stage(actor, tokenizer, out / "actor")
    return out / "actor"


def train_loop(
    actor: Any,
    tokenizer: PreTrainedTokenizerBase,
    answers: list[LabelledAnswer],
    config: Config,
    reading: Reading,
    log: RunLog,
    steps: range,
    best: Best,
    look: Callable[[int], Evaluation],
) -> Best:
    """Trains on the answers; every process takes its share of each batch. `look` evaluates, given the steps done.

    Returns the best measurement of the whole run.
    """
    out = Path(config.out)
    with log:
        for step in steps:
            actor.train()
            chosen = select_prompts(len(answers), step * config.batch_size, config.batch_size, config.seed)
            mine = [answers[index] for index in chosen[get_rank() :: get_world_size()]]
            rate = actor.get_lr()[0]
            figures = update(actor, mine, config.batch_size, config, reading)
            if is_due(config.eval_every, step, steps.stop):
                measured = look(step + 1).figures
                figures |= {f"held_out_{name}": value for name, value in measured.items()}
                best = keep_lowest(best, measured["loss"], step + 1, actor, tokenizer, out)
            log.write(step, figures | {"learning_rate": rate}, [name for name in SHOWN if name in figures])
            if is_due(config.save_every, step, steps.stop):
                save_checkpoints({"actor": actor}, out / CHECKPOINTS, step + 1, config, best._asdict())
    return best


def update(
    actor: Any, rows: Sequence[LabelledAnswer], num_answers: int, config: Config, reading: Reading
) -> dict[str, float]:
    """One optimizer step on this process's answers of a step that has `num_answers` over all processes; collective.

    Returns:
        Means over the whole step: `loss`, the figures of `rl.kto.kto_metrics` for the kinds of answers in it, and their
        `reward_margin`; the `reference_point` in nats and the norm of the gradient before clipping.
    """
    point = reference_point(actor, rows, reading)

    def micro_batch_loss(indices: list[int]) -> tuple[torch.Tensor, DeviceFigures]:
        batch = [rows[index] for index in indices]
        logprobs = answer_logprobs(actor, [row.answer for row in batch], reading)
        of_answers = logprobs, reference_logprobs(batch)[0], labels_of(batch), point, config.beta
        losses = kto_loss(*of_answers, config.desirable_weight, config.undesirable_weight)
        sums: DeviceFigures = {**kto_metrics(*of_answers), "loss": (losses.detach().sum(), len(batch))}
        return losses.sum() / num_answers, sums

    passes = TrainingPasses([actor], Items.of(row.answer for row in rows), reading.sizes)
    for indices in passes:
        with passes.fitting():
            actor.backward(passes.loss(partial(micro_batch_loss, indices)))
    actor.step()
    labels = {label for part in gather_objects({row.is_desirable for row in rows}) for label in part}
    figures = of_kinds(step_means(passes.figures()), labels)
    return figures | {"reference_point": point.item(), **gradient_figures(actor)}


def of_kinds(figures: dict[str, float], labels: set[bool]) -> dict[str, float]:
    """`figures` with their `reward_margin`, without those of a kind of answer that is not among `labels`."""
    absent = {name for name, label in (("chosen_reward", True), ("rejected_reward", False)) if label not in labels}
    if not absent:
        return figures | {"reward_margin": figures["chosen_reward"] - figures["rejected_reward"]}
    return {name: value for name, value in figures.items() if name not in absent}


@torch.no_grad()
def reference_point(actor: Any, rows: Sequence[LabelledAnswer], reading: Reading) -> torch.Tensor:
    """KTO's reference point of a step, in nats, in passes like those that train; collective."""

    def log_ratios(indices: list[int]) -> torch.Tensor:
        batch = [rows[index] for index in indices]
        return answer_logprobs(actor, [row.mismatched for row in batch], reading) - reference_logprobs(batch)[1]

    ratios = measure_in_parts(actor, Items.of(row.mismatched for row in rows), reading.sizes, log_ratios)
    return kto_reference_point(torch.cat(ratios), dist.group.WORLD if get_world_size() > 1 else None)


@torch.no_grad()
def held_out_figures(actor: Any, rows: Sequence[LabelledAnswer], config: Config, reading: Reading) -> dict[str, float]:
    """The loss and the figures of `update` on held-out answers, as if they were one step; collective."""
    logprobs = all_logprobs(actor, [row.answer for row in rows] + [row.mismatched for row in rows], reading)
    of_answers, of_mismatched = torch.tensor(logprobs, device=actor.device).chunk(2)
    references, mismatched_references = reference_logprobs(rows)
    point = kto_reference_point(of_mismatched - mismatched_references)
    numbers = of_answers, references, labels_of(rows), point, config.beta
    losses = kto_loss(*numbers, config.desirable_weight, config.undesirable_weight)
    figures = {name: (total / count.clamp(min=1)).item() for name, (total, count) in kto_metrics(*numbers).items()}
    figures = of_kinds(figures, {row.is_desirable for row in rows})
    return {"loss": losses.mean().item(), **figures, "reference_point": point.item()}
