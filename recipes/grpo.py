"""Group relative policy optimization: several answers to each prompt are compared with each other, without a critic.

    hybrid-engine grpo

For each step: prompts -> engine.eval() -> engine.generate() G answers each -> rewards -> engine.train() -> advantages
from the groups -> updates of the actor. Without options, SFT first trains a small model to add numbers like a pupil who
forgets the carry; correct sums are rewarded.

An `Algorithm` (`options/algorithm.py`) defines what "GRPO" means: baseline, scale, policy loss, aggregation, KL,
DAPO's sampling, correction. A preset sets them as in a framework or paper (docs/algorithms.md).

B: this process's prompts of a step, G: answers to each, N = B * G rows, P: prompt columns, T: response columns.

Source: Shao et al., "DeepSeekMath", arXiv 2402.03300, algorithm 1; other sources are given with their choices.
"""

import time
from collections.abc import Mapping
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybrid_engine.distributed.processes import all_processes, get_world_size
from hybrid_engine.recipes import reward as reward_stage
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.rl.advantages import overlong_penalty, teacher_advantages, without_cut_off
from hybrid_engine.rl.losses import StepCounts, count_step
from hybrid_engine.rlhf.algorithms import (
    Coefficients,
    PolicyBatch,
    check_steps,
    choose_tokens,
    compute_advantages,
    compute_step_advantages,
    correction_weights,
    describe,
    next_coefficients,
    policy_figures,
    policy_objective,
)
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, Figures, TrainingPasses
from hybrid_engine.rlhf.batches.sequences import note_rows
from hybrid_engine.rlhf.data.prompts import Curriculum
from hybrid_engine.rlhf.experience.evaluation import (
    FollowedAnswers,
    answer_sums,
    follow,
    global_means,
    mean_sums,
    reference_sums,
    score_sum,
    show_comparison,
    step_means,
)
from hybrid_engine.rlhf.experience.partial_rollouts import OpenGroups, draw_whole
from hybrid_engine.rlhf.experience.policy import (
    Experience,
    TrainedPolicy,
    build_policy,
    evaluate_policy,
    has_gradient,
    present_batch,
    trained_rows,
)
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, GroupSource, Replay, ScoredGroups, warm_up
from hybrid_engine.rlhf.experience.start import Stages, Start, prepare
from hybrid_engine.rlhf.experience.teacher_loading import check_model_teacher, load_model_teacher
from hybrid_engine.rlhf.experience.teachers import ModelTeacher
from hybrid_engine.rlhf.options.reinforcement import GRPOConfig as Config
from hybrid_engine.rlhf.options.shared import (
    is_due,
    suitable_rate,
)
from hybrid_engine.rlhf.planning.comparison import follow_answers, write_result
from hybrid_engine.rlhf.runs.checkpoints import begin_run, load_checkpoints, save_checkpoints
from hybrid_engine.rlhf.runs.engine_config import Schedule, gradient_figures
from hybrid_engine.rlhf.runs.run_folder import CHECKPOINTS, METRICS, read_metrics
from hybrid_engine.rlhf.runs.run_log import RunLog, plot_metrics, say
from hybrid_engine.rlhf.runs.stages import Best, keep_highest, mix_seed, save_stage, seed_everything

PLOT_PANELS = {
    "reward": ["score", "held_out_pass_at_1"],
    "KL to the reference (nats)": ["kl_per_sequence"],
    "response length (tokens)": ["length"],
    "entropy (nats a token)": ["entropy_estimate"],
}
TEACHER_PANEL = {"KL to the teacher (nats a token)": ["teacher_kl_per_token"]}
SHOWN = [
    "score",
    "groups_without_variance",
    "length",
    "cut_off_share",
    "e2e_seconds",
    "generate_seconds",
    "training_seconds",
]


class RunState(NamedTuple):
    """State that passes from step to step in addition to the engine's, and into checkpoints."""

    coefficients: Coefficients
    step: int = 0
    """Number of steps done."""
    num_drawn: int = 0
    """Number of prompts taken so far."""
    best: Best = Best()
    """The highest held-out score of an evaluation."""
    curriculum: Mapping[str, torch.Tensor] | None = None
    """The state of a `Curriculum` at the last checkpoint; None without one."""
    replay: Mapping[int, Mapping[str, Any]] | None = None
    """The state of a `Replay` at the last checkpoint; None without one."""
    open_groups: Mapping[str, Any] | None = None
    """The state of the `OpenGroups` of all processes at the last checkpoint; None without partial rollouts."""

    @classmethod
    def loaded(cls, state: Mapping[str, Any], first: Coefficients) -> "RunState":
        """The state of a checkpoint; those of version 0.1.0 have the KL's weight alone of the coefficients."""
        rest = {name: value for name, value in state.items() if name not in ("kl_coef", "coefficients", "best")}
        coefficients = Coefficients(*state.get("coefficients", first._replace(kl=state.get("kl_coef", first.kl))))
        return cls(coefficients=coefficients, best=Best(*state["best"]), **rest)


