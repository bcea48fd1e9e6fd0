"""The models of PPO: actor with reference, critic and rewards, each with its own weights or as adapters on one base."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

import hybrid_engine
from hybrid_engine.checkpoint.export import without_renamed_attribute_warning
from hybrid_engine.containers.device import send_to_device
from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.optim.optimizer import APART
from hybrid_engine.rl.advantages import token_rewards
from hybrid_engine.rlhf.batches.head_log_probs import token_values
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.passes import RunPasses
from hybrid_engine.rlhf.batches.sequences import (
    Sequences,
    build_sequences,
    model_inputs,
    packed_for,
    pad_numbers,
    recompute_activations,
)
from hybrid_engine.rlhf.experience.evaluation import Evaluation, Sums, answer_sums, evaluate, judge_sums, reference_sums
from hybrid_engine.rlhf.experience.policy import (
    TrainedPolicy,
    build_policy,
    engine_config_of,
    playing,
    replay_where_asked,
)
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, Rollout
from hybrid_engine.rlhf.experience.start import Start
from hybrid_engine.rlhf.options.reinforcement import PPOConfig
from hybrid_engine.rlhf.rewards.learned import (
    ROWS_PER_PASS,
    LearnedReward,
    RewardAdapter,
    build_critic,
    names_model,
    read_reward_adapter,
)
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.rewards.scores import Answers, Scores, penalise_cut_off, replace_cut_off
from hybrid_engine.rlhf.runs.engine_config import Schedule, scaling_figures
from hybrid_engine.rlhf.runs.run_checks import lora_config
from hybrid_engine.rlhf.runs.stages import load_model, load_tokenizer, num_positions

ACTOR, CRITIC, HEADS = "actor", "critic", "heads"
TRAINED = (ACTOR, CRITIC)
"""The roles that have a learning rate and a gradient norm each, in the order of the optimizer's groups."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The models of the run."""

    policy: TrainedPolicy
    """The actor, which is trained, and its reference, the actor at the start."""
    critic: Any
    """ZeroEngine of a ValueModel, which is trained; or an `AdapterRole` of the actor's engine."""
    rewards: Rewards

    @property
    def engines(self) -> dict[str, Any]:
        """Engines that are trained, by the names of their checkpoints: a single one if the roles share a base."""
        critic = {} if isinstance(self.critic, AdapterRole) else {"critic": self.critic}
        return {**critic, "actor": self.policy.actor}

    def gradient_norms(self) -> dict[str, Any]:
        """Gradient norms of actor and critic at the last optimizer step, and fp16's figures, by their metric names."""
        norms = (role.get_global_grad_norm() for role in self._trained())
        figures = dict(zip(("actor_grad_norm", "critic_grad_norm"), norms, strict=True))
        for name, engine in self.engines.items():
            figures |= scaling_figures(engine, f"{name}_")
        return figures

    def learning_rates(self) -> dict[str, float]:
        """Learning rates of actor and critic at the next optimizer step, by their metric names."""
        rates = (role.get_lr()[0] for role in self._trained())
        return dict(zip(("learning_rate", "critic_learning_rate"), rates, strict=True))

    def _trained(self) -> tuple[Any, Any]:
        is_shared = isinstance(self.critic, AdapterRole)
        return AdapterRole(self.policy.actor, ACTOR) if is_shared else self.policy.actor, self.critic


