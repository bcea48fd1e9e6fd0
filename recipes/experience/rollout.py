"""Answering prompts with the actor: text in, a padded rollout with its log-probabilities and scores out.

B: this process's prompts, P: prompt columns, T: response columns.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_engine.recipes.data.sequences import Sequences, attach_responses, pad_prompts
from hybrid_engine.recipes.rewards.answers import Answers
from hybrid_engine.recipes.rewards.rewards import Rewards


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The four models of a PPO run."""

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
class SamplingOptions:
    """How responses are drawn."""

    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    missing_eos_score: float
    """Score of a response that was cut off."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Responses to B prompts."""

    prompts: list[str]
    responses: list[str]
    """The responses as text, without special tokens."""
    sequences: Sequences
    logprobs: torch.Tensor
    """`[B, T]` fp32, the sampler's own; 0 on padding."""
    scores: torch.Tensor
    """`[B]` fp32, one score of each response."""
    is_cut_off: list[bool]
    """True where `max_new_tokens` came before the end-of-sequence token."""


def sample(roles: Roles, prompts: list[str], options: SamplingOptions, seed: int) -> Rollout:
    """One response to each prompt, scored. The actor must be in evaluation mode; collective when it is sharded."""
    tokenizer, device = roles.tokenizer, roles.actor.device
    encoded = tokenizer(prompts)["input_ids"]
    prompt_ids, prompt_mask = pad_prompts(
        [tokens[-options.max_prompt_tokens :] for tokens in encoded], tokenizer.pad_token_id, device
    )
    output = roles.actor.generate(
        prompt_ids,
        attention_mask=prompt_mask,
        do_sample=True,
        temperature=options.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=options.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        return_dict_in_generate=True,
        seed=seed,
    )
    sequences = attach_responses(prompt_mask, output.sequences, output.lengths)
    tokens = [row[mask].tolist() for row, mask in zip(sequences.responses, sequences.response_mask, strict=True)]
    responses = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    is_cut_off = [reason == "length" for reason in output.finish_reason]
    scores = roles.rewards(
        Answers(
            prompts=prompts,
            responses=responses,
            prompt_ids=[row[mask.bool()].tolist() for row, mask in zip(prompt_ids, prompt_mask, strict=True)],
            response_ids=tokens,
            is_cut_off=is_cut_off,
            decode=partial(tokenizer.decode, skip_special_tokens=True),
        )
    ).total
    return Rollout(
        prompts=prompts,
        responses=responses,
        sequences=sequences,
        logprobs=output.logprobs,
        scores=torch.tensor(
            [options.missing_eos_score if cut else score for score, cut in zip(scores, is_cut_off, strict=True)],
            dtype=torch.float32,
            device=device,
        ),
        is_cut_off=is_cut_off,
    )
