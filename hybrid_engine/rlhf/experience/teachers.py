"""Teachers of `hybrid-engine distill` and `grpo`: they state the distributions of the tokens of answers.

In each step the recipe gives a teacher the step's answers by `begin_step`, and then asks it by `read` about the rows of
each forward pass of the student. `response_divergences` takes what it states. To add a kind of teacher:

1. Write a class with the members of `Teacher`. `read` returns a list of `Taught`: usually one for all tokens, or one
   for the tokens of each of several teachers, with weights. The forms of a statement are `HeadStates` (hidden states
   and the head, compared in tiles over the whole vocabulary), `StatesOfSameHead` (the same, if the head is the
   student's), `WholeLogProbs` (for models whose logits are needed), `TopTokens` (log-probabilities of K tokens), and
   `SpanLogProbs` and `SpanStates` (for a teacher with other tokens).
2. Add its options to `TeacherOptions`, build it in `load_teacher` (`teacher_loading.py`), and refuse in `check_teacher`
   what can be refused before any model is loaded.

A teacher that needs more than the student's tokens finds it by `sequences.numbers`: the number of each row among the
answers that `begin_step` gave, whose prompts, columns, scores and rows of the data set are there.

N: response tokens of some rows.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from hybrid_engine.containers.device import send_to_device
from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.generation.model.probe import evaluating
from hybrid_engine.ops.linear_divergence import HeadStates, TopTokens
from hybrid_engine.rlhf.batches.head_log_probs import StatesOfSameHead, Taught, WholeLogProbs
from hybrid_engine.rlhf.batches.passes import ROWS_PER_PASS, RunPasses
from hybrid_engine.rlhf.batches.sequences import (
    ROWS_PER_PASS_ON_CPU,
    Sequences,
    build_sequences,
    in_parts,
    response_comparison,
    response_logprobs,
    response_states,
)
from hybrid_engine.rlhf.data.encoding import encode_prompt
from hybrid_engine.rlhf.data.prompts import fill_prompt
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.policy import TrainedPolicy
from hybrid_engine.rlhf.options.distillation import SOLUTION_OF_GROUP, DistillConfig, template_columns
from hybrid_engine.rlhf.rewards.scores import Answers, Scores
from hybrid_engine.rlhf.runs.run_folder import TeacherFigures
from hybrid_engine.zero.gathered_parameters import GatheredParameters

AGREEMENT = ("agreement", "entropy", "teacher_entropy", "divergence")
"""Figures of `compare`; entropies and divergence in nats a token."""
NO_SUMS = [0.0] * (1 + len(AGREEMENT))
MOST_POSITIONS = 24
"""Lines of the table by position."""
NUM_WORST = 24
"""Tokens that are listed with their divergences."""
TOKENS_BEFORE = 24
"""Tokens of the text that is shown before such a token."""


class StepAnswers(NamedTuple):
    """The answers of this process that a step learns from."""

    sequences: Sequences
    """Their tokens, `numbered`."""
    answers: Answers
    """The same answers: prompts, texts, tokens, and the other columns of the data set."""
    records: Sequence[int]
    """The number of each answer's prompt among the training prompts of the run."""
    scores: Scores | None
    """Their rewards; None for answers of the data set."""


