"""Direct preference optimization: trains a policy on pairs of answers, one preferred, without a reward model.

    hybrid-engine dpo --out runs/dpo
    hybrid-engine dpo --model Qwen/Qwen3-0.6B --dataset pairs.jsonl --out runs/mine

The reference is the policy at the start. Its log-probabilities of every answer are computed once, before the first
step, so one model is in memory; with `--lora-rank` it is the base under a disabled adapter. SimPO, ORPO and CPO have no
reference. Each step then lowers the loss (`rl/preferences.py`) of a batch of pairs. Without `--dataset` the pairs are
those of the reward stage, and the rules of PEP 257 (`tasks/stdlib_docs.py`), which are not trained on, judge answers to
held-out prompts before and after.

Writes to `--out`: metrics.jsonl (one line per step), plot.png, samples.json, result.json, checkpoints/, best/ and
actor/, Hugging Face folders.

Conventions: Rafailov et al., arXiv 2305.18290. Log-probabilities are sums over the answer's tokens, including its
end-of-sequence token; every pair of a step has the same weight, however they are split.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_engine.containers.device import send_to_device
from hybrid_engine.distributed.processes import get_rank, get_world_size
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.rl.preferences import PairLoss
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, TrainingPasses, check_budget
from hybrid_engine.rlhf.batches.passes import Items, RunPasses
from hybrid_engine.rlhf.data.encoding import encode_pair
from hybrid_engine.rlhf.data.prompts import fit_prompts, select_prompts
from hybrid_engine.rlhf.data.rows import told_together
from hybrid_engine.rlhf.experience.answers import (
    Reading,
    TrainingPair,
    answers_of,
    held_out_figures,
    load_pairs,
    pair_logprobs,
    pair_sums,
    pairs_without_reference,
    refer_pairs,
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
from hybrid_engine.rlhf.options.preference import DPOConfig as Config
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
    "log-probability (nats)": ["chosen_logprob", "rejected_logprob"],
}
SHOWN = ["loss", "accuracy", "chosen_reward", "rejected_reward", "grad_norm"]
"""Figures in the log line of a step."""


def run(config: Config) -> Path:
    """Trains the actor on the pairs; returns its folder. Collective."""
    out = Path(config.out)
    config = begin_run(config, "dpo")
    check_run(config)
    with told_together(waits=config.model is not None):
        parts = load_pairs(config)
        prompts = prompts_of(parts[1], config)
        if config.restart and config.model is None:
            move_aside(out, RUN_RESULTS)  # before the first actor is trained in this folder
        source = find_first_actor(config, sft_stage.run)
        tokenizer, first = load_tokenizer(source), load_config(source)
        fitting = keep_what_fits(config, first, parts, partial(encode_pair, tokenizer), "pairs")
        (rows, encoded), (held_out_rows, held_out_encoded) = fitting
        config = with_preference_lengths(config, first, tokenizer, prompts, answers_of(encoded))
    if config.restart and config.model is not None:
        move_aside(out, RUN_RESULTS)
    check_budget(config.tokens_per_micro_batch, [pair.lengths for pair in encoded])
    prompts = fit_prompts(prompts, tokenizer, config.max_prompt_tokens, skips=config.skip_too_long)
    seed_everything(config.seed)
    num_steps = config.epochs * (len(encoded) // config.batch_size)
    schedule = Schedule.of(config, num_steps, "dpo")
    actor = build_actor(config, source, schedule)
    reading = Reading(tokenizer.pad_token_id, sizes=RunPasses.of(config))
    read = read_preferences(config, actor.module.config, encoded)
    memory = follow_memory("dpo", config, read, reading.sizes, [actor])
    say(f"DPO: {len(rows)} pairs, {len(held_out_rows)} held out, {num_steps} steps")
    say(schedule.describe())

    loss_of = config.build_loss()
    if config.has_reference:
        with without_adapter(actor.module):
            pairs, held_out = (refer_pairs(actor, part, reading) for part in (encoded, held_out_encoded))
    else:
        pairs, held_out = map(pairs_without_reference, (encoded, held_out_encoded))

    def measure() -> Evaluation:
        answered = answer_prompts(actor, tokenizer, prompts, config, config.dataset is None)
        figures = held_out_figures(actor, held_out, loss_of, reading)
        return Evaluation(figures=figures | answered.figures, groups=answered.groups)

    before = measure()
    followed = follow(out, actor, tokenizer, config.temperature, reading.sizes, before)

    def look(step: int) -> Evaluation:
        evaluation = measure()
        followed.keep(step, evaluation)
        return evaluation

    started = time.perf_counter()
    saved = load_checkpoints({"actor": actor}, out / CHECKPOINTS, config) if config.resume else SavedRun()
    log = RunLog(out, "DPO", num_steps, config, saved.step)
    steps, best = range(saved.step, num_steps), Best(**saved.state)
    best = train_loop(actor, tokenizer, pairs, config, reading, log, steps, best, look)
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
    pairs: list[TrainingPair],
    config: Config,
    reading: Reading,
    log: RunLog,
    steps: range,
    best: Best,
    look: Callable[[int], Evaluation],
) -> Best:
    """Trains on the pairs; every process takes its share of each batch. `look` evaluates, given the steps done.

    Returns the best measurement of the whole run.
    """
    out, loss_of = Path(config.out), config.build_loss()
    with log:
        for step in steps:
            actor.train()
            chosen = select_prompts(len(pairs), step * config.batch_size, config.batch_size, config.seed)
            mine = [pairs[index] for index in chosen[get_rank() :: get_world_size()]]
            rate = actor.get_lr()[0]
            figures = update(actor, mine, config.batch_size, loss_of, reading)
            if is_due(config.eval_every, step, steps.stop):
                measured = look(step + 1).figures
                figures |= {f"held_out_{name}": value for name, value in measured.items()}
                best = keep_lowest(best, measured["loss"], step + 1, actor, tokenizer, out)
            log.write(step, figures | {"learning_rate": rate}, SHOWN)
            if is_due(config.save_every, step, steps.stop):
                save_checkpoints({"actor": actor}, out / CHECKPOINTS, step + 1, config, best._asdict())
    return best


def update(
    actor: Any,
    pairs: Sequence[TrainingPair],
    num_pairs: float,
    loss_of: PairLoss,
    reading: Reading,
) -> dict[str, float]:
    """One optimizer step on this process's pairs of a step that has `num_pairs` over all processes; collective.

    Returns:
        Means over the pairs of the whole step (`pair_sums`), and the norm of the gradient before clipping.
    """

    def micro_batch_loss(rows: list[int]) -> tuple[torch.Tensor, DeviceFigures]:
        batch = [pairs[index] for index in rows]
        logprobs = pair_logprobs(actor, batch, reading, is_weighted=loss_of.is_weighted)
        weights = send_to_device(torch.tensor([pair.weight for pair in batch]), logprobs.chosen.device)
        losses = loss_of(logprobs)
        return (losses * weights).sum() / num_pairs, pair_sums(logprobs, losses, weights, loss_of)

    passes = TrainingPasses([actor], Items.of(pair.tokens for pair in pairs), reading.sizes)
    for rows in passes:
        with passes.fitting():
            actor.backward(passes.loss(partial(micro_batch_loss, rows)))
    actor.step()
    return step_means(passes.figures()) | gradient_figures(actor)
