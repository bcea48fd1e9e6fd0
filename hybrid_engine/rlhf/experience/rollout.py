"""Answering prompts with the actor: rows in, padded rollouts with the sampler's own log-probabilities out.

B: this process's prompts, G: samples of each, N = B * G answers (those of a prompt stand together), P: prompt columns,
T: response columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.verdict import is_out_of_memory
from hybrid_engine.generation.end_tokens import answer_text, end_token_ids
from hybrid_engine.rlhf.data.encoding import encode_prompt
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.data.sequences import Sequences, attach_responses, pad_prompts
from hybrid_engine.rlhf.rewards.answers import Answers
from hybrid_engine.rlhf.runs.options import AnswerOptions
from hybrid_engine.rlhf.runs.run_log import say

WARMED_DEVICES = ("cuda",)
"""Kinds of devices on which compiling and recording take seconds."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How answers are drawn."""

    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    num_samples: int = 1
    """Answers to each prompt, G."""

    def drawing(self) -> dict[str, Any]:
        """For `generate()`: from all tokens at the temperature; at 0 the likeliest one."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}

    @classmethod
    def of(cls, config: AnswerOptions, num_samples: int = 1) -> "SamplingOptions":
        """What the options of a recipe say of sampling, with `num_samples` answers to each prompt."""
        return cls(
            max_prompt_tokens=config.max_prompt_tokens,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            num_samples=num_samples,
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """N answers to B prompts."""

    answers: Answers
    sequences: Sequences
    logprobs: torch.Tensor
    """`[N, T]` fp32, the sampler's own; 0 on padding."""


def sample(
    actor: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[PromptRow],
    options: SamplingOptions,
    seed: int,
) -> Rollout:
    """`options.num_samples` answers to each of `rows`.

    The actor, a `HybridEngine`, must be in evaluation mode; collective when it is sharded. Longer prompts lose their
    beginning. Answers end with any of `end_token_ids`, which is not part of their text. The same seed, rows and weights
    give the same answers.
    """
    prompts = [encode_prompt(tokenizer, row)[-options.max_prompt_tokens :] for row in rows]
    ends = end_token_ids(actor.module, tokenizer)
    prompt_ids, prompt_mask = pad_prompts(prompts, tokenizer.pad_token_id, actor.device)
    output = actor.generate(
        prompt_ids,
        attention_mask=prompt_mask,
        **_generate_options(tokenizer, options, ends),
        return_dict_in_generate=True,
        seed=seed,
    )
    repeated_mask = prompt_mask.repeat_interleave(options.num_samples, dim=0)
    sequences = attach_responses(repeated_mask, output.sequences, output.lengths)
    responses = [row[mask].tolist() for row, mask in zip(sequences.responses, sequences.response_mask, strict=True)]
    answers = Answers(
        prompts=_repeat([row.prompt for row in rows], options.num_samples),
        responses=[answer_text(tokenizer, ids, ends) for ids in responses],
        prompt_ids=_repeat(prompts, options.num_samples),
        response_ids=responses,
        is_cut_off=[reason == "length" for reason in output.finish_reason],
        columns=_columns(rows, options.num_samples),
        decode=partial(tokenizer.decode, skip_special_tokens=True),
    )
    return Rollout(answers=answers, sequences=sequences, logprobs=output.logprobs)


def _generate_options(tokenizer: PreTrainedTokenizerBase, options: SamplingOptions, ends: list[int]) -> dict[str, Any]:
    """How `generate()` draws answers that end with any of `ends`."""
    return {
        **options.drawing(),
        "max_new_tokens": options.max_new_tokens,
        "num_return_sequences": options.num_samples,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": ends,
    }


def warm_up(
    actor: Any, tokenizer: PreTrainedTokenizerBase, options: SamplingOptions, num_prompts: int, shortest: int
) -> None:
    """Compiles and records on a GPU what rollouts of `num_prompts` prompts would wait for, and says how long it took.

    The actor, a `HybridEngine`, is in evaluation mode afterwards. Collective.

    Args:
        options: of the rollouts.
        num_prompts: of this process's rollouts.
        shortest: tokens of the shortest prompt.
    """
    if actor.device.type not in WARMED_DEVICES:
        return
    actor.eval()
    try:
        chosen = _generate_options(tokenizer, options, end_token_ids(actor.module, tokenizer))
        say(str(actor.warm_up(num_prompts, shortest, **chosen)))
    except RuntimeError as error:  # rollouts begin again with fewer rows
        if not is_out_of_memory(error):
            raise
        say("warm-up: out of memory; the first rollout compiles and records what it needs")


def choose_groups(rollout: Rollout, is_chosen: torch.Tensor) -> Rollout:
    """The groups of a rollout whose entry in `is_chosen`, `[B]` bool, is True."""
    size = len(rollout.answers) // len(is_chosen)
    index = is_chosen.repeat_interleave(size).nonzero().squeeze(1)
    sequences = rollout.sequences.rows(index)
    return Rollout(
        answers=rollout.answers.choose(index.tolist()),
        sequences=sequences,
        logprobs=rollout.logprobs[index, : sequences.response_mask.shape[1]],
    )


def join(rollouts: Sequence[Rollout], pad_token: int) -> Rollout:
    """One rollout of the rows of several, padded to the longest prompt and the longest response among them."""
    widths = [rollout.sequences.response_mask.shape[1] for rollout in rollouts]
    before = [rollout.sequences.input_ids.shape[1] - width for rollout, width in zip(rollouts, widths, strict=True)]

    def joined(tensors: list[torch.Tensor], has_prompt: bool, value: int) -> torch.Tensor:
        sides = [
            (max(before) - left if has_prompt else 0, max(widths) - right)
            for left, right in zip(before, widths, strict=True)
        ]
        return torch.cat([pad(tensor, side, value=value) for tensor, side in zip(tensors, sides, strict=True)])

    parts = [rollout.sequences for rollout in rollouts]
    return Rollout(
        answers=Answers.join([rollout.answers for rollout in rollouts]),
        sequences=Sequences(
            input_ids=joined([part.input_ids for part in parts], True, pad_token),
            attention_mask=joined([part.attention_mask for part in parts], True, 0),
            response_mask=joined([part.response_mask for part in parts], False, 0),
        ),
        logprobs=joined([rollout.logprobs for rollout in rollouts], False, 0),
    )


def _repeat(values: Sequence[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]


def _columns(rows: Sequence[PromptRow], times: int) -> Mapping[str, list[Any]]:
    """The data set's other columns, a value for each answer; those that every row has."""
    names = set.intersection(*(set(row.columns) for row in rows)) if rows else set()
    return {name: _repeat([row.columns[name] for row in rows], times) for name in sorted(names)}
