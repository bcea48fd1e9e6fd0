"""Online DPO: trains a policy on pairs of its own answers, ranked by any reward.

    hybrid-engine online-dpo
    hybrid-engine online-dpo --model Qwen/Qwen3-0.6B --dataset problems.jsonl --reward math --out runs/mine

For each step: prompts -> engine.eval() -> engine.generate() several answers each -> rewards -> engine.train() -> the
best and the worst answer to each prompt as a pair -> DPO's loss and update (`dpo.py`). If all answers to a prompt have
the same reward there is no pair; each step logs how often. Without options, SFT first trains a small model to add
numbers like a pupil who forgets the carry; correct sums are rewarded.

B: this process's prompts of a step, G: answers to each, N = B * G rows.

Source: Guo et al., "Direct Language Model Alignment from Online AI Feedback", arXiv 2402.04792, algorithm 1, with the
best and the worst of G answers where G is above 2.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from hybrid_engine.distributed.processes import gather_objects, get_world_size
from hybrid_engine.recipes import reward as reward_stage
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.recipes.dpo import update
from hybrid_engine.rl.preferences import best_and_worst
from hybrid_engine.rlhf.data.encoding import Encoded, EncodedPair
from hybrid_engine.rlhf.experience.answers import Reading, TrainingPair
from hybrid_engine.rlhf.experience.evaluation import (
    Evaluation,
    FollowedAnswers,
    Sums,
    answer_sums,
    evaluate,
    follow,
    global_means,
    reference_sums,
    score_sum,
    show_comparison,
)
from hybrid_engine.rlhf.experience.policy import TrainedPolicy, build_policy, trained_rows
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, GroupSource, Rollout, ScoredGroups, warm_up
from hybrid_engine.rlhf.experience.start import Stages, Start, prepare
from hybrid_engine.rlhf.options.preference import OnlineDPOConfig as Config
from hybrid_engine.rlhf.options.shared import (
    is_due,
    suitable_rate,
)
from hybrid_engine.rlhf.planning.comparison import follow_answers, write_result
from hybrid_engine.rlhf.runs.checkpoints import begin_run, load_checkpoints, save_checkpoints
from hybrid_engine.rlhf.runs.engine_config import Schedule
from hybrid_engine.rlhf.runs.run_folder import CHECKPOINTS, METRICS, read_metrics
from hybrid_engine.rlhf.runs.run_log import RunLog, plot_metrics, say
from hybrid_engine.rlhf.runs.stages import Best, keep_highest, save_stage, seed_everything

PLOT_PANELS = {
    "score": ["score", "held_out_score"],
    "loss": ["loss"],
    "reward of DPO": ["chosen_reward", "rejected_reward"],
    "response length (tokens)": ["length"],
}
SHOWN = ["score", "groups_without_variance", "loss", "accuracy", "length", "cut_off_share", "e2e_seconds"]
"""Figures in the log line of a step, if they exist."""


def run(config: Config) -> Path:
    """Trains missing stages and then the actor; returns the folder of the final actor. Collective."""
    out = Path(config.out)
    config = begin_run(config, "online-dpo")
    start = prepare(config, Stages(sft_stage.run, reward_stage.run))
    config = start.config
    seed_everything(config.seed)
    num_updates = config.steps * (config.rollout_size // config.minibatch_size)
    schedule = Schedule.of(config, num_updates, "online-dpo")
    rate = config.learning_rate or suitable_rate(config, small=3e-4)
    policy = build_policy(config, start.source, rate, schedule)
    memory = follow_answers("online-dpo", config, start, policy)
    say(policy.actor.report())
    say(schedule.describe())

    options = AnswerSampling.of(config, config.group_size)
    num_prompts = config.rollout_size // get_world_size()
    warm_up(policy.actor, policy.tokenizer, options, num_prompts, start.answered.shortest)
    before = evaluate_policy(policy, start, config)
    followed = follow(out, policy.actor, policy.tokenizer, config.temperature, policy.sizes, before)
    best, first_step = Best(), 0
    if config.resume:
        saved = load_checkpoints({"actor": policy.actor}, out / CHECKPOINTS, config)
        best, first_step = Best(**saved.state), saved.step
    started = time.perf_counter()
    log = RunLog(out, "Online DPO", config.steps, config, first_step)
    best = train_loop(policy, start, config, log, first_step, best, followed)
    seconds = time.perf_counter() - started
    after = followed.after(config.steps, partial(evaluate_policy, policy, start, config))

    show_comparison(before, after, out)
    result = {"before": before.figures, "after": after.figures, "seconds": seconds}
    write_result(out / "result.json", result | best.result("score"), memory)
    plot_metrics(read_metrics(out / METRICS), PLOT_PANELS, out / "plot.png")
    save_stage(policy.actor, policy.tokenizer, out / "actor")
    return out / "actor"


def train_loop(
    policy: TrainedPolicy,
    start: Start,
    config: Config,
    log: RunLog,
    first_step: int,
    best: Best,
    followed: FollowedAnswers,
) -> Best:
    """Samples answers to a step's prompts, makes pairs of them, and updates the policy on these."""
    actor = policy.actor
    source = GroupSource(
        actor=actor,
        tokenizer=policy.tokenizer,
        rewards=start.rewards,
        rows=start.train,
        options=AnswerSampling.of(config, config.group_size),
        seed=config.seed,
    )
    with log:
        for step in range(first_step, config.steps):
            actor.eval()
            start.rewards.begin_step(step, config.steps)
            groups = source.draw(config.rollout_size // get_world_size(), 0, step * config.rollout_size, step)
            actor.train()
            sums = answer_sums(groups.rollout) | {"score": score_sum(groups.scores)}
            rollout = groups.rollout
            figures = groups.figures | global_means(sums)
            figures |= policy.routing_figures(rollout.sequences, rollout.logprobs, config.temperature)
            figures |= update_on_pairs(policy, choose_pairs(policy, groups, config), config)

            figures |= actor.latency_stats()  # before an evaluation, whose latencies are not training's
            if is_due(config.eval_every, step, config.steps):
                evaluation = evaluate_policy(policy, start, config)
                followed.keep(step + 1, evaluation)
                figures |= {f"held_out_{name}": value for name, value in evaluation.figures.items()}
                best = keep_highest(
                    best, evaluation.figures["score"], step + 1, actor, policy.tokenizer, Path(config.out)
                )
            log.write(step, figures, [name for name in SHOWN if name in figures])
            if is_due(config.save_every, step, config.steps):
                folder = Path(config.out) / CHECKPOINTS
                save_checkpoints({"actor": actor}, folder, step + 1, config, best._asdict())
    return best


def choose_pairs(policy: TrainedPolicy, groups: ScoredGroups, config: Config) -> list[TrainingPair]:
    """A pair for each prompt of this process, with weight 0 if all of its answers have the same score; collective."""
    rollout = groups.rollout
    best, worst, differs = best_and_worst(groups.scores.view(-1, config.group_size))  # [B] each
    first = torch.arange(len(best), device=best.device) * config.group_size
    rows = torch.cat([first + best, first + worst])
    logprobs = [0.0] * len(rows)
    if policy.has_reference:
        found = policy.reference_logprobs(rollout.sequences.rows(rows), config.temperature)
        logprobs = found.sum(dim=1).tolist()
    columns = zip(rows.tolist()[: len(best)], rows.tolist()[len(best) :], differs.tolist(), strict=True)
    return [
        TrainingPair(
            EncodedPair(encoded(rollout, chosen), encoded(rollout, rejected)),
            chosen_ref=logprobs[index],
            rejected_ref=logprobs[len(best) + index],
            weight=float(is_pair),
        )
        for index, (chosen, rejected, is_pair) in enumerate(columns)
    ]


def encoded(rollout: Rollout, row: int) -> Encoded:
    """An answer of a rollout, of which every token is learned."""
    answers, supports, routing = rollout.answers, rollout.sequences.supports, rollout.sequences.routing
    response = answers.response_ids[row]
    return Encoded(
        prompt_ids=answers.prompt_ids[row],
        response_ids=response,
        supports=None if supports is None else supports[row, : len(response)],
        routing=None if routing is None else routing[row],
    )


def update_on_pairs(policy: TrainedPolicy, pairs: Sequence[TrainingPair], config: Config) -> dict[str, float]:
    """An optimizer step on each minibatch that has a pair; one without only advances the schedule. Collective.

    Returns:
        The number of `pairs` of the whole step, and the figures of the last minibatch with a pair; without any pair
        none of the figures of `dpo.update`.
    """
    reading = Reading(policy.tokenizer.pad_token_id, config.temperature, policy.sizes)
    loss_of, size = config.build_loss(), config.minibatch_size // get_world_size()
    figures: dict[str, float] = {"pairs": 0.0}
    for first in range(0, len(pairs), size):
        minibatch = pairs[first : first + size]
        num_pairs = sum(gather_objects(sum(pair.weight for pair in minibatch)))
        trained = trained_rows(torch.tensor([pair.weight > 0 for pair in minibatch]))
        if not len(trained):
            policy.actor.pass_step()
        else:
            before = figures["pairs"]
            rate = policy.actor.get_lr()[0]
            chosen = [minibatch[index] for index in trained.tolist()]
            figures = update(policy.actor, chosen, num_pairs, loss_of, reading)
            figures |= {"pairs": before + num_pairs, "learning_rate": rate}
    return figures


def evaluate_policy(policy: TrainedPolicy, start: Start, config: Config) -> Evaluation:
    """One answer to each of the same held-out prompts, with scores and the KL to a reference; collective."""

    def measure(rollout: Rollout) -> Sums:
        if not policy.has_reference:
            return answer_sums(rollout)
        logprobs_ref = policy.reference_logprobs(rollout.sequences, config.temperature)
        return answer_sums(rollout) | reference_sums(rollout, logprobs_ref)

    options = AnswerSampling.of(config)
    return evaluate(policy.actor, policy.tokenizer, start.held_out, start.rewards, options, measure=measure)
