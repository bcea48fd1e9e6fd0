"""PPO with actor, reference, critic and reward in one process on one set of actor weights; runs all three stages.

    hybrid-engine ppo --out runs/docs

Missing stages run first: `sft.py` trains the actor, which is also the reference, and `reward.py` the reward model and
the critic's first weights. Then, for each step: prompts -> engine.eval() -> engine.generate() -> engine.train() ->
rewards, values and reference log-probabilities -> advantages -> clipped updates of actor and critic. Only the learned
reward is trained on; PEP 257 as a rule (`tasks/stdlib_docs.py`) measures the held-out prompts before and after.

Writes to `--out`: metrics.jsonl (one line per step), plot.png, samples.json, result.json, best/ and actor/, Hugging
Face folders.

B: this process's prompts of a step, T: response columns.

Conventions: Schulman et al., arXiv 1707.06347; Ouyang et al., arXiv 2203.02155; Huang et al., "The N Implementation
Details of RLHF with PPO" (2023). gamma 1, lambda 0.95; k1 KL in the reward; the score on the last response token.
"""

import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hybrid_engine.distributed.processes import all_processes, gather_objects, get_rank, get_world_size
from hybrid_engine.recipes import reward as reward_stage
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.rl.advantages import gae, whiten
from hybrid_engine.rl.estimates import kl_k1
from hybrid_engine.rl.losses import clipped_value_loss, explained_variance, policy_metrics, ppo_policy_loss, token_mean
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, TrainingPasses
from hybrid_engine.rlhf.batches.sequences import in_parts, note_rows, response_logprobs, response_values
from hybrid_engine.rlhf.data.prompts import select_prompts
from hybrid_engine.rlhf.experience.evaluation import (
    FollowedAnswers,
    follow,
    global_means,
    mean_sums,
    score_sum,
    show_comparison,
    step_means,
)
from hybrid_engine.rlhf.experience.partial_rollouts import OpenGroups, answer_whole, num_to_begin
from hybrid_engine.rlhf.experience.roles import (
    CriticExperience,
    Roles,
    build_roles,
    evaluate_held_out,
    judge,
    reward_tokens,
    rollout_sums,
)
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, GroupSource, Rollout, sample, warm_up
from hybrid_engine.rlhf.experience.start import SUMMARIES, Stages, Start, prepare
from hybrid_engine.rlhf.options.reinforcement import PPOConfig as Config
from hybrid_engine.rlhf.options.shared import (
    is_due,
    suitable_rate,
)
from hybrid_engine.rlhf.planning.comparison import follow_answers, fuses_at_once, write_result
from hybrid_engine.rlhf.rewards.scores import reward_figures
from hybrid_engine.rlhf.runs.checkpoints import SavedRun, begin_run, load_checkpoints, save_checkpoints
from hybrid_engine.rlhf.runs.engine_config import Schedule
from hybrid_engine.rlhf.runs.run_folder import CHECKPOINTS, METRICS, read_metrics
from hybrid_engine.rlhf.runs.run_log import RunLog, plot_metrics, say
from hybrid_engine.rlhf.runs.stages import Best, keep_highest, mix_seed, save_stage, seed_everything

PLOT_PANELS = {
    "reward": ["score", "judge_pass_rate"],
    "KL to the reference (nats)": ["kl_per_sequence"],
    "response length (tokens)": ["length"],
}
SHOWN = ["score", "kl_per_sequence", "length", "cut_off_share", "e2e_seconds", "generate_seconds", "training_seconds"]
"""Figures in the log line of a step."""


