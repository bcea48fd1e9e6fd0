"""Distillation: the model answers, and learns the distribution that a teacher gives to each token of its answers.

    hybrid-engine distill --teacher runs/sums/actor
    hybrid-engine distill --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B --dataset problems.jsonl --reward math

For each step: prompts -> engine.eval() -> engine.generate() answers -> engine.train() -> the divergence of the model's
distribution from the teacher's at every token of the answers, its mean over all tokens -> updates of the actor. The
teacher is frozen (`rlhf/experience/teachers.py`), or with --teacher-average a moving average of the actor. Rewards only
say how good the answers are. With --on-policy-share below 1 the other steps learn in the same way on the data set's
answers, without a rollout.

B: this process's prompts of a step, G: answers to each, N = B * G rows, T: response columns.

Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, algorithm 1, whose lambda is
--on-policy-share.
"""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.distributed.processes import gather_objects, get_rank, get_world_size, on_rank_zero
from hybrid_engine.recipes import reward as reward_stage
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.rl.losses import token_mean
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, Figures, TrainingPasses
from hybrid_engine.rlhf.batches.sequences import Sequences, response_divergences
from hybrid_engine.rlhf.data.prompts import select_prompts
from hybrid_engine.rlhf.experience.evaluation import (
    FollowedAnswers,
    answer_sums,
    follow,
    global_means,
    score_sum,
    show_comparison,
    step_means,
)
from hybrid_engine.rlhf.experience.policy import TrainedPolicy, build_policy, evaluate_policy
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, given_answers, sample, warm_up
from hybrid_engine.rlhf.experience.start import Stages, Start, prepare
from hybrid_engine.rlhf.experience.teacher_loading import check_teacher, load_teacher, teacher_adapters, with_average
from hybrid_engine.rlhf.experience.teachers import StepAnswers, Teacher, compare, with_solutions
from hybrid_engine.rlhf.options.distillation import DistillConfig as Config
from hybrid_engine.rlhf.options.shared import is_due, suitable_rate
from hybrid_engine.rlhf.planning.comparison import follow_answers, write_result
from hybrid_engine.rlhf.rewards.scores import reward_figures
from hybrid_engine.rlhf.runs.checkpoints import SavedRun, begin_run, load_checkpoints, save_checkpoints
from hybrid_engine.rlhf.runs.engine_config import Schedule, gradient_figures
from hybrid_engine.rlhf.runs.run_folder import CHECKPOINTS, METRICS, read_metrics, write_teacher_figures
from hybrid_engine.rlhf.runs.run_log import RunLog, plot_metrics, say
from hybrid_engine.rlhf.runs.stages import (
    Best,
    keep_highest,
    mix_seed,
    save_stage,
    seed_everything,
)

PLOT_PANELS = {
    "divergence from the teacher (nats a token)": ["divergence"],
    "agreement with the teacher": ["agreement"],
    "entropy (nats a token)": ["entropy", "teacher_entropy"],
    "reward": ["score", "held_out_pass_at_1"],
    "response length (tokens)": ["length"],
}
SHOWN = [
    "divergence",
    "on_policy",
    "score",
    "length",
    "cut_off_share",
    "e2e_seconds",
    "generate_seconds",
    "training_seconds",
]