def run(config: Config) -> Path:
    """Trains missing stages and then the actor; returns the folder of the final actor. Collective."""
    out = Path(config.out)
    config = begin_run(config, "grpo")
    if config.teacher is not None:
        check_model_teacher(config.teacher, config.model)
    start = prepare(config, Stages(sft_stage.run, reward_stage.run))
    config = start.config
    seed_everything(config.seed)
    num_updates = config.steps * config.epochs * (config.rollout_size * config.group_size // config.minibatch_size)
    schedule = Schedule.of(config, num_updates, "grpo")
    rate = config.learning_rate or suitable_rate(config, small=7e-4)
    policy = build_policy(config, start.source, rate, schedule)
    teacher = load_model_teacher(config, policy, start) if config.teacher is not None else None
    memory = follow_answers("grpo", config, start, policy, teachers=teacher.modules if teacher else ())
    say(policy.actor.report())
    say(schedule.describe())
    say("\n".join(describe(config.algorithm)))
    if config.teacher_alone:
        say("--teacher-alone: baseline and scale of the rewards have no effect, which are not learned from")

    options = AnswerSampling.of(config, config.group_size)
    num_prompts = config.rollout_size // get_world_size()
    warm_up(policy.actor, policy.tokenizer, options, num_prompts, start.answered.shortest)
    before = evaluate_policy(policy, start.held_out, start.rewards, config)
    followed = follow(out, policy.actor, policy.tokenizer, config.temperature, policy.sizes, before)
    carried = RunState(coefficients=Coefficients.first(config.algorithm))
    if config.resume:
        state = load_checkpoints({"actor": policy.actor}, out / CHECKPOINTS, config).state
        carried = RunState.loaded(state, carried.coefficients)
    started = time.perf_counter()
    log = RunLog(out, "GRPO", config.steps, config, carried.step)
    carried = train_loop(policy, teacher, start, config, log, carried, followed)
    seconds = time.perf_counter() - started
    after = followed.after(config.steps, partial(evaluate_policy, policy, start.held_out, start.rewards, config))

    show_comparison(before, after, out)
    result = {"before": before.figures, "after": after.figures, "seconds": seconds}
    write_result(out / "result.json", result | carried.best.result("score"), memory)
    panels = PLOT_PANELS if teacher is None else PLOT_PANELS | TEACHER_PANEL
    plot_metrics(read_metrics(out / METRICS), panels, out / "plot.png")
    save_stage(policy.actor, policy.tokenizer, out / "actor")
    return out / "actor"


def train_loop(
    policy: TrainedPolicy,
    teacher: ModelTeacher | None,
    start: Start,
    config: Config,
    log: RunLog,
    carried: RunState,
    followed: FollowedAnswers,
) -> RunState:
    """GRPO: groups of answers to a step's prompts, their advantages, and the updates from them."""
    actor, options = policy.actor, AnswerSampling.of(config, config.group_size)
    source = GroupSource(
        actor=actor,
        tokenizer=policy.tokenizer,
        rewards=start.rewards,
        rows=start.train,
        options=options,
        seed=config.seed,
        is_decoupled=config.algorithm.is_decoupled,
        learns_from_scores=teacher is None,
        curriculum=build_curriculum(config, len(start.train), carried),
        pass_score=config.pass_score,
        replay=build_replay(config, carried),
    )
    num_prompts, opened = config.rollout_size // get_world_size(), OpenGroups.restored(carried.open_groups)
    with log:
        for step in range(carried.step, config.steps):
            actor.eval()
            start.rewards.begin_step(step, config.steps)
            if config.partial_rollouts:
                num_left = num_prompts * (config.steps - step)
                groups, opened = draw_whole(
                    source, num_prompts, num_left, carried.num_drawn, step, opened, config.steps_of_staleness
                )
            else:
                groups = source.draw(num_prompts, config.algorithm.dynamic_sampling, carried.num_drawn, step)
            actor.train()
            rollout = groups.rollout
            figures = policy.routing_figures(rollout.sequences, rollout.logprobs, config.temperature)
            experience, found = build_experience(policy, groups, config, carried.coefficients.kl, teacher=teacher)
            figures |= found
            figures |= update(policy, experience, config, carried.coefficients, seed=mix_seed(config.seed, step))
            num_answers = config.rollout_size * config.group_size
            coefficients = next_coefficients(config.algorithm, carried.coefficients, figures, num_answers)
            carried = carried._replace(coefficients=coefficients, step=step + 1, num_drawn=groups.num_drawn)
            # Before an evaluation, whose latencies do not belong to training.
            figures = groups.figures | figures | actor.latency_stats()
            if is_due(config.eval_every, step, config.steps):
                evaluation = evaluate_policy(policy, start.held_out, start.rewards, config)
                followed.keep(step + 1, evaluation)
                figures |= {f"held_out_{name}": value for name, value in evaluation.figures.items()}
                score = evaluation.figures["score"]
                best = keep_highest(carried.best, score, step + 1, actor, policy.tokenizer, Path(config.out))
                carried = carried._replace(best=best)
            log.write(step, figures, SHOWN)
            if is_due(config.save_every, step, config.steps):
                curriculum = None if source.curriculum is None else source.curriculum.state()
                replay = None if source.replay is None else source.replay.state()
                open_groups = opened.state() if config.partial_rollouts else None
                carried = carried._replace(curriculum=curriculum, replay=replay, open_groups=open_groups)
                state = carried._asdict() | {"best": tuple(carried.best), "coefficients": tuple(coefficients)}
                save_checkpoints({"actor": actor}, Path(config.out) / CHECKPOINTS, step + 1, config, state)
    return carried


def build_curriculum(config: Config, num_prompts: int, carried: RunState) -> Curriculum | None:
    """The run's selection of prompts by pass rate, where `carried` left it; None if all are drawn."""
    if not config.pass_window:
        return None
    low, high = config.pass_window
    curriculum = Curriculum(num_prompts, low, high, config.revisit_after)
    if carried.curriculum is not None:
        curriculum.load(carried.curriculum)
    return curriculum


def build_replay(config: Config, carried: RunState) -> Replay | None:
    """The run's best answers so far, where `carried` left them; None if none are replayed."""
    if not config.replay_best:
        return None
    replay = Replay()
    replay.load(carried.replay or {})
    return replay


@torch.no_grad()
def build_experience(
    policy: TrainedPolicy, groups: ScoredGroups, config: Config, kl_coef: float, teacher: ModelTeacher | None = None
) -> tuple[Experience, dict[str, float]]:
    """Old, reference and teacher's log-probabilities and advantages of a step's groups."""
    algorithm, rollout, scores = config.algorithm, groups.rollout, groups.scores
    sequences, mask = rollout.sequences, rollout.sequences.response_mask
    if groups.step_rewards is not None:
        check_steps(algorithm)
    logprobs_ref = policy.reference_logprobs(sequences, config.temperature) if policy.has_reference else None
    # The ratio of an answer of earlier weights is to the sampler of that time, unless a correction weighs for it.
    corrects = groups.is_stale is not None and algorithm.correction != "none"
    logprobs_old, difference = policy.old_logprobs(
        sequences,
        rollout.logprobs,
        config.temperature,
        -1.0 if corrects else config.logprob_bound,
        groups.is_replayed if corrects else groups.is_earlier,
    )
    if algorithm.overlong_buffer:
        buffer = max(1, round(algorithm.overlong_buffer * config.max_new_tokens))
        scores = scores + overlong_penalty(mask.sum(dim=1), config.max_new_tokens, buffer, algorithm.overlong_factor)
    judged = mask & ~scores.isnan()[:, None]
    told = config.group_size, logprobs_old, logprobs_ref, judged, kl_coef
    if groups.step_rewards is not None:
        advantages = compute_step_advantages(algorithm, groups.step_rewards, *told)
    elif algorithm.is_decoupled:
        # The penalty of length is one more reward, of weight 1; without one it is constant and adds nothing.
        rewards = torch.cat([groups.rewards, (scores - groups.scores)[:, None]], dim=1)
        reward_weights = torch.tensor([*groups.reward_weights, 1.0], device=rewards.device)
        advantages = compute_advantages(algorithm, rewards, *told, all_processes(), reward_weights)
    else:
        advantages = compute_advantages(algorithm, scores, *told, all_processes())
    logprobs_teacher = teacher.logprobs(sequences, policy.sizes) if teacher is not None else None
    if logprobs_teacher is not None:
        judged = mask  # the teacher judges every answer
        taught = teacher_advantages(
            logprobs_old, logprobs_teacher, mask, config.weight_of_teacher, config.teacher_clamp
        )
        advantages = taught if config.teacher_alone else advantages + taught
    is_cut_off = torch.tensor(rollout.answers.is_cut_off, device=mask.device)
    learned = without_cut_off(judged, is_cut_off) if algorithm.mask_cut_off else judged
    weights = correction_weights(algorithm, difference, logprobs_old, rollout.logprobs, mask)
    batch = PolicyBatch(
        logprobs=logprobs_old,
        logprobs_old=logprobs_old,
        advantages=advantages,
        mask=learned,
        logprobs_ref=logprobs_ref,
        weights=weights,
        logprobs_sampler=rollout.logprobs,
    )
    entropy = policy.entropies(sequences, config.temperature) if algorithm.top_entropy < 1 else None
    batch = choose_tokens(algorithm, batch, entropy, all_processes())

    of_step = [groups.scores, scores]
    if groups.is_replayed is not None:
        of_step = [torch.where(groups.is_replayed, nan, part) for part in of_step]
    sums = answer_sums(rollout) | {"score": score_sum(of_step[0]), "shaped_score": score_sum(of_step[1])}
    if logprobs_ref is not None:
        sums |= reference_sums(rollout, logprobs_ref)
    if logprobs_teacher is not None:
        difference_of_logs = torch.where(mask, rollout.logprobs - logprobs_teacher, 0.0).sum().item()
        sums["teacher_kl_per_token"] = (difference_of_logs, float(mask.sum()))
    if weights is not None:
        sums["correction_weight"] = (torch.where(mask, weights, 0.0).sum().item(), float(mask.sum()))
    return Experience(sequences, rollout.logprobs, batch, groups.is_earlier), global_means(sums)


def update(
    policy: TrainedPolicy, experience: Experience, config: Config, coefficients: Coefficients, seed: int
) -> dict[str, float]:
    """`epochs` passes over the experience in reshuffled minibatches, an optimizer step on each.

    Returns:
        Means over the tokens that went through the model: loss, clip fraction, KL(old || new), ratio. `first_ratio` is
        the ratio before any weight changed, which should be 1 but for replayed answers. Gradient norm and learning rate
        are those of the last optimizer step. `trained_share` is the share of answers that went through the model; if it
        is 0, the other figures are absent and no weight changed.
    """
    actor, generator = policy.actor, torch.Generator().manual_seed(seed)
    parts: list[Figures] = []
    num_trained = num_rows = 0
    for _ in range(config.epochs):
        order = torch.randperm(len(experience.logprobs), generator=generator)
        for minibatch in order.split(config.minibatch_size // get_world_size()):
            step = count_step(experience.batch.mask[minibatch], config.max_new_tokens, all_processes())
            rate = actor.get_lr()[0]
            trained = trained_rows(has_gradient(config.algorithm, experience.rows(minibatch).batch).cpu())
            num_trained, num_rows = num_trained + len(trained), num_rows + len(minibatch)
            if not len(trained):
                actor.pass_step()
                continue
            chosen = experience.rows(minibatch[trained])
            present = torch.zeros_like(chosen.logprobs)
            passes = TrainingPasses([actor], chosen.sequences.items, policy.sizes)
            for rows in passes:
                with passes.fitting():
                    compute = partial(micro_batch_loss, actor, chosen, present, step, config, coefficients, rows)
                    actor.backward(passes.loss(compute))
            actor.step()
            found = passes.figures()
            if not parts:  # with the weights that sampled
                actor.observe_logprobs(chosen.logprobs, present, chosen.sampled_mask)
            parts += found
    figures = {**gradient_figures(actor), "learning_rate": rate}
    figures["trained_share"] = num_trained / num_rows
    return figures | (step_means(parts) | global_means({"first_ratio": parts[0]["ratio"]}) if parts else {})


def micro_batch_loss(
    actor: Any,
    minibatch: Experience,
    present: torch.Tensor,
    step: StepCounts,
    config: Config,
    coefficients: Coefficients,
    rows: list[int],
) -> tuple[torch.Tensor, DeviceFigures]:
    """The share of `rows` in the loss of a minibatch, and (sum, count) of each figure, for `global_means`.

    Writes the rows' log-probabilities into `present`, `[N, T]`.
    """
    batch = present_batch(actor, minibatch.rows(torch.tensor(rows)), config.algorithm, config.temperature)
    note_rows(present, rows, batch.logprobs)
    loss = policy_objective(config.algorithm, batch, step, coefficients)
    health = mean_sums(policy_figures(config.algorithm, batch), batch.mask)
    # A share of the minibatch's loss; the shares of all rows of all processes add up to 1.
    share = len(rows) / (len(minibatch.logprobs) * get_world_size())
    return loss, {"policy_loss": (loss.detach(), share), **health}
