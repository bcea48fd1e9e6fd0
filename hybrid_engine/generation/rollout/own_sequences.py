"""Answers single sequences by the `generate()` of any model.

A logits processor draws each token by the sequence's own options, as on containers, and masks all other tokens for
`generate()`. So row options, guides, log-probabilities and seeds work on every architecture that transformers generates
with.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hybrid_engine.generation.batching.processors import is_ended
from hybrid_engine.generation.batching.rows import MixedRows, RowState
from hybrid_engine.generation.request.core import Sequence

NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0,
    "min_new_tokens": None, "sequence_bias": None, "exponential_decay_length_penalty": None,
}  # fmt: skip
"""Neutral values of config options that would change logits before the draw: a sequence has its own."""


def answer_sequence(
    generate: Callable[..., Any], sequence: Sequence, device: torch.device, most: int | None = None
) -> None:
    """Continues `sequence` until it ends, by a model's `generate` on `device`; stores an error of its rules in it.

    Args:
        most: maximum number of tokens to draw in this call; None: as many as the sequence may have.

    Raises:
        RuntimeError: the model's logits are not finite.
    """
    left = sequence.options.max_new_tokens - len(sequence.tokens)
    fed = torch.tensor([sequence.prompt.tokens + sequence.tokens], device=device)
    generate(
        fed,
        attention_mask=torch.ones_like(fed),
        max_new_tokens=left if most is None else min(left, most),
        do_sample=False,
        num_beams=1,
        logits_processor=LogitsProcessorList([_Drawing(sequence, device)]),
        stopping_criteria=StoppingCriteriaList([_Ended(sequence)]),
        eos_token_id=None,
        pad_token_id=sequence.options.pad_token_id,
        return_dict_in_generate=False,
        synced_gpus=False,  # the caller keeps processes in step
        **NEUTRAL,
    )


class _Drawing(LogitsProcessor):
    """Draws the next token of one sequence and masks the scores of all others."""

    def __init__(self, sequence: Sequence, device: torch.device):
        self.sequence, self.device = sequence, device
        self.rows: MixedRows | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids [1, P]`, `scores [1, V]` -> `[1, V]`."""
        sequence, logits = self.sequence, scores.float()
        if not bool(logits.isfinite().any()) or bool(logits.isnan().any()):
            raise RuntimeError("the model's logits are not finite; check the weights for NaN or inf")
        if self.rows is None:
            self.rows = MixedRows([sequence], logits.shape[1], logits.device)
        drawn = self.rows.draw(logits, self._state(input_ids, logits))
        token = int(drawn.tokens[0])
        sequence.tokens.append(token)
        sequence.logprobs.append(float(drawn.logprobs[0]))
        if drawn.tops is not None:
            ids, logprobs = drawn.tops[:, 0].tolist()
            sequence.tops.append([(int(number), value) for number, value in zip(ids, logprobs, strict=True)])
        if bool(drawn.ends[0]) or is_ended(sequence, logits.shape[1]):
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.options.max_new_tokens:
            sequence.finish_reason = "length"
        return torch.full_like(scores, -torch.inf).index_fill_(1, drawn.tokens, 0.0)

    def _state(self, input_ids: torch.Tensor, logits: torch.Tensor) -> RowState:
        own = torch.tensor(self.sequence.tokens, dtype=torch.int64, device=logits.device)
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).index_fill_(1, input_ids[0], True)
        counts = torch.bincount(own, minlength=logits.shape[1]).int()[None]
        keys = torch.tensor([self.sequence.key], device=logits.device)
        return RowState(keys, torch.tensor([len(own)], device=logits.device), seen, counts)


class _Ended(StoppingCriteria):
    def __init__(self, sequence: Sequence):
        self.sequence = sequence

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """`[1]`: whether the sequence has ended."""
        has_ended = self.sequence.finish_reason is not None or self.sequence.error is not None
        return torch.tensor([has_ended], device=input_ids.device)
