"""Options of `hybrid-engine distill`."""

import math
import string
from dataclasses import dataclass
from urllib.parse import urlsplit

from hybrid_engine.config.checks import (
    check_above,
    check_answers,
    check_between,
    check_count,
    check_finite,
    check_one_of,
    flag,
    option,
)
from hybrid_engine.rlhf.options.shared import PromptRunOptions, check_minibatch, derive_minibatch

OF_OTHER_TOKENS = ("span-jsd", "uld")
"""Divergences from a teacher whose tokens are not the actor's."""
DIVERGENCES = ("forward-kl", "reverse-kl", "jsd", *OF_OTHER_TOKENS)
PRESENT_WEIGHTS, FIRST_WEIGHTS = "self", "base"
"""Teachers that are the model itself: as it is trained, and as it was at the start."""
OWN_WEIGHTS = (PRESENT_WEIGHTS, FIRST_WEIGHTS)
ADAPTER_PREFIX = "adapter:"
"""Before the folder of an adapter on the model that is trained."""
SOLUTION_OF_GROUP = "solution_of_group"
"""The name in `--teacher-prompt` of another answer of the same group that is right."""


def adapter_of(teacher: str) -> str | None:
    """The folder of a teacher that is an adapter on the model that is trained; None for other kinds."""
    return teacher.removeprefix(ADAPTER_PREFIX) if teacher.startswith(ADAPTER_PREFIX) else None


def is_address(teacher: str) -> bool:
    """Whether a teacher is the address of a server."""
    return urlsplit(teacher).scheme in ("http", "https")


def is_model(teacher: str) -> bool:
    """Whether a teacher is the name or folder of a model, and not another kind."""
    return teacher not in OWN_WEIGHTS and not is_address(teacher) and adapter_of(teacher) is None