def run(config: Config) -> Path:
    """Trains a missing first actor and then the actor; returns the folder of the final actor. Collective."""
    out = Path(config.out)
    config = begin_run(config, "distill")
    check_teacher(config)
    start = prepare(config, Stages(sft_stage.run, reward_stage.run))
    config = start.config
    seed_everything(config.seed)
    num_updates = config.steps * (config.rollout_size * config.group_size // config.minibatch_size)
    schedule = Schedule.of(config, num_updates, "distill")
    rate = config.learning_rate or suitable_rate(config, small=3e-4, trained=1e-5, adapter=1e-4)
    policy = build_policy(config, start.source, rate, schedule, teacher_adapters(config))
    teacher = load_teacher(config, policy, start)
    policy = with_average(policy, teacher, config)
    memory = follow_answers("distill", config, start, policy, teachers=teacher.modules)
    say(policy.actor.report())
    say(schedule.describe())

    options = AnswerSampling.of(config, config.group_size)
    num_prompts = config.rollout_size // get_world_size()
    warm_up(policy.actor, policy.tokenizer, options, num_prompts, start.answered.shortest)
    before = evaluate_policy(policy, start.held_out, start.rewards, config)
    followed = follow(out, policy.actor, policy.tokenizer, config.temperature, policy.sizes, before)
    saved = load_checkpoints(policy.engines, out / CHECKPOINTS, config) if config.resume else SavedRun()
    if policy.average is not None:
        policy.average.write()
    started = time.perf_counter()
    log = RunLog(out, "Distillation", config.steps, config, saved.step)
    best = train_loop(policy, teacher, start, config, log, saved.step, Best(**saved.state), followed)
    seconds = time.perf_counter() - started
    after = followed.after(config.steps, partial(evaluate_policy, policy, start.held_out, start.rewards, config))

    show_comparison(before, after, out)
    result = {"before": before.figures, "after": after.figures, "seconds": seconds}
    write_result(out / "result.json", result | best.result("score"), memory)
    plot_metrics(read_metrics(out / METRICS), PLOT_PANELS, out / "plot.png")
    save_stage(policy.actor, policy.tokenizer, out / "actor")
    return out / "actor"


def train_loop(
    policy: TrainedPolicy,
    teacher: Teacher,
    start: Start,
    config: Config,
    log: RunLog,
    first_step: int,
    best: Best,
    followed: FollowedAnswers,
) -> Best:
    """Learns the teacher's distributions on the model's own answers to a step's prompts, or on the data set's."""
    actor, out = policy.actor, Path(config.out)
    with log:
        for step in range(first_step, config.steps):
            chosen = select_prompts(len(start.train), step * config.rollout_size, config.rollout_size, config.seed)
            records, seed = chosen[get_rank() :: get_world_size()], mix_seed(config.seed, step)
            is_on_policy = draw_on_policy(config.on_policy_share, seed)
            if is_on_policy:
                actor.eval()
                start.rewards.begin_step(step, config.steps)
                answered, figures = own_answers(policy, start, records, config, seed)
            else:
                answered, figures = data_set_answers(policy, start, records, config)
            actor.train()

            teacher.begin_step(answered)
            is_evaluated = is_due(config.eval_every, step, config.steps) or (config.eval_every and step == 0)
            if is_evaluated and not config.has_other_tokens:  # which cannot be compared
                agreement, compared = compare(policy, teacher, answered, config)
                figures |= agreement
                on_rank_zero(partial(write_teacher_figures, out, step, compared))
            figures |= update(policy, teacher, answered.sequences, config, seed)
            if is_on_policy:
                figures |= actor.latency_stats()  # before an evaluation, whose latencies are not training's
            if is_due(config.eval_every, step, config.steps):
                evaluation = evaluate_policy(policy, start.held_out, start.rewards, config)
                followed.keep(step + 1, evaluation)
                figures |= {f"held_out_{name}": value for name, value in evaluation.figures.items()}
                best = keep_highest(best, evaluation.figures["score"], step + 1, actor, policy.tokenizer, out)
            log.write(step, figures, [name for name in SHOWN if name in figures])
            if is_due(config.save_every, step, config.steps):
                save_checkpoints(policy.engines, out / CHECKPOINTS, step + 1, config, best._asdict())
    return best


def draw_on_policy(share: float, seed: int) -> bool:
    """Whether the step with this seed learns from the model's own answers: GKD's algorithm 1, lambda = share."""
    return random.Random(mix_seed(seed, 1)).random() < share


def own_answers(
    policy: TrainedPolicy, start: Start, records: list[int], config: Config, seed: int
) -> tuple[StepAnswers, dict[str, float]]:
    """The model's answers to the prompts `records` with their scores, and figures of them. Collective."""
    options = AnswerSampling.of(config, config.group_size)
    rollout = sample(policy.actor, policy.tokenizer, [start.train[index] for index in records], options, seed)
    scores = start.rewards(rollout.answers)
    figures = global_means(answer_sums(rollout) | {"score": score_sum(torch.tensor(scores.total))})
    figures |= policy.routing_figures(rollout.sequences, rollout.logprobs, config.temperature)
    repeated = [index for index in records for _ in range(config.group_size)]
    answered = StepAnswers(rollout.sequences.numbered(), rollout.answers, repeated, scores)
    if config.shows_solutions:
        answered = with_solutions(answered, config.group_size, config.pass_score)
        is_shown = answered.sequences.on_host.response_mask.any(dim=1)
        figures |= global_means({"shown_solutions": (float(is_shown.sum()), float(len(is_shown)))})
    return answered, {"on_policy": 1.0} | figures | reward_figures(scores)


def data_set_answers(
    policy: TrainedPolicy, start: Start, records: list[int], config: Config
) -> tuple[StepAnswers, dict[str, float]]:
    """The answers that the rows `records` of the data set have, and figures of them. Collective."""
    rows = [start.train[index] for index in records]
    answers, sequences = given_answers(policy.actor, policy.tokenizer, rows, AnswerSampling.of(config))
    length, num_rows = float(sequences.response_mask.sum()), float(len(rows))
    sums = {"length": (length, num_rows), "cut_off_share": (float(sum(answers.is_cut_off)), num_rows)}
    return StepAnswers(sequences.numbered(), answers, records, None), {"on_policy": 0.0} | global_means(sums)


def update(
    policy: TrainedPolicy, teacher: Teacher, sequences: Sequences, config: Config, seed: int
) -> dict[str, float]:
    """An optimizer step on each minibatch of answers; returns the mean divergence over their tokens, and the gradient's
    norm and the learning rate of the last step.
    """
    actor, parts = policy.actor, list[Figures]()
    order = torch.randperm(len(sequences.response_mask), generator=torch.Generator().manual_seed(seed))
    for minibatch in order.split(config.minibatch_size // get_world_size()):
        chosen, rate = sequences.rows(minibatch), actor.get_lr()[0]
        num_tokens = max(1, sum(gather_objects(int(chosen.response_mask.sum()))))
        passes = TrainingPasses([actor], chosen.items, policy.sizes)
        for rows in passes:
            with passes.fitting():
                compute = partial(micro_batch_loss, actor, teacher, chosen, config, num_tokens, rows)
                actor.backward(passes.loss(compute))
        actor.step()
        if policy.average is not None:
            policy.average.follow()
        parts += passes.figures()
    return {**step_means(parts), **gradient_figures(actor), "learning_rate": rate}


def micro_batch_loss(
    actor: Any, teacher: Teacher, minibatch: Sequences, config: Config, num_tokens: int, rows: list[int]
) -> tuple[torch.Tensor, DeviceFigures]:
    """The share of `rows` in the mean divergence over the minibatch's tokens, and its sum and the number of tokens."""
    sequences = minibatch.rows(torch.tensor(rows))
    taught = teacher.read(sequences)
    divergences = response_divergences(
        actor, taught, sequences, config.temperature, config.divergence_beta, config.teacher_top_k
    )
    mask = sequences.response_mask
    return token_mean(divergences, mask, num_tokens), {"divergence": (divergences.detach().sum(), mask.sum())}
