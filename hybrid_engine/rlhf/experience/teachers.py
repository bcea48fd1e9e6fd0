"""Teachers of `hybrid-engine distill` and `grpo`: they state the distributions of the tokens of answers.

In each step the recipe gives a teacher the step's answers by `begin_step`, and then asks it by `read` about the rows of
each forward pass of the student. `response_divergences` takes what it states. To add a kind of teacher:

1. Write a class with the members of `Teacher`. `read` returns a list of `Taught`: usually one for all tokens, or one
   for the tokens of each of several teachers, with weights. The forms of a statement are `HeadStates` (hidden states
   and the head, compared in tiles over the whole vocabulary), `StatesOfSameHead` (the same, if the head is the
   student's), `WholeLogProbs` (for models whose logits are needed) and `TopTokens` (log-probabilities of K tokens).
2. Add its options to `DistillConfig`, build it in `load_teacher`, and refuse in `check_teacher` what can be refused
   before any model is loaded.

A teacher that needs more than the student's tokens finds it by `sequences.numbers`: the number of each row among the
answers that `begin_step` gave, whose prompts, columns, scores and rows of the data set are there.

N: response tokens of some rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.optim.build import cast_module
from hybrid_engine.rlhf.batches.head_log_probs import Taught
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.passes import RunPasses
from hybrid_engine.rlhf.batches.sequences import (
    Sequences,
    in_parts,
    response_comparison,
    response_logprobs,
    response_states,
)
from hybrid_engine.rlhf.experience.policy import TrainedPolicy
from hybrid_engine.rlhf.options.distillation import DistillConfig
from hybrid_engine.rlhf.options.reinforcement import GRPOConfig
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.rewards.scores import Answers, Scores
from hybrid_engine.rlhf.runs.engine_config import torch_dtype
from hybrid_engine.rlhf.runs.run_checks import check_positions
from hybrid_engine.rlhf.runs.run_folder import TeacherFigures
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import load_config, load_model, load_tokenizer, num_positions

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


@dataclass(frozen=True, kw_only=True)
class ModelTeacher:
    """A frozen model, whole on every process, which reads the tokens that the student reads."""

    model: nn.Module
    temperature: float
    """Temperature of its distributions."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The model."""
        return [self.model]

    def begin_step(self, step: StepAnswers) -> None:
        """Needs nothing of a step in advance."""

    def read(self, sequences: Sequences) -> Sequence[Taught]:
        """Hidden states of all tokens, and its head."""
        return [Taught(response_states(self.model, sequences, self.temperature))]

    @torch.no_grad()
    def logprobs(self, sequences: Sequences, sizes: RunPasses) -> torch.Tensor:
        """`[N, T]` fp32: its log-probabilities of the response tokens, 0 on padding; in passes of `sizes`."""
        return in_parts(partial(response_logprobs, temperature=self.temperature), self.model, sequences, sizes)


def check_teacher(config: DistillConfig) -> None:
    """Raises ValueError if there is no teacher, it cannot be loaded, or it has other or too few tokens."""
    if config.teacher is None:
        raise ValueError("--teacher is missing; give the Hugging Face name or folder of a model")
    check_model_teacher(config.teacher, config.model)
    num_tokens = load_config(config.teacher, "teacher").get_text_config().vocab_size
    if config.teacher_top_k > num_tokens:
        raise ValueError(
            f"--teacher-top-k={config.teacher_top_k} must not exceed the {num_tokens} tokens of --teacher="
            f"{config.teacher!r}; lower it, or leave it out for the whole vocabulary"
        )


def check_model_teacher(teacher: str, actor: str | None) -> None:
    """Raises ValueError if the model `teacher` cannot be loaded, or the model `actor` has other tokens."""
    load_config(teacher, "teacher")
    if actor is not None:
        check_same_tokens(load_tokenizer(teacher), load_tokenizer(actor), teacher)


def load_teacher(config: DistillConfig, policy: TrainedPolicy, longest: int) -> Teacher:
    """The teacher of a run. Collective; arguments and errors are those of `load_model_teacher`."""
    return load_model_teacher(config, policy, longest, config.teacher_temperature)


def load_model_teacher(
    config: DistillConfig | GRPOConfig, policy: TrainedPolicy, longest: int, temperature: float
) -> ModelTeacher:
    """The model that `--teacher` names. Collective.

    Args:
        config: of the run.
        policy: its actor.
        longest: tokens of the longest prompt.
        temperature: of the teacher's distributions.

    Raises:
        ValueError: the teacher has too few positions for the longest prompt with its answer, or other tokens.
    """
    assert config.teacher is not None
    check_positions(config, longest, f"--teacher={config.teacher!r}", num_positions(load_config(config.teacher)))
    check_same_tokens(load_tokenizer(config.teacher), policy.tokenizer, config.teacher)
    model = load_frozen(config.teacher, config)
    sizes = [module.get_output_embeddings().weight.shape[0] for module in (model, policy.actor.module)]
    if sizes[0] != sizes[1]:
        say(f"teacher: heads of {sizes[0]} and {sizes[1]} tokens; the divergence is over the first {min(sizes)}")
    return ModelTeacher(model=model, temperature=temperature)


def load_frozen(source: str, config: TrainingOptions) -> nn.Module:
    """The model in `source`, frozen, in the run's dtype, whose passes are packed if that is exact. Collective."""
    model = load_model(AutoModelForCausalLM, source)
    cast_module(model, torch_dtype(config.dtype))
    model = model.to(default_device()).eval().requires_grad_(False)
    pack_where_exact(model, config)
    return model


def check_same_tokens(teacher: PreTrainedTokenizerBase, actor: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ValueError unless both tokenizers give the same ids to the same tokens."""
    theirs, ours = teacher.get_vocab(), actor.get_vocab()
    if theirs != ours:
        other = min((token for token in {*theirs, *ours} if theirs.get(token) != ours.get(token)), key=str)
        raise ValueError(
            f"--teacher={name!r} has other tokens than the actor ({other!r} is {theirs.get(other)} and "
            f"{ours.get(other)}); a divergence needs one vocabulary, so give a teacher with the actor's tokenizer"
        )


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
        choices = config.temperature, config.weight_of_teacher, config.teacher_top_k
        found = response_comparison(policy.actor, teacher.read(part), part, *choices)
        return {name: pad(values, (0, num_columns - values.shape[1])).cpu() for name, values in found.items()}

    parts = policy.sizes.without_gradients(lambda rows: torch.arange(num_rows).split(rows), compute)
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