def template_columns(template: str) -> list[str]:
    """The columns that a template of a prompt names, such as `{answer}`, in order; doubled braces are braces.

    Raises:
        ValueError: naming `--teacher-prompt`: braces do not match, or do not enclose the name of a column.
    """
    remedy = "have the name of a column in each pair of braces, such as {prompt}, and double braces that are text"
    try:
        fields = [field[1:] for field in string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"--teacher-prompt={template!r} must {remedy} ({error})") from error
    names = []
    for name, form, conversion in fields:
        if name is None:  # text after the last pair of braces
            continue
        if not name.isidentifier() or form or conversion:
            raise ValueError(f"--teacher-prompt={template!r} must {remedy}; {{{name}}} is not one")
        names.append(name)
    return names


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """The models that a run learns from."""

    teacher: str | tuple[str, ...] | None = option(
        None,
        "Model to learn from, required: a Hugging Face name or folder with the actor's tokens; self (the actor's "
        "present weights) or base (its first weights, those below its adapter), which need --teacher-prompt; "
        "adapter:FOLDER (on --model); or the address of a server that scores prompts, http://host:port/v1#model. "
        "Several are mixed, or named for --teacher-column: name=MODEL",
    )
    teacher_prompt: str | None = option(
        None,
        "Prompt that the teacher reads in place of the actor's, with columns of the data in braces, such as "
        "'{prompt} The answer is {answer}.'; {prompt} is the prompt's text, or the last message of a conversation; "
        "{solution_of_group} is another answer to it in the same step that is right, by --pass-score, and answers "
        "without one are not learned from",
    )
    teacher_average: float = option(
        0.0,
        "With --teacher base: share of the actor's present weights that each optimizer step adds to the teacher's, an "
        "exponential moving average; 0: the teacher keeps the first weights, 1: it has the present ones",
    )
    teacher_column: str | None = option(
        None,
        "With several teachers: column with the name of the row's teacher, or with weights by their names",
    )
    teacher_weights: tuple[float, ...] = option(
        (),
        "With several teachers and no --teacher-column: weight of each; default: the same",
    )
    teacher_temperature: float = option(1.0, "Temperature of the teacher's distributions")
    teacher_top_k: int = option(
        0,
        "Divergence over the teacher's K likeliest tokens, and all others as one class; 0: over the whole vocabulary",
    )
    teacher_cache: str | None = option(
        None,
        "Folder with the teacher's likeliest tokens of the dataset's answers: written by the first run, read by later "
        "ones in place of the teacher; needs --on-policy-share 0 and --teacher-top-k",
    )
    teacher_offload: bool = option(
        False,
        "Keep the teacher in host memory but for the time in which it reads a step's answers; without effect on a CPU",
    )
    teacher_sharded: bool = option(False, "Shard the teacher's weights over the processes, as --zero-stage 3 does")
    teacher_timeout: float = option(120.0, "Time limit of one request to a teacher at an address, in seconds")
    teacher_requests: int = option(8, "Requests of each process that may wait for a teacher at an address at once")

    def __post_init__(self) -> None:
        check_above("teacher_temperature", self.teacher_temperature, 0)
        check_count("teacher_top_k", self.teacher_top_k, 0)
        check_above("teacher_timeout", self.teacher_timeout, 0)
        check_count("teacher_requests", self.teacher_requests, 1, 1024)
        if self.teacher_prompt is not None:
            template_columns(self.teacher_prompt)
        sources = list(self.teachers.values())
        self._check_own(sources)
        self._check_average(sources)
        self._check_addresses(sources)
        self._check_weights(len(sources))
        self._check_cache(sources)
        self._check_places()

    @property
    def teachers(self) -> dict[str, str]:
        """The teachers by the names that a column gives them; without names by themselves."""
        given = (self.teacher,) if isinstance(self.teacher, str) else self.teacher or ()
        if self.teacher_column is None:
            if len(set(given)) < len(given):
                raise ValueError(
                    f"--teacher={' '.join(given)!r} names a teacher twice; use --teacher-weights to weigh it"
                )
            return {source: source for source in given}
        pairs = [source.partition("=") for source in given]
        unnamed = next((source for name, _, source in pairs if not name.isidentifier() or not source), None)
        if unnamed is not None or len({name for name, _, _ in pairs}) < len(pairs):
            raise ValueError(
                f"--teacher={' '.join(given)!r} needs a different name before each teacher for "
                f"--teacher-column={self.teacher_column!r}; write name=MODEL"
            )
        return {name: source for name, _, source in pairs}

    @property
    def learns_from(self) -> tuple[str | None, ...]:
        """The teachers that are models of their own in memory, None for the first weights of the actor."""
        if self.teacher_cache is not None:
            return ()
        is_copied = not getattr(self, "lora_rank", 0)  # the first weights, of which nothing is left otherwise
        models = [s for s in self.teachers.values() if is_model(s) or (s == FIRST_WEIGHTS and is_copied)]
        return tuple(None if source == FIRST_WEIGHTS else source for source in models)

    @property
    def shows_solutions(self) -> bool:
        """Whether the teacher sees another answer of the same group."""
        return self.teacher_prompt is not None and SOLUTION_OF_GROUP in template_columns(self.teacher_prompt)

    @property
    def keeps_average(self) -> bool:
        """Whether a moving average of the actor's weights teaches."""
        return self.teacher_average > 0

    def _check_own(self, sources: list[str]) -> None:
        for source in sources:
            is_alone = source == PRESENT_WEIGHTS or len(sources) == 1
            if source in OWN_WEIGHTS and is_alone and self.teacher_prompt is None:
                raise ValueError(
                    f"--teacher={source} would teach the actor what it does already; give --teacher-prompt, which the "
                    "teacher reads, or another teacher"
                )
            if adapter_of(source) is not None and not getattr(self, "lora_rank", 0):
                raise ValueError(
                    f"--teacher={source} is an adapter on the base that --lora-rank keeps; give --lora-rank, such as 8"
                )

    def _check_average(self, sources: list[str]) -> None:
        check_between("teacher_average", self.teacher_average, 0, 1)
        if not self.keeps_average:
            return
        given = f"--teacher-average={self.teacher_average:g}"
        if sources and sources.count(FIRST_WEIGHTS) != 1:
            raise ValueError(
                f"{given} averages the weights of one --teacher=base, not of --teacher={' '.join(sources)}; give "
                "--teacher base, or leave it out"
            )
        for name in ("teacher_offload", "teacher_sharded"):
            if getattr(self, name):
                raise ValueError(
                    f"{given} changes the teacher in each optimizer step, and {flag(name)} lets it read a step's "
                    "answers before the first; give one of them"
                )

    def _check_addresses(self, sources: list[str]) -> None:
        addresses = list(filter(is_address, sources))
        for name in ("teacher_timeout", "teacher_requests"):
            if not addresses and (value := getattr(self, name)) != getattr(TeacherOptions, name):
                raise ValueError(f"{flag(name)}={value} applies to a --teacher at an address; leave it out")
        if addresses and not self.teacher_top_k:
            raise ValueError(
                f"--teacher={addresses[0]} reports the likeliest tokens alone; give --teacher-top-k, such as 20"
            )
        if addresses and self.teacher_temperature != 1:
            raise ValueError(
                f"--teacher-temperature={self.teacher_temperature} needs all logits, which --teacher={addresses[0]} "
                "does not report; leave it at 1"
            )

    def _check_places(self) -> None:
        chosen = [flag(name) for name in ("teacher_offload", "teacher_sharded") if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} both say where the teacher is; give one of them")
        if chosen and self.teachers and not self.learns_from:
            raise ValueError(f"{chosen[0]} is for a teacher that is a model of its own in memory; leave it out")

    def _check_cache(self, sources: list[str]) -> None:
        if self.teacher_cache is None:
            return
        changing = [source for source in sources if source in OWN_WEIGHTS or adapter_of(source) is not None]
        if changing or len(sources) > 1:
            raise ValueError(
                f"--teacher-cache={self.teacher_cache!r} keeps the pass of one model or address, not of --teacher="
                f"{' '.join(sources)}; leave it out"
            )
        if not self.teacher_top_k:
            raise ValueError(
                f"--teacher-cache={self.teacher_cache!r} keeps the likeliest tokens; give --teacher-top-k, such as 20"
            )

    def _check_weights(self, num_teachers: int) -> None:
        shown = " ".join(f"{weight:g}" for weight in self.teacher_weights)
        if num_teachers < 2 and (self.teacher_column is not None or shown):
            name, value = ("--teacher-weights", shown) if shown else ("--teacher-column", self.teacher_column)
            raise ValueError(f"{name}={value} is for several teachers; give more than one --teacher, or leave it out")
        if shown and self.teacher_column is not None:
            raise ValueError(f"--teacher-weights={shown!r} is replaced by --teacher-column; give one of them")
        if not shown:
            return
        if len(self.teacher_weights) != num_teachers:
            raise ValueError(f"--teacher-weights={shown!r} must be {num_teachers} numbers, one for each --teacher")
        if any(not 0 <= weight < math.inf for weight in self.teacher_weights) or not any(self.teacher_weights):
            raise ValueError(
                f"--teacher-weights={shown!r} must be at least 0 and sum to more than 0; give other numbers"
            )


