"""A teacher with another tokenizer than the student's: they are compared at the ends of common spans of text.

Both read the same text. A span is a shortest run of the student's tokens and of the teacher's that begin and end at the
same bytes:

    student    |12|+3|0|=|     bytes 0 2 4 5 6
    teacher    |1|2|+|30|=|    bytes 0 1 2 3 5 6      spans: 12, +30, =

The alignment is that of "GOLD" (trl.experimental.gold in TRL 1.16). Two divergences know it:

- span-jsd: the probabilities that both give to the text of a span, the products of those of its tokens, are compared
  by the generalized Jensen-Shannon divergence of two classes: that text, and every other.
- uld: the distribution at the last token of a span, weighed by the probability of the span's earlier tokens (the chain
  rule), is compared after sorting, since the vocabularies differ: Boizard et al. 2024, "Universal Logit Distillation",
  arXiv 2402.12030; in TRL the strategy "bayesian" for tokens of a span, without its hybrid loss. TRL divides by spans;
  here as elsewhere the mean is over all tokens.
"""

from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from hybrid_engine.containers.device import send_to_device
from hybrid_engine.generation.detokenize import answer_ends, token_bytes
from hybrid_engine.ops.linear_divergence import HeadStates
from hybrid_engine.ops.linear_log_prob import linear_log_prob
from hybrid_engine.rlhf.batches.head_log_probs import SpanLogProbs, SpanStates, SpanTokens, Taught
from hybrid_engine.rlhf.batches.sequences import Sequences, build_sequences, response_logprobs, response_states
from hybrid_engine.rlhf.experience.teachers import StepAnswers, TeacherPrompts

END = b"\0"
"""Stands for the end of an answer in both texts."""


class CommonSpan(NamedTuple):
    """Places of tokens of an answer: of the student's, and of the teacher's."""

    own: range
    theirs: range


def common_spans(own: Sequence[bytes], theirs: Sequence[bytes]) -> list[CommonSpan]:
    """The spans of two sequences of tokens, up to the first byte in which their texts differ.

    A token without bytes belongs to the span of the next token.
    """
    own_ends, their_ends = (list(accumulate(map(len, pieces))) for pieces in (own, theirs))
    pairs = zip(b"".join(own), b"".join(theirs), strict=False)
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    first_own, first_theirs = (
        {end: place for place, end in reversed([*enumerate(ends)])} for ends in (own_ends, their_ends)
    )
    spans, begin_own, begin_theirs = list[CommonSpan](), 0, 0
    for end in sorted(first_own.keys() & first_theirs.keys()):
        if 0 < end <= num_same:
            spans.append(CommonSpan(range(begin_own, first_own[end] + 1), range(begin_theirs, first_theirs[end] + 1)))
            begin_own, begin_theirs = first_own[end] + 1, first_theirs[end] + 1
    return spans


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[bytes]:
    """The bytes of each token of an answer, `END` for the token that ends it."""
    ends = answer_ends(tokenizer)
    pieces = [token_bytes(tokenizer, token) for token in tokens]
    return [*pieces[:-1], END] if tokens and tokens[-1] in ends else pieces