def with_solutions(step: StepAnswers, group_size: int, pass_score: float) -> StepAnswers:
    """The step with the column `solution_of_group`: the first other answer of each answer's group that is right.

    An answer whose group has no other right one has None there and is not learned from: its response mask is False.

    Args:
        step: answers of which `group_size` neighbors belong to the same prompt, with scores.
        group_size: G.
        pass_score: least score of a right answer.

    Source: Hübotter et al., "SDPO", arXiv 2601.20802, whose successful answers are the feedback on the others; the
    choice and the mask are those of TRL 1.16 (`success_reward_threshold`, `dont_reprompt_on_self_success`).
    """
    assert step.scores is not None
    right = [row for row, total in enumerate(step.scores.total) if total >= pass_score]
    others = [
        next((other for other in right if other != row and other // group_size == row // group_size), None)
        for row in range(len(step.answers))
    ]
    solutions = [None if other is None else step.answers.responses[other] for other in others]
    mask = step.sequences.response_mask
    is_shown = torch.tensor([other is not None for other in others], device=mask.device)
    return step._replace(
        sequences=replace(step.sequences, response_mask=mask & is_shown[:, None]),
        answers=replace(step.answers, columns={**step.answers.columns, SOLUTION_OF_GROUP: solutions}),
    )


class Teacher(Protocol):
    """States the distributions of the tokens of answers."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Frozen models that it keeps in memory in addition to the actor, which the memory plan counts."""

    def begin_step(self, step: StepAnswers) -> None:
        """Tells it the answers of a step before any of them is read; the actor is in training mode. Collective."""

    def read(self, sequences: Sequences) -> Sequence[Taught]:
        """Its distributions of the response tokens of some rows of the step, without gradients.

        Tokens are numbered in the order of the True cells of `sequences.response_mask`. Called once or more for rows
        that the actor reads next, as often on every process; what it returns is valid until the next call. Meets other
        processes only in forward passes.
        """


class TeacherPrompts:
    """The prompts of `--teacher-prompt`, after which a teacher reads the answers of a step."""

    def __init__(
        self,
        template: str,
        rows: Sequence[PromptRow],
        tokenizer: PreTrainedTokenizerBase,
        max_solution_tokens: int = 0,
    ) -> None:
        """Encodes the prompts of all training rows, without the answers of a step that they show.

        Args:
            template: as in `fill_prompt`.
            rows: the training prompts of the run.
            tokenizer: the actor's.
            max_solution_tokens: tokens of an answer that the prompts show by `{solution_of_group}`.

        Raises:
            ValueError: the data has a column of that name.
        """
        self.pad_token = tokenizer.pad_token_id
        self._shows_solutions = SOLUTION_OF_GROUP in template_columns(template)
        self._template, self._rows, self._tokenizer = template, rows, tokenizer
        named = next((row for row in rows if self._shows_solutions and SOLUTION_OF_GROUP in row.columns), None)
        if named is not None:
            raise ValueError(
                f"{named.place} has a column {SOLUTION_OF_GROUP!r}, the name in --teacher-prompt of another answer of "
                "the step; rename it with --columns"
            )
        self._prompts = [self._encode(row, "") for row in rows]
        self._max_solution_tokens = max_solution_tokens if self._shows_solutions else 0
        self._step: Sequences | None = None

    def _encode(self, row: PromptRow, solution: str) -> list[int]:
        if self._shows_solutions:
            row = replace(row, columns={**row.columns, SOLUTION_OF_GROUP: solution})
        return encode_prompt(self._tokenizer, fill_prompt(row, self._template))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._prompts)) + self._max_solution_tokens

    def of_step(self, step: StepAnswers) -> list[list[int]]:
        """The tokens of the prompt of each answer.

        If a solution's text takes more tokens than it was sampled with, the longest prompts lose their beginning.
        """
        if not self._shows_solutions:
            return [self._prompts[record] for record in step.records]
        shown = zip(step.records, step.answers.columns[SOLUTION_OF_GROUP], strict=True)
        return [self._encode(self._rows[record], solution or "")[-self.longest :] for record, solution in shown]

    def begin_step(self, step: StepAnswers) -> None:
        """Takes the answers of a step."""
        answers = [list(ids) for ids in step.answers.response_ids]
        batch = build_sequences(self.of_step(step), answers, self.pad_token, torch.device("cpu"))
        learned = step.sequences.on_host.response_mask[:, : batch.response_mask.shape[1]]  # without gaps in answers
        self._step = replace(batch, response_mask=learned).to(step.sequences.input_ids.device)

    def seen(self, sequences: Sequences) -> Sequences:
        """The rows of a step after the teacher's prompts."""
        assert self._step is not None and sequences.numbers is not None
        return self._step.rows(sequences.numbers)


def prompts_read(prompts: TeacherPrompts | None, step: StepAnswers) -> Sequence[list[int]]:
    """The tokens of the prompt that a teacher reads before each answer; without prompts of its own the student's."""
    return step.answers.prompt_ids if prompts is None else prompts.of_step(step)


