"""A live batch of a model without containers: its own `generate()` answers one sequence after the other.

A logits processor draws each token by the sequence's own options, as on containers, and leaves `generate()` no other
choice; so every architecture that transformers generates with has row options, guides, log-probabilities and seeds.
"""

from contextlib import ExitStack
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hybrid_engine.config.checks import check_integer
from hybrid_engine.generation.batching.sequence import Prompt, Sequence
from hybrid_engine.generation.generator import Generator
from hybrid_engine.generation.live import KVBlocks, LiveBatch, Progress
from hybrid_engine.generation.sampling.rows import MixedRows, RowState
from hybrid_engine.generation.sampling.stops import is_ended


class OwnBatch(LiveBatch):
    """Answers those that were added in their order, one a turn, by the model's own `generate()`.

    Args:
        generator: without containers, its weights gathered.
        longest: tokens of the longest sequence that may join.
    """

    def __init__(self, generator: Generator, longest: int):
        self.generator, self.longest = generator, longest
        self._num_told: dict[Sequence, int] = {}

    @property
    def has_work(self) -> bool:
        """Whether a sequence waits."""
        return bool(self._num_told)

    @property
    def num_running(self) -> int:
        """None runs between turns."""
        return 0

    @property
    def num_waiting(self) -> int:
        """Sequences that have not begun."""
        return len(self._num_told)

    @property
    def kv_blocks(self) -> KVBlocks:
        """None: the model keeps a cache of its own."""
        return KVBlocks(0, 0, 0)

    def add(self, sequences: list[Sequence]) -> None:
        """Lets `sequences` wait for their turn."""
        self.score(list(dict.fromkeys(sequence.prompt for sequence in sequences)))
        for sequence in sequences:
            sequence.is_kept = False
            self._num_told[sequence] = len(sequence.tokens)

    def score(self, prompts: list[Prompt]) -> None:
        """Raises ValueError where one of `prompts` wants scores, which containers alone give."""
        if any(prompt.num_tops is not None for prompt in prompts):
            raise ValueError(f"prompt_logprobs needs containers: {self.generator.fallback_reason}; leave it out")

    def cancel(self, sequences: list[Sequence]) -> None:
        """Takes `sequences` out; those that have finished stay as they are."""
        for sequence in sequences:
            self._num_told.pop(sequence, None)

    def take_out(self) -> list[Progress]:
        """Takes everything out; all that was drawn is handed on already."""
        self._num_told.clear()
        return []

    def turn(self) -> list[Progress]:
        """The whole answer of the sequence that waits longest."""
        sequence = next(iter(self._num_told))
        first = self._num_told.pop(sequence)
        try:
            self._answer(sequence)
        except Exception as error:
            sequence.error = sequence.error or error
        if sequence.error is not None:
            return [Progress(sequence, [], [], "error")]
        return [Progress(sequence, sequence.tokens[first:], sequence.logprobs[first:], sequence.finish_reason)]

    def _answer(self, sequence: Sequence) -> None:
        device = self.generator.device
        fed = torch.tensor([sequence.prompt.tokens + sequence.tokens], device=device)
        drawing = _Drawing(sequence, device)
        self.generator.own.generate(
            fed,
            attention_mask=torch.ones_like(fed),
            max_new_tokens=sequence.options.max_new_tokens - len(sequence.tokens),
            do_sample=False,
            num_beams=1,
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([_Ended(sequence)]),
            eos_token_id=None,
            pad_token_id=sequence.options.pad_token_id,
            return_dict_in_generate=False,
            **NEUTRAL,
        )


NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0,
    "min_new_tokens": None, "sequence_bias": None, "exponential_decay_length_penalty": None,
}  # fmt: skip
"""Options of the model's own config that would change logits before they are drawn from: a sequence has its own."""


class _Drawing(LogitsProcessor):
    """Draws the next token of one sequence and leaves it alone among the scores."""

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


def open_own(generator: Generator, longest: int | None, release: ExitStack) -> OwnBatch:
    """A batch of `generator`, which has no containers; the return of what it takes goes on `release`.

    Raises:
        ValueError: processes share the model or its layers, or `longest` is out of range.
    """
    if generator.is_live:
        raise ValueError("serving: the model is served already; wait until that ends")
    if generator.group.size > 1 or generator.sharding.world_size > 1:
        raise ValueError(f"serving: {generator.fallback_reason}; processes share models with containers only")
    positions = getattr(generator.module.config.get_text_config(), "max_position_embeddings", None)
    limit = min(generator.config.max_out_tokens, positions or generator.config.max_out_tokens)
    check_integer("longest", limit if longest is None else longest, 2, limit)
    generator.own.gather(release)
    return OwnBatch(generator, longest or limit)
