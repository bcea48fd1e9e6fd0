"""PPO's roles as adapters on one frozen base: its weights lie in memory once, whatever the number of roles.

The actor and the critic have adapters that are trained, reward models adapters that are not; the reference is the base
with all of them off. Critic and rewards read a number from its last hidden states by heads of their own. One engine
trains both roles, each with its learning rate and with its gradients clipped by their own norm.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

import hybrid_engine
from hybrid_engine.checkpoint.peft_models import without_renamed_attribute_warning
from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.optim.clipping import APART
from hybrid_engine.rlhf.data.packable import pack_where_exact
from hybrid_engine.rlhf.data.passes import in_passes
from hybrid_engine.rlhf.data.sequences import Sequences, build_sequences, model_inputs, packed_for
from hybrid_engine.rlhf.experience.policy import Policy, engine_config_of
from hybrid_engine.rlhf.passes.adapter_roles import playing
from hybrid_engine.rlhf.passes.token_values import token_values
from hybrid_engine.rlhf.rewards.adapter_folder import RewardAdapter, read_reward_adapter
from hybrid_engine.rlhf.rewards.answers import Answers
from hybrid_engine.rlhf.rewards.learned import ROWS_PER_PASS, LearnedReward, names_model
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.runs.adapters import lora_config
from hybrid_engine.rlhf.runs.recomputation import recompute_activations
from hybrid_engine.rlhf.runs.schedule import Schedule
from hybrid_engine.rlhf.runs.stages import load_model, load_tokenizer, num_positions

ACTOR, CRITIC, HEADS = "actor", "critic", "heads"
TRAINED = (ACTOR, CRITIC)
"""The roles that have a learning rate and a gradient norm each, in the order of the optimizer's groups."""


class AdapterRole:
    """A role that gives numbers for tokens, by an adapter and a head of this name in `engine`'s model.

    It is called as a `ValueModel` is and trained as an engine is; who steps is the engine itself.
    """

    def __init__(self, engine: Any, name: str):
        self.engine, self.name = engine, name

    @property
    def module(self) -> nn.Module:
        """The base with all adapters."""
        return self.engine.module

    def __call__(self, batch: Sequences) -> torch.Tensor:
        """`[B, P+T]` fp32; what stands at padding means nothing. Collective where the base is sharded."""
        packed = packed_for(self.engine, batch)
        module = self.engine.module
        with playing(module, self.name):
            values = token_values(self.engine, getattr(module, HEADS)[self.name], model_inputs(batch, packed))
        return values if packed is None else packed.gather(values, batch.attention_mask.bool())

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """The engine's, in this role: what is computed again then is what was computed before."""
        with playing(self.engine.module, self.name):
            return self.engine.backward(loss)

    def get_global_grad_norm(self) -> float | None:
        """The norm of this role's gradients alone, at the last step; None before the first."""
        return dict(zip(TRAINED, self.engine.optimizer.grad_norms, strict=False)).get(self.name)

    def get_lr(self) -> list[float]:
        """The learning rate of this role's parameters."""
        return [self.engine.get_lr()[TRAINED.index(self.name)]]


class SharedReward:
    """A reward model on a base that other roles use, and that processes may share the weights of; collective."""

    def __init__(self, reward: LearnedReward):
        self.reward = reward

    @torch.no_grad()
    def __call__(self, answers: Answers) -> list[float]:
        """Scores as `LearnedReward` gives them; processes with fewer answers make as many passes.

        Raises:
            ValueError: as `LearnedReward` does, on all processes.
        """

        def batches(rows: int) -> list[Sequences]:
            mine = agree(lambda: self.reward.batches(answers, rows))
            spare = build_sequences([[0]], [[0]], 0, default_device())
            return [*mine, *[spare] * (max(gather_objects(len(mine))) - len(mine))]

        parts = in_passes(self.reward.model, batches, self.reward.score, ROWS_PER_PASS)
        return [score for part in parts for score in part][: len(answers)]


def build_shared_base(source: str, adapters: Mapping[str, RewardAdapter], config: Any) -> PeftModel:
    """The model in `source`, frozen, with an adapter `actor` and one of `critic` and of each reward with its head.

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
        targets = copy.deepcopy(model.peft_config[ACTOR])  # by names: of all linears those of adapters are some now
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
    """Adds the adapter under `name`; returns a head of its own for it.

    Raises:
        ValueError: peft makes no such adapter, or its weights are not all that it has on this base.
    """
    refused = f"--shared-base: --reward={adapter.source!r} must be an adapter on the actor's base"
    try:
        model.add_adapter(name, adapter.config)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # by what is wrong with its config any of these
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
    """The trained parameters of both roles."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    critic = [parameter for name, parameter in trained if CRITIC in name.split(".")]
    actor = [parameter for name, parameter in trained if CRITIC not in name.split(".")]
    return [{"params": actor, "lr": actor_rate}, {"params": critic, "lr": critic_rate, APART: True}]


def build_roles_on_shared_base(
    config: Any, source: str, rewards: Rewards, rates: tuple[float, float], schedule: Schedule, *, fuses_at_once: bool
) -> tuple[Policy, AdapterRole, Rewards]:
    """Actor with its reference, critic and rewards. Collective.

    Args:
        config: as of `build_policy`.
        source: Hugging Face name or folder of the base.
        rewards: of which models are named, and stand on no base yet.
        rates: peaks of the learning rates of actor and critic.
        schedule: of both.
        fuses_at_once: whether a rollout holds all its linears with the adapter in them, which is their memory once
            more, or those of a layer at a time, made anew in every pass.
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
    policy = Policy(actor=engine, tokenizer=load_tokenizer(source), reference=None, refers_to_base=True)
    judges = {spec: _shared_reward(engine, spec, role, source) for spec, role in roles.items()}
    return policy, AdapterRole(engine, CRITIC), rewards.judged_by(judges)


def _shared_reward(engine: Any, spec: str, role: str, source: str) -> SharedReward:
    positions = num_positions(engine.module.config)
    return SharedReward(LearnedReward(spec, AdapterRole(engine, role), load_tokenizer(source), positions))
