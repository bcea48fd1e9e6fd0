"""Stage 3, and the whole job: PPO with actor, reference, critic and reward in one process on one set of actor weights.

    hybrid-engine ppo --out runs/docs

Missing stages are run first: `sft.py` makes the actor and the reference, `reward.py` the reward model and the critic's
first weights. Then, for each step: prompts -> engine.eval() -> engine.generate() -> engine.train() -> rewards, values
and reference log-probabilities -> advantages -> clipped updates of actor and critic. The learned reward alone is
trained on; PEP 257 as a rule (`pep257.py`) only measures the held-out prompts before and after.

Below `--out`: metrics.jsonl (one line per step), plot.png, samples.json, result.json and actor/, a Hugging Face folder.

B: this process's prompts of a step, P: prompt columns, T: response columns.
Conventions: Schulman et al., arXiv 1707.06347; Ouyang et al., arXiv 2203.02155; Huang et al., "The N Implementation
Details of RLHF with PPO" (2023). gamma 1, lambda 0.95; k1 KL in the reward; the score on the last response token.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.distributed.processes import default_device, gather_objects, get_rank, get_world_size
from hybrid_engine.recipes import reward as reward_stage
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.recipes.data.prompts import select_prompts
from hybrid_engine.recipes.data.rows import PromptRow
from hybrid_engine.recipes.data.sequences import (
    Sequences,
    in_parts,
    response_logprobs,
    response_values,
    split_by_length,
)
from hybrid_engine.recipes.experience.evaluation import (
    Evaluation,
    Sums,
    answer_sums,
    evaluate,
    global_means,
    judge_sums,
    reference_sums,
    show_comparison,
    step_means,
)
from hybrid_engine.recipes.experience.followed import keep_answers
from hybrid_engine.recipes.experience.rollout import Rollout, SamplingOptions, sample
from hybrid_engine.recipes.rewards.answers import Answers
from hybrid_engine.recipes.rewards.learned import build_critic
from hybrid_engine.recipes.rewards.loading import load_rewards
from hybrid_engine.recipes.rewards.rewards import Rewards
from hybrid_engine.recipes.rewards.scores import Scores, replace_cut_off, reward_figures
from hybrid_engine.recipes.runs.adapters import add_adapter
from hybrid_engine.recipes.runs.checkpoints import load_checkpoints, save_checkpoints
from hybrid_engine.recipes.runs.checks import (
    check_above,
    check_at_least,
    check_between,
    check_divides,
    check_finite,
)
from hybrid_engine.recipes.runs.engine_config import build_engine_config, largest_micro_batch
from hybrid_engine.recipes.runs.metrics_file import read_metrics
from hybrid_engine.recipes.runs.options import ResumeOptions, RolloutOptions
from hybrid_engine.recipes.runs.ppo_checks import check_ppo
from hybrid_engine.recipes.runs.run_folder import CHECKPOINTS, RUN_RESULTS
from hybrid_engine.recipes.runs.run_log import RunLog, plot_metrics, say, write_json
from hybrid_engine.recipes.runs.stages import (
    load_model,
    load_tokenizer,
    mix_seed,
    move_aside,
    save_stage,
    seed_everything,
)
from hybrid_engine.rl.advantages import gae, token_rewards, whiten
from hybrid_engine.rl.aggregation import token_mean
from hybrid_engine.rl.kl import kl_k1
from hybrid_engine.rl.losses import clipped_value_loss, explained_variance, policy_metrics, ppo_policy_loss

PLOT_PANELS = {
    "reward": ["score", "judge_pass_rate"],
    "KL to the reference (nats)": ["kl_per_sequence"],
    "response length (tokens)": ["length"],
}
SHOWN = ["score", "kl_per_sequence", "length", "e2e_seconds", "generate_seconds", "training_seconds"]
"""What a step's line says."""