@dataclass(frozen=True, kw_only=True)
class DistillConfig(TeacherOptions, PromptRunOptions):
    """Trains a language model to answer like a teacher: it answers, and its teacher says how likely each token was.

        hybrid-engine distill --teacher runs/sums/actor
        hybrid-engine distill --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B --dataset problems.jsonl --reward math

    On-policy distillation: the divergence of the two models' distributions is minimized over the model's own answers,
    or with --on-policy-share below 1 also over those of the dataset. Without --model, a small model that adds numbers
    and forgets the carry is trained first. Rewards are not learned from: they say how good the answers are. Writes to
    --out what grpo writes.
    """

    HAS_RATIOS = False
    OWN_LENGTHS = (96, 48)
    out: str = "runs/distilled"
    model: str | None = option(
        None,
        "Hugging Face name or folder of the model that learns; default: a small model that adds numbers, trained if "
        "missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" and the '
        "columns that the rewards read; default: sums",
    )
    divergence: str = option(
        "reverse-kl",
        "Divergence from the teacher: forward-kl (teacher from student), reverse-kl or jsd (generalized "
        "Jensen-Shannon); from one with other tokens: span-jsd (jsd of the probabilities of common spans of text) or "
        "uld (sorted probabilities at their ends)",
    )
    beta: float | None = option(
        None,
        "With --divergence jsd and span-jsd: weight of the teacher in the mixture, above 0 and below 1; default: 0.5",
    )
    on_policy_share: float = option(
        1.0,
        "Probability that a step learns from the model's own answers, and not from those of the dataset's column "
        '"completion": 1 never reads these, 0 samples none in training',
    )
    group_size: int = option(1, "Answers per prompt")
    minibatch_size: int = option(
        0,
        "Answers per optimizer step, over all processes; 0: the largest divisor of a step's answers, up to 64, that "
        "the processes share equally",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 3e-4, with --model 1e-5, for an adapter on it 1e-4",
    )
    eval_prompts: int = 128
    eval_samples: int = option(8, "Answers per held-out prompt, the k of pass@k")
    pass_score: float = option(1.0, "Minimum score of a correct answer in pass@k")

    def __post_init__(self) -> None:
        PromptRunOptions.__post_init__(self)
        derive_minibatch(self, self.rollout_size * self.group_size, 64)
        for name in ("group_size", "minibatch_size", "eval_samples"):
            check_count(name, getattr(self, name), 1)
        check_finite("pass_score", self.pass_score)
        check_above("learning_rate", self.learning_rate, 0)
        TeacherOptions.__post_init__(self)
        check_answers(self.rollout_size, self.group_size)
        check_one_of("divergence", self.divergence, DIVERGENCES)
        if self.beta is not None and self.divergence not in ("jsd", "span-jsd"):
            raise ValueError(
                f"--beta={self.beta} applies to --divergence jsd and span-jsd, not {self.divergence}; leave it out"
            )
        if self.beta is not None:
            check_between("beta", self.beta, 0, 1)
        if self.beta in (0, 1) and self.divergence == "jsd":
            name = "forward-kl" if self.beta == 0 else "reverse-kl"
            raise ValueError(f"--beta={self.beta:g} is --divergence {name}; pass that")
        check_minibatch(self.rollout_size, self.group_size, self.minibatch_size)
        check_between("on_policy_share", self.on_policy_share, 0, 1)
        if self.learns_given_answers and self.dataset is None:
            raise ValueError(
                f"--on-policy-share={self.on_policy_share:g} learns from a dataset's answers; give --dataset with a "
                'column "completion", or leave it at 1'
            )
        if self.learns_given_answers and self.group_size > 1:
            raise ValueError(
                f"--group-size={self.group_size} applies to the model's own answers, and --on-policy-share="
                f"{self.on_policy_share:g} learns from the single answer that a row has; leave it at 1"
            )

        if self.teacher_cache is not None and self.on_policy_share:
            raise ValueError(
                f"--teacher-cache={self.teacher_cache!r} has the answers of the dataset, and --on-policy-share="
                f"{self.on_policy_share:g} learns from the model's own; set it to 0, or leave the cache out"
            )

        if self.shows_solutions and (self.group_size < 2 or self.learns_given_answers):
            given = f"--on-policy-share={self.on_policy_share:g}" if self.learns_given_answers else "--group-size=1"
            raise ValueError(
                f"--teacher-prompt shows {{{SOLUTION_OF_GROUP}}}, another answer to the same prompt, which {given} "
                "does not give; set --on-policy-share 1 and --group-size to 2 or more, such as 8"
            )
        if self.has_other_tokens:
            self._check_other_tokens()

    def _check_other_tokens(self) -> None:
        given = f"--divergence {self.divergence}"
        if self.teacher_top_k:
            raise ValueError(f"--teacher-top-k={self.teacher_top_k} has no effect with {given}; leave it out")
        for name in ("teacher_offload", "teacher_sharded", "teacher_average"):
            if getattr(self, name):
                raise ValueError(f"{flag(name)} does not exist for {given}; leave it out")
        if self.teachers and len(self.learns_from) < len(self.teachers):
            raise ValueError(
                f"{given} is for teachers that are models of their own in memory; use another divergence, or give the "
                "name or folder of a model"
            )

    @property
    def has_other_tokens(self) -> bool:
        """Whether the teacher's tokens may be others than the actor's."""
        return self.divergence in OF_OTHER_TOKENS

    @property
    def learns_given_answers(self) -> bool:
        """Whether some steps learn from the answers of the dataset."""
        return self.on_policy_share < 1

    @property
    def needs_reference(self) -> bool:
        """The first weights are not compared with."""
        return False

    @property
    def divergence_beta(self) -> float:
        """Beta of the divergence in TRL's orientation: 0 is the forward KL, 1 the reverse."""
        return {"forward-kl": 0.0, "reverse-kl": 1.0}.get(self.divergence, 0.5 if self.beta is None else self.beta)
