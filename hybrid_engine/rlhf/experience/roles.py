"""The models of PPO: built together, trained together."""

from dataclasses import dataclass
from typing import Any

import hybrid_engine
from hybrid_engine.rlhf.data.packable import pack_where_exact
from hybrid_engine.rlhf.experience.policy import Policy, build_policy, engine_config_of
from hybrid_engine.rlhf.experience.shared_base import ACTOR, AdapterRole, build_roles_on_shared_base
from hybrid_engine.rlhf.experience.start import Start
from hybrid_engine.rlhf.planning.following import fuses_at_once
from hybrid_engine.rlhf.rewards.learned import build_critic
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.runs.precision import scaling_figures
from hybrid_engine.rlhf.runs.recomputation import recompute_activations
from hybrid_engine.rlhf.runs.schedule import Schedule
from hybrid_engine.rlhf.runs.stages import load_config


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The models of the run."""

    policy: Policy
    """The actor, trained, and its reference, the actor as it was at the start."""
    critic: Any
    """ZeroEngine of a ValueModel, trained; or an `AdapterRole` of the actor's engine."""
    rewards: Rewards

    @property
    def engines(self) -> dict[str, Any]:
        """What is trained, by the names of its checkpoints: one where the roles share a base."""
        critic = {} if isinstance(self.critic, AdapterRole) else {"critic": self.critic}
        return {**critic, "actor": self.policy.actor}

    def gradient_norms(self) -> dict[str, Any]:
        """The gradient norms of actor and critic at the last optimizer step, and fp16's figures, by metrics' names."""
        norms = (role.get_global_grad_norm() for role in self._trained())
        figures = dict(zip(("actor_grad_norm", "critic_grad_norm"), norms, strict=True))
        for name, engine in self.engines.items():
            figures |= scaling_figures(engine, f"{name}_")
        return figures

    def learning_rates(self) -> dict[str, float]:
        """The learning rates of actor and critic at the next optimizer step, as metrics call them."""
        rates = (role.get_lr()[0] for role in self._trained())
        return dict(zip(("learning_rate", "critic_learning_rate"), rates, strict=True))

    def _trained(self) -> tuple[Any, Any]:
        """Actor and critic."""
        is_shared = isinstance(self.critic, AdapterRole)
        return AdapterRole(self.policy.actor, ACTOR) if is_shared else self.policy.actor, self.critic


def build_roles(config: Any, start: Start, actor_rate: float, critic_rate: float, schedule: Schedule) -> Roles:
    """Loads the models, without dropout, and gives actor and critic an engine each. Collective.

    Args:
        config: as of `build_policy`.
        actor_rate: peak of the actor's learning rate.
        critic_rate: of the critic's.
        schedule: of both.
        start: the sources of the models; the critic begins as the first reward model that reads the actor's tokens.
    """
    if config.shared_base:
        at_once = fuses_at_once("ppo", config, start, load_config(start.source))
        policy, role, rewards = build_roles_on_shared_base(
            config, start.source, start.rewards, (actor_rate, critic_rate), schedule, fuses_at_once=at_once
        )
        return Roles(policy=policy, critic=role, rewards=rewards)
    policy = build_policy(config, start.source, actor_rate, schedule, keeps_reference=True)
    critic, *_ = hybrid_engine.initialize(
        model=recompute_activations(build_critic(start.source, start.rewards.specs), config),
        config=engine_config_of(config, critic_rate, generates=False),
        lr_scheduler=schedule.build,
    )
    pack_where_exact(critic, config)
    critic.train()  # loaded for evaluation, in which transformers recomputes no activations
    return Roles(policy=policy, critic=critic, rewards=start.rewards)