@dataclass(frozen=True, kw_only=True)
class Config(RolloutOptions, ResumeOptions):
    """Trains a language model by PPO: it answers prompts, the answers are scored, its weights follow the scores.

        hybrid-engine ppo --out runs/docs
        hybrid-engine ppo --model Qwen/Qwen3-0.6B --dataset prompts.jsonl --reward my_rewards:score --out runs/mine

    What is missing is made first: the actor by `hybrid-engine sft`, the reward model by `hybrid-engine reward`. Left
    below --out: metrics.jsonl (one line per step), plot.png, samples.json (answers before and after), result.json,
    checkpoints/ and actor/, a Hugging Face folder. After an interruption the same command with --resume goes on from
    the last checkpoint.
    """

    model: str | None = None
    """Hugging Face name or folder of the first actor; default: the run's sft, trained if missing"""
    dataset: str | None = None
    """prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt"; default: the
    standard library's signatures"""
    reward: str | None = None
    """a reward-model folder, a rule such as number, or module:function (docs/rewards.md); default: the run's reward"""
    steps: int = 30
    """PPO steps: rollouts, each followed by the updates on it"""
    rollout_size: int = 64
    """prompts of a step over all processes"""
    minibatch_size: int = 32
    """responses of an optimizer step over all processes"""
    micro_batch_size: int = 16
    """responses of a forward pass on one process, at most"""
    ppo_epochs: int = 2
    """passes over each rollout"""
    temperature: float = 0.8
    actor_lr: float = 2e-4
    """peak learning rate of the actor"""
    critic_lr: float = 5e-4
    """peak learning rate of the critic"""
    kl_coef: float = 0.07
    """weight of the KL penalty in the reward, per nat"""
    gamma: float = 1.0
    """discount of later rewards"""
    lam: float = 0.95
    """lambda of generalised advantage estimation"""
    clip: float = 0.2
    """how far the probability ratio counts from 1"""
    value_clip: float = 0.5
    """how far a value counts from the one at the rollout"""
    missing_eos_score: float = -3.0
    """score of a response that was cut off at max_new_tokens, in place of the reward"""
    lora_rank: int = 0
    """train a LoRA adapter of this rank on the actor; 0 trains all weights"""
    kl_bound: float = 6.0
    """mean KL to the reference, in nats per response, that the held-out prompts should stay under"""

    def __post_init__(self) -> None:
        ResumeOptions.__post_init__(self)
        RolloutOptions.__post_init__(self)
        for name in ("steps", "minibatch_size", "micro_batch_size", "ppo_epochs"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("kl_coef", "lora_rank", "kl_bound"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("actor_lr", "critic_lr", "clip", "value_clip"):
            check_above(name, getattr(self, name), 0)
        for name in ("gamma", "lam"):
            check_between(name, getattr(self, name), 0, 1)
        check_finite("missing_eos_score", self.missing_eos_score)
        check_divides("rollout_size", self.rollout_size, self.minibatch_size)


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The four models of the run."""

    actor: Any
    """HybridEngine, trained."""
    critic: Any
    """ZeroEngine of a ValueModel, trained."""
    reference: torch.nn.Module
    """The actor as it was at the start, frozen."""
    rewards: Rewards
    tokenizer: PreTrainedTokenizerBase
    """The actor's and the critic's."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A rollout with everything an update needs; all but `sequences` are `[B, T]` fp32."""

    sequences: Sequences
    logprobs_old: torch.Tensor
    values_old: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def rows(self, index: torch.Tensor) -> "Experience":
        """The rows `index`, without the columns that are padding in all of them."""
        sequences = self.sequences.rows(index)
        columns = sequences.response_mask.shape[1]
        return Experience(
            sequences=sequences,
            logprobs_old=self.logprobs_old[index, :columns],
            values_old=self.values_old[index, :columns],
            advantages=self.advantages[index, :columns],
            returns=self.returns[index, :columns],
        )


def run(config: Config) -> Path:
    """Runs the missing stages and PPO; returns the folder of the final actor. Collective."""
    out = Path(config.out)
    hybrid_engine.init_distributed()
    train_prompts, held_out_prompts = check_ppo(config)
    if config.restart:
        move_aside(out, RUN_RESULTS)
    source, reward_source = run_earlier_stages(config)
    seed_everything(config.seed)
    roles = build_roles(config, source, reward_source)
    say(roles.actor.report())

    before = evaluate_held_out(roles, held_out_prompts, config)
    keep_answers(out, 0, before)
    first_step = load_checkpoints(engines_of(roles), out / CHECKPOINTS, config).step if config.resume else 0
    started = time.perf_counter()
    log = RunLog(out, "PPO", config.steps, config, first_step)
    train_loop(roles, train_prompts, config, log, first_step)
    seconds = time.perf_counter() - started
    after = evaluate_held_out(roles, held_out_prompts, config)
    keep_answers(out, config.steps, after)

    show_comparison(before, after, out)
    kl = after.figures["kl_per_sequence"]
    where = "under" if kl < config.kl_bound else "OVER"
    say(f"KL to the reference: {kl:.2f} nats per response, {where} the bound {config.kl_bound}")
    write_json(out / "result.json", {"before": before.figures, "after": after.figures, "ppo_seconds": seconds})
    plot_metrics(read_metrics(out / "metrics.jsonl"), PLOT_PANELS, out / "plot.png")
    save_stage(roles.actor, roles.tokenizer, out / "actor")
    return out / "actor"


def run_earlier_stages(config: Config) -> tuple[str, str]:
    """Runs what is missing of SFT and reward model; returns the sources of the actor and of the reward."""
    shared: dict[str, Any] = {
        "out": config.out,
        "seed": config.seed,
        "zero_stage": config.zero_stage,
        "tracker": config.tracker,
        "metric_names": config.metric_names,
    }
    source = config.model or str(sft_stage.run(sft_stage.Config(**shared)))
    reward = config.reward or str(reward_stage.run(reward_stage.Config(**shared, model=config.model)))
    return source, reward


def build_roles(config: Config, source: str, reward_source: str) -> Roles:
    """Loads the four models, without dropout, and gives actor and critic an engine each."""
    tokenizer = load_tokenizer(source)
    reference = load_model(AutoModelForCausalLM, source).to(default_device()).eval().requires_grad_(False)
    model = add_adapter(load_model(AutoModelForCausalLM, source), config.lora_rank)
    max_tokens = config.max_prompt_tokens + config.max_new_tokens
    actor, *_ = hybrid_engine.initialize(model=model, config=engine_config(config, config.actor_lr, max_tokens))
    critic, *_ = hybrid_engine.initialize(
        model=build_critic(source, reward_source), config=engine_config(config, config.critic_lr, None)
    )
    return Roles(
        actor=actor, critic=critic, reference=reference, rewards=load_rewards([reward_source]), tokenizer=tokenizer
    )


def engines_of(roles: Roles) -> dict[str, Any]:
    """What is trained, by the names of its checkpoints."""
    return {"critic": roles.critic, "actor": roles.actor}


def engine_config(config: Config, learning_rate: float, max_out_tokens: int | None) -> dict[str, Any]:
    """The DeepSpeed config of the actor, or without `max_out_tokens` of the critic."""
    num_steps = config.steps * config.ppo_epochs * (config.rollout_size // config.minibatch_size)
    per_process = config.minibatch_size // get_world_size()
    return build_engine_config(
        batch_size=config.minibatch_size,
        micro_batch_size=largest_micro_batch(per_process, config.micro_batch_size),
        learning_rate=learning_rate,
        num_steps=num_steps,
        warmup_steps=min(4, num_steps),
        zero_stage=config.zero_stage,
        max_out_tokens=max_out_tokens,
        exact=config.exact,
    )


def sampling_options(config: Config) -> SamplingOptions:
    """How the actor answers, in training and in evaluation."""
    return SamplingOptions(
        max_prompt_tokens=config.max_prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
    )


def judge(roles: Roles, config: Config, answers: Answers) -> Scores:
    """The rewards of `answers`; those that were cut off have `missing_eos_score`."""
    return replace_cut_off(roles.rewards(answers), answers, config.missing_eos_score)


def reference_logprobs(roles: Roles, config: Config, rollout: Rollout) -> torch.Tensor:
    """`[B, T]`."""
    return in_parts(partial(response_logprobs, roles.reference, temperature=config.temperature), rollout.sequences)


def rollout_sums(rollout: Rollout, logprobs_ref: torch.Tensor, config: Config) -> Sums:
    """What a rollout says by itself and against the reference, and by the judge where it applies."""
    sums = answer_sums(rollout) | reference_sums(rollout, logprobs_ref)
    return sums | judge_sums(rollout) if config.dataset is None else sums


def evaluate_held_out(roles: Roles, prompts: list[PromptRow], config: Config) -> Evaluation:
    """One answer to each held-out prompt."""
    return evaluate(
        roles.actor,
        roles.tokenizer,
        prompts,
        partial(judge, roles, config),
        sampling_options(config),
        measure=lambda rollout: rollout_sums(rollout, reference_logprobs(roles, config, rollout), config),
    )


def train_loop(roles: Roles, prompts: list[PromptRow], config: Config, log: RunLog, first_step: int) -> None:
    """PPO: one rollout a step, several passes over it."""
    with log:
        for step in range(first_step, config.steps):
            chosen = select_prompts(len(prompts), step * config.rollout_size, config.rollout_size, config.seed)
            mine = [prompts[index] for index in chosen[get_rank() :: get_world_size()]]

            roles.actor.eval()
            rollout = sample(
                roles.actor, roles.tokenizer, mine, sampling_options(config), seed=mix_seed(config.seed, step)
            )
            roles.actor.train()

            experience, figures = build_experience(roles, rollout, config)
            figures |= update(roles, experience, rollout.logprobs, config, seed=mix_seed(config.seed, step))
            log.write(step, figures | roles.actor.latency_stats(), SHOWN)
            if config.save_every and (step + 1) % config.save_every == 0:
                save_checkpoints(engines_of(roles), Path(config.out) / CHECKPOINTS, step + 1, config)


@torch.no_grad()
def build_experience(roles: Roles, rollout: Rollout, config: Config) -> tuple[Experience, dict[str, float]]:
    """Reference log-probabilities, values, rewards and advantages of a rollout; all processes whiten together."""
    sequences, mask = rollout.sequences, rollout.sequences.response_mask
    logprobs_ref = reference_logprobs(roles, config, rollout)
    values = in_parts(partial(response_values, roles.critic), sequences)
    logprobs_old = old_logprobs(roles, rollout, config)

    scores = judge(roles, config, rollout.answers)
    rewards = reward_tokens(scores, kl_k1(logprobs_old, logprobs_ref), mask, config.kl_coef)
    advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
    whitened = whiten(advantages, mask, shift_mean=True, group=dist.group.WORLD if get_world_size() > 1 else None)

    experience = Experience(
        sequences=sequences, logprobs_old=logprobs_old, values_old=values, advantages=whitened, returns=returns
    )
    sums = {
        "score": (sum(scores.total), len(scores.total)),
        **rollout_sums(rollout, logprobs_ref, config),
        "reward_with_kl": (rewards.sum().item(), len(scores.total)),
        "value_explained_variance": (explained_variance(values, returns, mask).item(), 1.0),
    }
    return experience, global_means(sums) | reward_figures(scores)


def reward_tokens(scores: Scores, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """`[B, T]`: the KL penalty, and each score on the last token or, of a process reward, where its numbers stand."""
    if scores.per_token is None:
        return token_rewards(torch.tensor(scores.total, device=kl.device), kl, mask, kl_coef)
    penalties = token_rewards(torch.zeros(len(kl), device=kl.device), kl, mask, kl_coef)
    width = mask.shape[1]
    rows = [numbers + [0.0] * (width - len(numbers)) for numbers in scores.per_token]
    return penalties + torch.tensor(rows, device=kl.device)


def old_logprobs(roles: Roles, rollout: Rollout, config: Config) -> torch.Tensor:
    """`[B, T]`: the sampler's log-probabilities if they are known to be the trainer's, else a pass of the trainer."""
    difference = roles.actor.logprob_difference
    if difference is not None and difference.mean <= config.logprob_bound:
        return rollout.logprobs
    return in_parts(partial(response_logprobs, roles.actor, temperature=config.temperature), rollout.sequences)


def update(
    roles: Roles, experience: Experience, logprobs_rollout: torch.Tensor, config: Config, seed: int
) -> dict[str, float]:
    """`ppo_epochs` passes over the experience in reshuffled minibatches, an optimizer step of both engines on each.

    Returns:
        Means over the update's tokens: losses, clip fraction, KL(old || new), ratio. `first_ratio` is the ratio before
        any weight changed, 1 when all is well. The gradient norms are those of the last optimizer step.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(experience.sequences.input_ids)
    parts: list[dict[str, tuple[float, float]]] = []
    for _ in range(config.ppo_epochs):
        for minibatch in torch.randperm(num_rows, generator=generator).split(config.minibatch_size // get_world_size()):
            num_tokens = sum(gather_objects(int(experience.sequences.response_mask[minibatch].sum())))
            for rows in split_by_length(experience.sequences, minibatch, roles.actor.train_micro_batch_size_per_gpu()):
                batch = experience.rows(rows)
                observed = None if parts else logprobs_rollout[rows, : batch.advantages.shape[1]]
                parts.append(train_micro_batch(roles, batch, num_tokens, config, observed))
    figures = step_means(parts) | global_means({"first_ratio": parts[0]["ratio"]})
    norms = {
        "actor_grad_norm": roles.actor.get_global_grad_norm(),
        "critic_grad_norm": roles.critic.get_global_grad_norm(),
    }
    return figures | norms


def train_micro_batch(
    roles: Roles, batch: Experience, num_tokens: int, config: Config, logprobs_rollout: torch.Tensor | None
) -> dict[str, tuple[float, float]]:
    """Forward, backward and step of actor and critic on some rows of a minibatch of `num_tokens` response tokens.

    Returns:
        (sum, count) over this process's tokens of each figure, for `global_means`.
    """
    mask = batch.sequences.response_mask
    # The losses are shares of the minibatch's mean; the engine divides by the micro-batches and averages processes.
    scale = roles.actor.gradient_accumulation_steps() * get_world_size()

    logprobs = response_logprobs(roles.actor, batch.sequences, config.temperature)
    if logprobs_rollout is not None:
        roles.actor.observe_logprobs(logprobs_rollout, logprobs, mask)
    policy_losses = ppo_policy_loss(logprobs, batch.logprobs_old, batch.advantages, config.clip, config.clip)
    roles.actor.backward(token_mean(policy_losses, mask, num_tokens) * scale)
    roles.actor.step()

    values = response_values(roles.critic, batch.sequences)
    value_losses = clipped_value_loss(values, batch.values_old, batch.returns, config.value_clip)
    roles.critic.backward(token_mean(value_losses, mask, num_tokens) * scale)
    roles.critic.step()

    count = float(mask.sum())
    health = policy_metrics(logprobs, batch.logprobs_old, batch.advantages, mask, config.clip, config.clip)
    return {
        "policy_loss": (token_mean(policy_losses, mask, 1).item(), count),
        "value_loss": (token_mean(value_losses, mask, 1).item(), count),
        **{name: (mean.item() * count, count) for name, mean in health.items()},
    }