def run(config: Config) -> Path:
    """Runs the missing stages and PPO; returns the folder of the final actor. Collective."""
    out = Path(config.out)
    config = begin_run(config, "ppo")
    if config.missing_eos_score is not None:
        say(
            "--missing-eos-score is deprecated and will be removed in the next version: with rewards on another scale "
            "it may reward answers that do not stop; use --missing-eos-penalty, which is subtracted from the reward"
        )
    start = prepare(config, Stages(sft_stage.run, reward_stage.run), SUMMARIES, has_critic=True)
    config = start.config
    seed_everything(config.seed)
    actor_rate = config.actor_lr or suitable_rate(config, small=1e-4)
    critic_rate = config.critic_lr or (1e-5 if config.model else 5e-4)
    schedule = Schedule.of(config, config.num_updates, "ppo")
    at_once = config.shared_base and fuses_at_once("ppo", config, start)
    roles = build_roles(config, start, actor_rate, critic_rate, schedule, fuses_at_once=at_once)
    memory = follow_answers("ppo", config, start, roles.policy, roles.critic)
    say(roles.policy.actor.report())
    say(schedule.describe())

    num_prompts = config.rollout_size // get_world_size()
    options = AnswerSampling.of(config)
    warm_up(roles.policy.actor, roles.policy.tokenizer, options, num_prompts, start.answered.shortest)
    before = evaluate_held_out(roles, start, config)
    policy = roles.policy
    followed = follow(out, policy.actor, policy.tokenizer, config.temperature, policy.sizes, before)
    saved = load_checkpoints(roles.engines, out / CHECKPOINTS, config) if config.resume else SavedRun()
    started = time.perf_counter()
    log = RunLog(out, "PPO", config.steps, config, saved.step)
    state = dict(saved.state)
    opened = OpenGroups.restored(state.pop("open_groups", None))
    best = train_loop(roles, start, config, log, saved.step, Best(**state), followed, opened)
    seconds = time.perf_counter() - started
    after = followed.after(config.steps, partial(evaluate_held_out, roles, start, config))

    show_comparison(before, after, out)
    kl, bound = after.figures["kl_per_sequence"], config.kl_bound
    say(f"KL to the reference: {kl:.2f} nats per response, {'under' if kl < bound else 'OVER'} the bound {bound}")
    result = {"before": before.figures, "after": after.figures, "ppo_seconds": seconds}
    write_result(out / "result.json", result | best.result("score"), memory)
    plot_metrics(read_metrics(out / METRICS), PLOT_PANELS, out / "plot.png")
    save_stage(roles.policy.actor, roles.policy.tokenizer, out / "actor")
    return out / "actor"


def train_loop(
    roles: Roles,
    start: Start,
    config: Config,
    log: RunLog,
    first_step: int,
    best: Best,
    followed: FollowedAnswers,
    opened: OpenGroups,
) -> Best:
    """PPO: one rollout per step, several passes over it. Returns the best evaluation of the whole run."""
    actor, prompts, options = roles.policy.actor, start.train, AnswerSampling.of(config)
    out, num_prompts = Path(config.out), config.rollout_size // get_world_size()
    source = GroupSource(
        actor=actor,
        tokenizer=roles.policy.tokenizer,
        rewards=roles.rewards,
        rows=prompts,
        options=options,
        seed=config.seed,
    )
    with log:
        for step in range(first_step, config.steps):
            seed = mix_seed(config.seed, step)

            actor.eval()
            roles.rewards.begin_step(step, config.steps)
            if config.partial_rollouts:
                count = num_to_begin(num_prompts, len(opened.rows), num_prompts * (config.steps - step))
                indices = own_prompts(len(prompts), opened.num_begun, count, config.seed)
                whole, opened = answer_whole(source, indices, num_prompts, step, opened, config.steps_of_staleness)
                rollout, is_stale, figures = whole.rollout, whole.is_stale, whole.figures
            else:
                indices = own_prompts(len(prompts), step * num_prompts, num_prompts, config.seed)
                rollout = sample(actor, roles.policy.tokenizer, [prompts[index] for index in indices], options, seed)
                is_stale, figures = None, {}
            actor.train()

            figures |= roles.policy.routing_figures(rollout.sequences, rollout.logprobs, config.temperature)
            experience, found = build_experience(roles, rollout, config, is_stale)
            figures |= found | update(roles, experience, config, seed)
            figures |= actor.latency_stats()  # before an evaluation, whose latencies are not training's
            if is_due(config.eval_every, step, config.steps):
                evaluation = evaluate_held_out(roles, start, config)
                followed.keep(step + 1, evaluation)
                figures |= {f"held_out_{name}": value for name, value in evaluation.figures.items()}
                best = keep_highest(best, evaluation.figures["score"], step + 1, actor, roles.policy.tokenizer, out)
            log.write(step, figures, SHOWN)
            if is_due(config.save_every, step, config.steps):
                open_groups = {"open_groups": opened.state()} if config.partial_rollouts else {}
                save_checkpoints(roles.engines, out / CHECKPOINTS, step + 1, config, best._asdict() | open_groups)
    return best


def own_prompts(num_prompts: int, first: int, count: int, seed: int) -> list[int]:
    """Indices of this process's next `count` prompts, of which each process had `first` before."""
    size = get_world_size()
    return select_prompts(num_prompts, first * size, count * size, seed)[get_rank() :: size]