@dataclass(frozen=True, kw_only=True)
class ModelTeacher:
    """A frozen model, whole on every process."""

    model: nn.Module
    temperature: float
    """Temperature of its distributions."""
    prompts: TeacherPrompts | None = None
    """None: it reads the tokens that the student reads."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return [self.model]

    def begin_step(self, step: StepAnswers) -> None:
        """Needs the step's answers only for prompts of its own."""
        if self.prompts is not None:
            self.prompts.begin_step(step)

    def read(self, sequences: Sequences) -> Sequence[Taught]:
        """Hidden states of all tokens, and its head."""
        seen = sequences if self.prompts is None else self.prompts.seen(sequences)
        return [Taught(response_states(self.model, seen, self.temperature))]

    @torch.no_grad()
    def logprobs(self, sequences: Sequences, sizes: RunPasses) -> torch.Tensor:
        """`[N, T]` fp32: its log-probabilities of the response tokens, 0 on padding; in passes of `sizes`."""
        return in_parts(partial(response_logprobs, temperature=self.temperature), self.model, sequences, sizes)


class AheadTeacher:
    """A frozen model that reads all answers of a step before any is learned from, and is then out of the way.

    Between two steps it waits in host memory; or its weights are sharded as ZeRO-3 shards the actor's, and gathered
    layer by layer. Its head stays, whole. Hidden states of the answers wait in host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        sizes: RunPasses,
        prompts: TeacherPrompts | None = None,
        *,
        waits_on: torch.device | None = None,
    ) -> None:
        """Takes the model.

        Args:
            model: frozen, or an engine that trains nothing.
            temperature: of its distributions.
            sizes: of the run's passes.
            prompts: those that it reads; None: the student's.
            waits_on: the device on which it is between two steps; None: it is not moved.
        """
        self.model, self.temperature, self.sizes, self.prompts, self.waits_on = (
            model, temperature, sizes, prompts, waits_on,
        )  # fmt: skip
        module: Any = getattr(model, "module", model)
        head, is_sharded = module.get_output_embeddings(), model is not module
        with GatheredParameters([head.weight, head.bias]):
            parts = [None if x is None else x.detach() for x in (head.weight, head.bias)]
            self._weight, self._bias = (None if x is None else x.to(default_device(), copy=is_sharded) for x in parts)
        self._stated: list[HeadStates | WholeLogProbs] = []

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return [getattr(self.model, "module", self.model)]

    def begin_step(self, step: StepAnswers) -> None:
        """Reads all answers, a few rows at a time. Collective if the model is."""
        order = torch.arange(len(step.records))
        if self.prompts is not None:
            self.prompts.begin_step(step)
        if self.waits_on is not None:
            self.model.to(default_device())
        parts = self.sizes.without_gradients(order.split, partial(self._read_rows, step.sequences), ROWS_PER_PASS)
        if self.waits_on is not None:
            self.model.to(self.waits_on)
        self._stated = [row for part in parts for row in part]

    def _read_rows(self, sequences: Sequences, rows: torch.Tensor) -> list[HeadStates | WholeLogProbs]:
        """The statement of each row, on the host."""
        part = sequences.rows(rows)
        counts = part.on_host.response_mask.sum(dim=1).tolist()
        seen = part if self.prompts is None else self.prompts.seen(part)
        stated = response_states(self.model, seen, self.temperature)
        if isinstance(stated, WholeLogProbs):
            return [WholeLogProbs(row) for row in stated.logprobs.cpu().split(counts)]
        stated = stated._replace(weight=self._weight, bias=self._bias)
        return [stated._replace(hidden=row) for row in stated.hidden.cpu().split(counts)]

    def read(self, sequences: Sequences) -> Sequence[Taught]:
        """The statement of these rows from the beginning of the step."""
        assert sequences.numbers is not None
        stated = [self._stated[number] for number in sequences.numbers.tolist()]
        # The first part of either statement has a row for each token.
        rows = send_to_device(torch.cat([part[0] for part in stated]), sequences.input_ids.device)
        return [Taught(type(stated[0])(rows, *stated[0][1:]))]


@dataclass(frozen=True, kw_only=True)
class ActorTeacher:
    """The actor's own base: with its present weights, without its adapter, or with another adapter; no second copy.

    Self-distillation if it reads another prompt: Shenfeld et al., "Self-Distillation Enables Continual Learning", arXiv
    2601.19897 (SDFT); Zhao et al., "Self-Distilled Reasoner", arXiv 2601.18734 (OPSD); Hübotter et al., "Reinforcement
    Learning via Self-Distillation", arXiv 2601.20802 (SDPO).
    """

    actor: Any
    """`HybridEngine`, which is trained."""
    play: Callable[[], AbstractContextManager[None]]
    """Makes the actor's module compute as the teacher."""
    temperature: float
    """Temperature of its distributions."""
    prompts: TeacherPrompts | None = None

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Nothing besides the actor."""
        return []

    def begin_step(self, step: StepAnswers) -> None:
        """Needs the step's answers only for prompts of its own."""
        if self.prompts is not None:
            self.prompts.begin_step(step)

    def read(self, sequences: Sequences) -> Sequence[Taught]:
        """Hidden states of all tokens, and the student's head."""
        seen = sequences if self.prompts is None else self.prompts.seen(sequences)
        seen = replace(seen, routing=None)  # the teacher chooses its own experts
        with evaluating(self.actor.module), self.play():
            stated = response_states(self.actor, seen, self.temperature)
        if isinstance(stated, HeadStates):  # under ZeRO-3 the head is whole only during a pass
            return [Taught(StatesOfSameHead(stated.hidden, stated.shape))]
        return [Taught(stated)]