class OtherTokensTeacher:
    """A frozen model, whole on every process, with its own tokenizer."""

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase],
        prompts: TeacherPrompts,
        num_positions: int | None,
        *,
        sorts: bool = False,
    ) -> None:
        """Takes the model.

        Args:
            model: frozen.
            temperature: of its distributions.
            tokenizers: the student's and the teacher's.
            prompts: of the training rows, as the teacher's tokens.
            num_positions: tokens that it can read; longer answers lose their end.
            sorts: whether sorted distributions are compared, in place of the probabilities of spans.
        """
        self.model, self.temperature, self.prompts, self.num_positions = model, temperature, prompts, num_positions
        self.sorts = sorts
        self.own, self.theirs = tokenizers
        self._step: Sequences | None = None
        self._spans: list[list[CommonSpan]] = []

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return [self.model]

    def begin_step(self, step: StepAnswers) -> None:
        """Encodes the texts of the answers, and finds the spans."""
        prompts, answers = self.prompts.of_step(step), list[list[int]]()
        self._spans = []
        for prompt, ids in zip(prompts, step.answers.response_ids, strict=True):
            own = pieces_of(self.own, ids)
            answers.append(self._encode(own)[: self.num_positions and self.num_positions - len(prompt)])
            self._spans.append(common_spans(own, pieces_of(self.theirs, answers[-1])))
        device = step.sequences.input_ids.device
        self._step = build_sequences(prompts, answers, self.theirs.pad_token_id, device)

    def _encode(self, pieces: list[bytes]) -> list[int]:
        """The teacher's tokens of an answer, at least one."""
        is_ended = bool(pieces) and pieces[-1] == END
        text = b"".join(pieces[:-1] if is_ended else pieces).decode(errors="ignore")
        ids = self.theirs(text, add_special_tokens=False)["input_ids"]
        return [*ids, self.theirs.eos_token_id] if is_ended or not ids else ids

    def read(self, sequences: Sequences) -> Sequence[Taught]:
        """The probabilities of the spans of some rows, or the distributions at their ends."""
        assert self._step is not None and sequences.numbers is not None
        seen, device = self._step.rows(sequences.numbers), sequences.input_ids.device
        mask = sequences.on_host.response_mask.tolist()
        spans = [
            [span for span in self._spans[number] if all(learned[place] for place in span.own)]
            for number, learned in zip(sequences.numbers.tolist(), mask, strict=True)
        ]
        own, own_last = _tokens_of(sequences, [[span.own for span in row] for row in spans], device)
        theirs, their_last = _tokens_of(seen, [[span.theirs for span in row] for row in spans], device)
        if self.sorts:
            return [Taught(self._states(seen, theirs, their_last, own), own_last)]
        with torch.no_grad():
            logprobs = response_logprobs(self.model, seen, self.temperature)[seen.response_mask]
        return [Taught(SpanLogProbs(logprobs[their_last] + theirs.added(logprobs[theirs.numbers]), own), own_last)]

    def _states(self, seen: Sequences, theirs: SpanTokens, last: torch.Tensor, own: SpanTokens) -> SpanStates:
        """Its distributions at the ends of the spans."""
        stated = response_states(self.model, seen, self.temperature)
        if not isinstance(stated, HeadStates):
            raise ValueError("--divergence uld needs a teacher with a plain linear head; give another one")
        earlier = stated.hidden[theirs.numbers]
        logprobs = linear_log_prob(earlier, stated.weight, theirs.earlier, stated.bias, stated.shape).logprobs
        return SpanStates(stated._replace(hidden=stated.hidden[last]), theirs.added(logprobs).exp(), own)


def _tokens_of(sequences: Sequences, spans: list[list[range]], device: torch.device) -> tuple[SpanTokens, torch.Tensor]:
    """The tokens at the places `spans` of the responses of each row, and the numbers of the last ones, `[S]`.

    Numbers are those among all learned tokens.
    """
    mask = sequences.on_host.response_mask
    numbers = (mask.flatten().cumsum(0) - 1).view_as(mask).tolist()
    ids = sequences.on_host.input_ids[:, -mask.shape[1] :].tolist()
    places = [(row, span) for row, of_row in enumerate(spans) for span in of_row]
    last = [(ids[row][span[-1]], numbers[row][span[-1]]) for row, span in places]
    earlier = [
        (ids[row][place], number, numbers[row][place])
        for number, (row, span) in enumerate(places)
        for place in span[:-1]
    ]
    columns = [
        send_to_device(column.contiguous(), device)
        for rows, width in ((last, 2), (earlier, 3))
        for column in torch.tensor(rows, dtype=torch.int64).view(-1, width).unbind(1)
    ]
    return SpanTokens(columns[0], *columns[2:]), columns[1]