def build_roles(
    config: PPOConfig,
    start: Start,
    actor_rate: float,
    critic_rate: float,
    schedule: Schedule,
    *,
    fuses_at_once: bool = False,
) -> Roles:
    """Loads the models, without dropout, and gives actor and critic an engine each. Collective.

    Args:
        config: as in `build_policy`.
        actor_rate: peak of the actor's learning rate.
        critic_rate: peak of the critic's.
        schedule: of both.
        start: the sources of the models; the critic begins as the first reward model that reads the actor's tokens.
        fuses_at_once: as in `build_roles_on_shared_base`; unused without a shared base.
    """
    if config.shared_base:
        policy, role, rewards = build_roles_on_shared_base(
            config, start.source, start.rewards, (actor_rate, critic_rate), schedule, fuses_at_once=fuses_at_once
        )
        return Roles(policy=policy, critic=role, rewards=rewards)
    policy = build_policy(config, start.source, actor_rate, schedule)
    critic, *_ = hybrid_engine.initialize(
        model=recompute_activations(build_critic(start.source, start.rewards.specs), config),
        config=engine_config_of(config, critic_rate, generates=False),
        lr_scheduler=schedule.build,
    )
    pack_where_exact(critic, config)
    critic.train()  # loaded for evaluation, in which transformers does not recompute activations
    return Roles(policy=policy, critic=critic, rewards=start.rewards)


class AdapterRole:
    """A role that computes a number per token, with an adapter and a head of this name in `engine`'s model.

    It is called like a `ValueModel` and trained like an engine, but the engine itself takes the optimizer steps.
    """

    def __init__(self, engine: Any, name: str):
        self.engine, self.name = engine, name

    @property
    def module(self) -> nn.Module:
        """The base with all adapters."""
        return self.engine.module

    def __call__(self, batch: Sequences) -> torch.Tensor:
        """`[B, P+T]` fp32; values at padding are undefined. Collective if the base is sharded."""
        packed = packed_for(self.engine, batch)
        module = self.engine.module
        with playing(module, self.name):
            values = token_values(self.engine, getattr(module, HEADS)[self.name], model_inputs(batch, packed))
        return values if packed is None else packed.gather(values, batch.attention_mask.bool())

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """The engine's backward pass with this role's adapter, so that recomputed activations equal the first ones."""
        with playing(self.engine.module, self.name):
            return self.engine.backward(loss)

    def get_global_grad_norm(self) -> float | None:
        """Norm of this role's gradients at the last step; None before the first step."""
        return dict(zip(TRAINED, self.engine.optimizer.grad_norms, strict=False)).get(self.name)

    def get_lr(self) -> list[float]:
        """The learning rate of this role's parameters."""
        return [self.engine.get_lr()[TRAINED.index(self.name)]]


class SharedReward:
    """A reward model on a base that other roles use, whose weights may be sharded over the processes; collective."""

    def __init__(self, reward: LearnedReward):
        self.reward = reward

    @torch.no_grad()
    def __call__(self, answers: Answers) -> list[float]:
        """Scores as from `LearnedReward`; processes with fewer answers make as many passes as the others.

        Raises:
            ValueError: as `LearnedReward` does, on all processes.
        """

        def batches(rows: int) -> list[Sequences]:
            mine = agree(lambda: self.reward.batches(answers, rows))
            spare = build_sequences([[0]], [[0]], 0, default_device())
            return [*mine, *[spare] * (max(gather_objects(len(mine))) - len(mine))]

        parts = self.reward.sizes.without_gradients(batches, self.reward.score, ROWS_PER_PASS)
        return [score for part in parts for score in part][: len(answers)]


def build_shared_base(source: str, adapters: Mapping[str, RewardAdapter], config: PPOConfig) -> PeftModel:
    """The model in `source`, frozen, with adapters `actor`, `critic` and one per reward, all but `actor` with a head.

    The critic begins as the first of the rewards, or as the base with a head of 0.

    Args:
        source: Hugging Face name or folder.
        adapters: of the reward models, by the names of their roles.
        config: with lora_rank and activation_checkpointing.
    """
    base = recompute_activations(load_model(AutoModelForCausalLM, source), config)
    with without_renamed_attribute_warning():
        model = get_peft_model(base, lora_config(config), adapter_name=ACTOR)
        first = next(iter(adapters.values()), None)
        targets = copy.deepcopy(model.peft_config[ACTOR])  # by names: "all linears" would now include those of adapters
        critic = first or RewardAdapter(source="", config=targets, weights={}, head=_zero_head(base))
        heads = nn.ModuleDict({CRITIC: _add_role(model, CRITIC, replace(critic, config=copy.deepcopy(critic.config)))})
        for name, adapter in adapters.items():
            heads[name] = _add_role(model, name, adapter)
    setattr(model, HEADS, heads)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        parameter.requires_grad_(("lora_" in name or HEADS in parts) and any(role in parts for role in TRAINED))
    return model