@torch.no_grad()
def build_experience(
    roles: Roles, rollout: Rollout, config: Config, is_stale: torch.Tensor | None = None
) -> tuple[CriticExperience, dict[str, float]]:
    """Reference log-probabilities, values, rewards and advantages of a rollout; whitens over all processes.

    `is_stale`: `[N]` bool, True for answers of earlier weights, whose ratio is to the sampler of that time.
    """
    sequences, mask = rollout.sequences, rollout.sequences.response_mask
    logprobs_ref = roles.policy.reference_logprobs(sequences, config.temperature)
    values = in_parts(response_values, roles.critic, sequences, roles.policy.sizes)
    logprobs_old, _ = roles.policy.old_logprobs(
        sequences, rollout.logprobs, config.temperature, config.logprob_bound, is_stale
    )

    scores = judge(roles, config, rollout.answers)
    totals = torch.tensor(scores.total, device=mask.device)
    learned = mask & ~totals.isnan()[:, None]  # excludes answers that no reward judged
    rewards = reward_tokens(scores, kl_k1(logprobs_old, logprobs_ref), mask, config.kl_coef)
    rewards = torch.where(learned, rewards, 0.0)
    advantages, returns = gae(rewards, values, learned, config.gamma, config.lam)
    explained = explained_variance(values, returns, learned, all_processes()).item()
    experience = CriticExperience(
        sequences=replace(sequences, response_mask=learned),
        logprobs=rollout.logprobs,
        logprobs_old=logprobs_old,
        values_old=values,
        advantages=whiten(advantages, learned, shift_mean=True, group=all_processes()),
        returns=returns,
        is_stale=is_stale,
    )
    sums = {
        "score": score_sum(totals),
        **rollout_sums(rollout, logprobs_ref, config),
        "reward_with_kl": (rewards.sum().item(), score_sum(totals)[1]),
        "value_explained_variance": (explained, 1.0) if math.isfinite(explained) else (0.0, 0.0),
    }
    return experience, global_means(sums) | reward_figures(scores)


def update(roles: Roles, experience: CriticExperience, config: Config, seed: int) -> dict[str, float]:
    """`ppo_epochs` passes over the experience in reshuffled minibatches, an optimizer step of both engines on each.

    Returns:
        Means over the update's tokens: losses, clip fraction, KL(old || new), ratio. `first_ratio` is the ratio before
        any weight changed, which should be 1. Gradient norms and learning rates are those of the last optimizer step.
    """
    generator = torch.Generator().manual_seed(seed)
    actor, critic, num_rows = roles.policy.actor, roles.critic, len(experience.logprobs)
    engines = [*reversed(roles.engines.values())]  # the actor first; roles on a shared base have one engine
    parts: list[dict[str, tuple[float, float]]] = []
    for _ in range(config.ppo_epochs):
        for minibatch in torch.randperm(num_rows, generator=generator).split(config.minibatch_size // get_world_size()):
            num_tokens = max(1, sum(gather_objects(int(experience.sequences.response_mask[minibatch].sum()))))
            chosen = experience.rows(minibatch)
            present = torch.zeros_like(chosen.logprobs)
            rates = roles.learning_rates()
            passes = TrainingPasses(engines, chosen.sequences.items, roles.policy.sizes)
            for rows in passes:
                with passes.fitting():
                    compute = partial(policy_loss, roles, chosen, present, num_tokens, config, rows)
                    actor.backward(passes.loss(compute))
                    critic.backward(passes.loss(partial(value_loss, roles, chosen, num_tokens, config, rows)))
            for engine in engines:
                engine.step()
            found = passes.figures()
            if not parts:  # with the weights that sampled
                actor.observe_logprobs(chosen.logprobs, present, chosen.sampled_mask)
            parts += found
    figures = step_means(parts) | global_means({"first_ratio": parts[0]["ratio"]})
    return figures | roles.gradient_norms() | rates


def policy_loss(
    roles: Roles, minibatch: CriticExperience, present: torch.Tensor, num_tokens: int, config: Config, rows: list[int]
) -> tuple[torch.Tensor, DeviceFigures]:
    """The share of `rows` in the actor's loss on a minibatch of `num_tokens` tokens; fills their rows of `present`."""
    batch = minibatch.rows(torch.tensor(rows))
    mask = batch.sequences.response_mask
    logprobs = response_logprobs(roles.policy.actor, batch.sequences, config.temperature)
    note_rows(present, rows, logprobs)
    losses = ppo_policy_loss(logprobs, batch.logprobs_old, batch.advantages, config.clip, config.clip)
    health = policy_metrics(logprobs, batch.logprobs_old, batch.advantages, mask, config.clip, config.clip)
    sums = {"policy_loss": (token_mean(losses.detach(), mask, 1), mask.sum()), **mean_sums(health, mask)}
    return token_mean(losses, mask, num_tokens), sums


def value_loss(
    roles: Roles, minibatch: CriticExperience, num_tokens: int, config: Config, rows: list[int]
) -> tuple[torch.Tensor, DeviceFigures]:
    """The share of `rows` in the critic's loss on a minibatch of `num_tokens` tokens."""
    batch = minibatch.rows(torch.tensor(rows))
    mask = batch.sequences.response_mask
    values = response_values(roles.critic, batch.sequences)
    losses = clipped_value_loss(values, batch.values_old, batch.returns, config.value_clip)
    return token_mean(losses, mask, num_tokens), {"value_loss": (token_mean(losses.detach(), mask, 1), mask.sum())}
