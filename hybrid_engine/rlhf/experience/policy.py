"""The actor of a run and what it is compared with: built, and asked for log-probabilities.

N: answers, T: response columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.distributed.processes import default_device, get_world_size
from hybrid_engine.optim.build import cast_module
from hybrid_engine.rl.correction import measure_difference
from hybrid_engine.rlhf.data.packable import pack_where_exact
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.data.sequences import Sequences, in_parts, response_logprobs
from hybrid_engine.rlhf.experience.evaluation import Evaluation, PassRule, evaluate, global_means
from hybrid_engine.rlhf.experience.rollout import SamplingOptions
from hybrid_engine.rlhf.passes.adapter_roles import playing
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.runs.adapters import add_adapter
from hybrid_engine.rlhf.runs.engine_config import build_engine_config, largest_micro_batch
from hybrid_engine.rlhf.runs.precision import torch_dtype
from hybrid_engine.rlhf.runs.recomputation import recompute_activations
from hybrid_engine.rlhf.runs.schedule import Schedule
from hybrid_engine.rlhf.runs.stages import load_model, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is trained and what it began as."""

    actor: Any
    """`HybridEngine`."""
    tokenizer: PreTrainedTokenizerBase
    reference: nn.Module | None
    """The first weights, frozen; None where nobody asks for them, or where they are those below the actor's adapter."""
    refers_to_base: bool = False
    """Whether the weights below the actor's adapter are the reference."""

    @property
    def has_reference(self) -> bool:
        """Whether `reference_logprobs` can be asked for."""
        return self.refers_to_base or self.reference is not None

    @torch.no_grad()
    def reference_logprobs(self, sequences: Sequences, temperature: float) -> torch.Tensor:
        """`[N, T]` fp32 of the first weights, 0 on padding; collective where the actor is sharded."""
        compute = partial(response_logprobs, temperature=temperature)
        if self.refers_to_base:
            with playing(self.actor.module, None):
                return in_parts(compute, self.actor, sequences)
        assert self.reference is not None, "the run keeps no reference"
        return in_parts(compute, self.reference, sequences)

    @torch.no_grad()
    def old_logprobs(
        self, sequences: Sequences, sampled: torch.Tensor, temperature: float, bound: float
    ) -> tuple[torch.Tensor, float]:
        """`[N, T]`, the trainer's log-probabilities of answers, and how far `sampled`, the sampler's, are from them.

        They are the sampler's own where the last measured difference, in nats a token, is at most `bound`: then no
        pass is made and the difference is 0 by that choice. Collective.
        """
        measured = self.actor.logprob_difference
        if measured is not None and measured.mean <= bound:
            return sampled, 0.0
        logprobs = in_parts(partial(response_logprobs, temperature=temperature), self.actor, sequences)
        mask = sequences.response_mask
        distance = measure_difference(logprobs, sampled, mask).absolute
        count = float(mask.sum())
        return logprobs, global_means({"difference": (float(distance) * count if count else 0.0, count)})["difference"]


def build_policy(config: Any, source: str, learning_rate: float, schedule: Schedule, keeps_reference: bool) -> Policy:
    """The actor in `source`, without dropout, with an engine and what a recipe's `Config` says of it. Collective.

    Args:
        config: with RolloutOptions, minibatch_size, micro_batch_size, lora_rank and zero_stage.
        source: Hugging Face name or folder.
        learning_rate: peak of the schedule.
        schedule: of the whole run.
        keeps_reference: whether the first weights can be asked for; with an adapter they are those below it.
    """
    model = load_model(AutoModelForCausalLM, source)
    reference = None
    if keeps_reference and not config.lora_rank:
        reference = load_model(AutoModelForCausalLM, source)
        cast_module(reference, torch_dtype(config.dtype))
        reference = reference.to(default_device()).eval().requires_grad_(False)
    engine_config = engine_config_of(config, learning_rate, generates=True)
    model = add_adapter(recompute_activations(model, config), config)
    actor, *_ = hybrid_engine.initialize(model=model, config=engine_config, lr_scheduler=schedule.build)
    for role in (actor, reference):
        if role is not None:
            pack_where_exact(role, config)
    tokenizer = load_tokenizer(source)
    refers_to_base = keeps_reference and bool(config.lora_rank)
    return Policy(actor=actor, tokenizer=tokenizer, reference=reference, refers_to_base=refers_to_base)


def evaluate_policy(policy: Policy, rows: Sequence[PromptRow], rewards: Rewards, config: Any) -> Evaluation:
    """Held-out prompts answered and scored, always with the same seed; collective.

    Args:
        policy: in evaluation mode afterwards.
        rows: the prompts.
        rewards: of the run.
        config: with RolloutOptions, eval_samples and pass_score.
    """
    passes = PassRule(threshold=config.pass_score, ks=sorted({1, config.eval_samples}))
    options = SamplingOptions.of(config, config.eval_samples)
    return evaluate(policy.actor, policy.tokenizer, rows, rewards, options, passes=passes)


def engine_config_of(config: Any, learning_rate: float, *, generates: bool) -> dict[str, Any]:
    """The DeepSpeed config of a role that is trained on rollouts: the actor, which generates, or its critic."""
    return build_engine_config(
        batch_size=config.minibatch_size,
        micro_batch_size=largest_micro_batch(config.minibatch_size // get_world_size(), config.micro_batch_size),
        learning_rate=learning_rate,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
        max_out_tokens=config.max_prompt_tokens + config.max_new_tokens if generates else None,
        exact=config.exact,
        max_running=config.max_running,
    )