def _zero_head(base: Any) -> nn.Linear:
    head = nn.Linear(base.config.get_text_config().hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def _add_role(model: PeftModel, name: str, adapter: RewardAdapter) -> nn.Linear:
    """Adds the adapter under `name`; returns a new head for it.

    Raises:
        ValueError: peft refuses the adapter, or its weights are not exactly those that it has on this base.
    """
    refused = f"--shared-base: --reward={adapter.source!r} must be an adapter on the actor's base"
    try:
        model.add_adapter(name, adapter.config)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # depends on what is wrong with its config
        reason = " ".join(str(error).split())
        raise ValueError(f"{refused}, and peft refuses its adapter_config.json: {reason}") from error
    if adapter.source:
        shapes = {key: tuple(value.shape) for key, value in adapter.weights.items()}
        wanted = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        for key in sorted(shapes.keys() | wanted.keys()):
            expected = tuple(wanted[key].shape) if key in wanted else "none"
            if (found := shapes.get(key, "none")) != expected:
                raise ValueError(
                    f"{refused}, with all its weights; {key} has shape {found} in its file and {expected} on that base "
                    "by its adapter_config.json; train it on that base, or save it anew"
                )
        set_peft_model_state_dict(model, adapter.weights, adapter_name=name)
        width = model.config.get_text_config().hidden_size
        if adapter.head.in_features != width:
            raise ValueError(
                f"{refused}, of hidden size {width}; its head reads {adapter.head.in_features}; train it anew"
            )
    head = nn.Linear(adapter.head.in_features, 1)
    head.load_state_dict(adapter.head.state_dict())
    return head


def parameter_groups(model: PeftModel, actor_rate: float, critic_rate: float) -> list[dict[str, Any]]:
    """The trained parameters of both roles, as the groups of an optimizer."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    critic = [parameter for name, parameter in trained if CRITIC in name.split(".")]
    actor = [parameter for name, parameter in trained if CRITIC not in name.split(".")]
    return [{"params": actor, "lr": actor_rate}, {"params": critic, "lr": critic_rate, APART: True}]


def build_roles_on_shared_base(
    config: PPOConfig,
    source: str,
    rewards: Rewards,
    rates: tuple[float, float],
    schedule: Schedule,
    *,
    fuses_at_once: bool,
) -> tuple[TrainedPolicy, AdapterRole, Rewards]:
    """The actor with its reference, the critic and the rewards. Collective.

    Args:
        config: as in `build_policy`.
        source: Hugging Face name or folder of the base.
        rewards: with models that are named, and not on a base yet.
        rates: peaks of the learning rates of actor and critic.
        schedule: of both.
        fuses_at_once: whether a rollout fuses the adapter into all its linears at once, which takes their memory again,
            or into one layer at a time, in every pass.
    """
    models = [reward for reward in rewards.rewards if names_model(reward.spec)]
    roles = {reward.spec: f"reward_{number}" for number, reward in enumerate(models)}
    model = build_shared_base(source, {role: read_reward_adapter(spec) for spec, role in roles.items()}, config)
    engine_config = engine_config_of(config, rates[0], generates=True)
    engine_config["hybrid_engine"]["pin_parameters"] = fuses_at_once
    groups = parameter_groups(model, *rates)
    engine, *_ = hybrid_engine.initialize(
        model=model, model_parameters=groups, config=engine_config, lr_scheduler=schedule.build
    )
    pack_where_exact(engine, config)
    replay_where_asked(engine, config)
    tokenizer, sizes = load_tokenizer(source), RunPasses.of(config)
    policy = TrainedPolicy(actor=engine, tokenizer=tokenizer, reference=None, refers_to_base=True, sizes=sizes)
    judges = {spec: _shared_reward(policy, spec, role) for spec, role in roles.items()}
    return policy, AdapterRole(engine, CRITIC), rewards.judged_by(judges)


def _shared_reward(policy: TrainedPolicy, spec: str, role: str) -> SharedReward:
    positions = num_positions(policy.actor.module.config)
    return SharedReward(LearnedReward(spec, AdapterRole(policy.actor, role), policy.tokenizer, positions, policy.sizes))


def judge(roles: Roles, config: PPOConfig, answers: Answers) -> Scores:
    """The rewards of `answers`; `missing_eos_penalty` is subtracted for answers that were cut off."""
    scores = roles.rewards(answers)
    if config.missing_eos_score is not None:
        return replace_cut_off(scores, answers, config.missing_eos_score)
    return penalise_cut_off(scores, answers, config.missing_eos_penalty)


def rollout_sums(rollout: Rollout, logprobs_ref: torch.Tensor, config: PPOConfig) -> Sums:
    """Sums for the figures of a rollout: its own, those against the reference, and the judge's where it applies."""
    sums = answer_sums(rollout) | reference_sums(rollout, logprobs_ref)
    return sums | judge_sums(rollout) if config.dataset is None else sums


def evaluate_held_out(roles: Roles, start: Start, config: PPOConfig) -> Evaluation:
    """Answers each held-out prompt once."""
    policy = roles.policy

    def measure(rollout: Rollout) -> Sums:
        return rollout_sums(rollout, policy.reference_logprobs(rollout.sequences, config.temperature), config)

    options, scores = AnswerSampling.of(config), partial(judge, roles, config)
    return evaluate(policy.actor, policy.tokenizer, start.held_out, scores, options, measure=measure)


@dataclass(frozen=True, kw_only=True)
class CriticExperience:
    """A rollout with all inputs of an update; all but `sequences` are `[N, T]` fp32."""

    sequences: Sequences
    logprobs: torch.Tensor
    """Log-probabilities of the sampler."""
    logprobs_old: torch.Tensor
    values_old: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    is_stale: torch.Tensor | None = None
    """`[N]` bool: True for answers of earlier weights; None if all are of the present ones."""

    @property
    def sampled_mask(self) -> torch.Tensor:
        """`[N, T]` bool: True on the tokens that the policy has just sampled."""
        mask = self.sequences.response_mask
        return mask if self.is_stale is None else mask & ~self.is_stale[:, None]

    def rows(self, index: torch.Tensor) -> "CriticExperience":
        """The rows `index`, a tensor on the host, without the columns that are padding in all of them."""
        sequences = self.sequences.rows(index)
        columns, places = sequences.response_mask.shape[1], send_to_device(index, self.logprobs.device)
        return CriticExperience(
            sequences=sequences,
            logprobs=self.logprobs[places, :columns],
            logprobs_old=self.logprobs_old[places, :columns],
            values_old=self.values_old[places, :columns],
            advantages=self.advantages[places, :columns],
            returns=self.returns[places, :columns],
            is_stale=None if self.is_stale is None else self.is_stale[places],
        )


def reward_tokens(scores: Scores, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """`[N, T]`: the KL penalty, plus each score on the last token, or a process reward's numbers on their tokens."""
    if scores.per_token is None:
        return token_rewards(torch.tensor(scores.total, device=kl.device), kl, mask, kl_coef)
    penalties = token_rewards(torch.zeros(len(kl), device=kl.device), kl, mask, kl_coef)
    return penalties + pad_numbers(scores.per_token, mask.shape[1], kl.device)