class TokenSource(Protocol):
    """Log-probabilities of a teacher's likeliest tokens that are computed elsewhere."""

    def score(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Sequence[TopTokens]:
        """The likeliest tokens at each place of each answer after its prompt."""


class ScoredTeacher:
    """A teacher that scores the answers of a step at once, before they are learned from."""

    def __init__(self, source: TokenSource, prompts: TeacherPrompts | None = None) -> None:
        """Takes the source, and the prompts that it reads; None: the student's."""
        self.source, self.prompts = source, prompts
        self._scored: Sequence[TopTokens] = []

    @property
    def modules(self) -> Sequence[nn.Module]:
        """No model is in this process."""
        return []

    def begin_step(self, step: StepAnswers) -> None:
        """Scores all answers of the step; an error on one process is raised on all."""
        prompts = prompts_read(self.prompts, step)
        self._scored = agree(lambda: self.source.score(prompts, step.answers.response_ids))

    def read(self, sequences: Sequences) -> Sequence[Taught]:
        """The likeliest tokens at each response token."""
        assert sequences.numbers is not None
        rows = zip(sequences.numbers.tolist(), sequences.on_host.response_mask, strict=True)
        parts = [_learned(self._scored[number], mask) for number, mask in rows]
        device = sequences.input_ids.device
        ids, logprobs, log_rest = (send_to_device(torch.cat(part), device) for part in zip(*parts, strict=True))
        return [Taught(TopTokens(ids, logprobs, log_rest))]


def _learned(scored: TopTokens, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tokens of an answer that are learned, by the row `mask` of the response mask."""
    places = mask[: len(scored.ids)]
    return tuple(part[places] for part in (scored.ids, scored.logprobs, scored.all_but_listed()))


class SeveralTeachers:
    """Teachers of which each has a weight for each training row."""

    def __init__(self, teachers: Sequence[Teacher], weights: torch.Tensor, *, reads_always: bool) -> None:
        """Takes the teachers.

        Args:
            teachers: M of them.
            weights: `[rows, M]` fp32, of the divergence from each teacher for each training row of the run.
            reads_always: whether every teacher reads in each pass, since processes meet in its forward pass.
        """
        self.teachers, self.weights, self.reads_always = teachers, weights, reads_always
        self._step = weights[:0]

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The models of all teachers."""
        return [module for teacher in self.teachers for module in teacher.modules]

    def begin_step(self, step: StepAnswers) -> None:
        """Tells all teachers."""
        self._step = self.weights[torch.tensor(list(step.records))]  # [answers, M]
        for teacher in self.teachers:
            teacher.begin_step(step)

    def read(self, sequences: Sequences) -> Sequence[Taught]:
        """The distributions of each teacher for the tokens of its rows."""
        assert sequences.numbers is not None
        mask, taught = sequences.on_host.response_mask, list[Taught]()
        for teacher, weights in zip(self.teachers, self._step[sequences.numbers].T, strict=True):
            rows = weights.nonzero().squeeze(1)
            if not len(rows) and not self.reads_always:
                continue
            told = teacher.read(sequences.rows(rows if len(rows) else torch.tensor([0])))
            if len(rows):
                places = weights[:, None].expand(mask.shape)[mask]  # weights of all tokens
                tokens = places.nonzero().squeeze(1)
                taught += [_of_some(part, tokens, places[tokens], sequences.input_ids.device) for part in told]
        return taught


def _of_some(taught: Taught, tokens: torch.Tensor, weights: torch.Tensor, device: torch.device) -> Taught:
    """A teacher's statement of some rows as a statement of the tokens `tokens` of all, with their weights."""
    tokens, weights = send_to_device(tokens, device), send_to_device(weights, device)
    chosen = weights if taught.tokens is None else weights[taught.tokens]
    return taught.renumbered(tokens)._replace(weight=chosen * taught.weight)


def compare(
    policy: TrainedPolicy, teacher: Teacher, step: StepAnswers, config: DistillConfig
) -> tuple[dict[str, float], TeacherFigures]:
    """Figures of how far the model agrees with its teacher on a step's answers, and where it does not. Collective.

    A token agrees if both have the same likeliest token at its place. The teacher has begun the step.
    """
    found = _compare_all(policy, teacher, step.sequences, config)
    mask = step.sequences.on_host.response_mask
    found["agreement"] = (found["top"] == found["teacher_top"]).float()
    size = -(-max(gather_objects(mask.shape[1])) // MOST_POSITIONS)  # columns of a line of the table
    sums = [
        [float(part.sum()) for part in (cells, *(found[name] * cells for name in AGREEMENT))]
        for cells in _by_columns(mask, size)
    ]
    everyones = gather_objects(sums)
    totals = [
        [sum(column) for column in zip(*rows, strict=True)] for rows in zip_longest(*everyones, fillvalue=NO_SUMS)
    ]
    lines = [
        {"first": size * index, "last": size * (index + 1) - 1, "tokens": count}
        | {name: total / count for name, total in zip(AGREEMENT, rest, strict=True)}
        for index, (count, *rest) in enumerate(totals)
        if count
    ]
    worst = [token for part in gather_objects(_worst(policy.tokenizer, step, found)) for token in part]
    worst.sort(key=lambda token: -token["divergence"])
    num_tokens = max(1.0, sum(row[0] for row in totals))
    figures = {name: sum(row[1 + index] for row in totals) / num_tokens for index, name in enumerate(AGREEMENT)}
    del figures["divergence"]  # the update measures it too
    return figures, TeacherFigures(lines, worst[:NUM_WORST])


def _compare_all(
    policy: TrainedPolicy, teacher: Teacher, sequences: Sequences, config: DistillConfig
) -> dict[str, torch.Tensor]:
    """`token_comparison` of all rows, `[N, T]` on the host."""
    num_rows, num_columns = sequences.response_mask.shape

    def compute(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        part = sequences.rows(rows)
        choices = config.temperature, config.divergence_beta, config.teacher_top_k
        found = response_comparison(policy.actor, teacher.read(part), part, *choices)
        return {name: pad(values, (0, num_columns - values.shape[1])).cpu() for name, values in found.items()}

    most = ROWS_PER_PASS_ON_CPU if sequences.input_ids.device.type == "cpu" else ROWS_PER_PASS
    parts = policy.sizes.without_gradients(lambda rows: torch.arange(num_rows).split(rows), compute, most)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _by_columns(mask: torch.Tensor, size: int) -> list[torch.Tensor]:
    """`mask [N, T]` in parts of `size` columns, each as wide as all."""
    place = torch.arange(mask.shape[1]) // size
    return [mask & (place == index) for index in range(int(place[-1]) + 1)]


def _worst(
    tokenizer: PreTrainedTokenizerBase, step: StepAnswers, found: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """The tokens of this process with the largest divergences, with the text before them."""
    mask = step.sequences.on_host.response_mask
    divergences = found["divergence"].masked_fill(~mask, -1.0).flatten()
    worst = []
    for place in divergences.topk(min(NUM_WORST, int(mask.sum()))).indices.tolist():
        row, column = divmod(place, mask.shape[1])
        width = step.sequences.input_ids.shape[1] - mask.shape[1]
        ids = step.sequences.on_host.input_ids[row, : width + column][
            step.sequences.on_host.attention_mask[row, : width + column].bool()
        ]
        tokens = {name: int(found[name][row, column]) for name in ("top", "teacher_top")}
        tokens["token"] = int(step.sequences.on_host.input_ids[row, width + column])
        worst.append(
            {"divergence": float(divergences[place]), "before": tokenizer.decode(ids[-TOKENS_BEFORE:])}
            | {name: tokenizer.decode([token]) for name, token in tokens.items()}
        )
    return worst
