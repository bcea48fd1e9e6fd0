"""Options that several recipes share: dataclasses from which their `Config` derives, each checking its own fields.

A recipe that declares a field again gives it another default; its description stays.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from hybrid_engine.config.checks import (
    DTYPES,
    LARGEST_SEED,
    check_above,
    check_at_least,
    check_between,
    check_count,
    check_one_of,
    check_texts,
    check_weights,
    flag,
    option,
)
from hybrid_engine.rlhf.options.columns import DataSource, read_names, read_prompt_template

TrainingT = TypeVar("TrainingT", bound="TrainingOptions")
AUTO = "auto"
FRAMEWORKS = ("trl", "verl", "openrlhf")
"""Frameworks whose names of figures a run can use."""
TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "comet_ml": ("comet_ml",),
    "clearml": ("clearml",),
    "aim": ("aim",),
    "dvclive": ("dvclive",),
    "swanlab": ("swanlab",),
}
"""The trackers by accelerate's names, with the packages of which each needs one."""
DEFAULT_TYPE, WITHOUT_WARMUP = "linear", "constant"
EARLIER_TYPE = "WarmupDecayLR"
"""The schedule of runs from before the option existed: DeepSpeed's, whose first two steps have a rate of 0."""
SCHEDULES = (
    DEFAULT_TYPE,
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    WITHOUT_WARMUP,
    "constant_with_warmup",
    "inverse_sqrt",
    EARLIER_TYPE,
)


@dataclass(frozen=True, kw_only=True)
class DtypeOptions:
    """Options of the precision in which models compute."""

    dtype: str = option(
        "auto",
        "Compute dtype of all models: fp32, bf16, fp16 or auto (bf16 on a GPU, fp32 on a CPU); trained weights keep "
        "fp32 master copies",
    )
    tf32: bool = option(False, "Use TF32 for fp32 matrix products on a GPU, which is faster")

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, [AUTO, *DTYPES])
        if self.tf32 and self.dtype not in (AUTO, "fp32"):
            raise ValueError(
                f"--tf32 applies to fp32, but --dtype={self.dtype} computes in 16 bits; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """The learning rate as a function of the step."""

    lr_scheduler_type: str | None = option(
        None,
        "Learning-rate schedule: linear, cosine, cosine_with_restarts, polynomial, constant, constant_with_warmup or "
        "inverse_sqrt as in transformers, or DeepSpeed's WarmupDecayLR; default: linear",
    )
    warmup_steps: int | None = option(
        None,
        "Warm-up of the learning rate, in optimizer steps; default: a tenth of all steps, at most 50 (sft), 20 "
        "(reward), 10 (dpo, kto) or 4 (others)",
    )
    warmup_ratio: float | None = option(None, "Warm-up as a fraction of all optimizer steps")

    def __post_init__(self) -> None:
        if self.lr_scheduler_type is not None:
            check_one_of("lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        check_count("warmup_steps", self.warmup_steps, 0)
        if self.warmup_ratio is not None:
            check_between("warmup_ratio", self.warmup_ratio, 0, 1)
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"--warmup-steps={self.warmup_steps} and --warmup-ratio={self.warmup_ratio} set the same warm-up; give "
                "one of them"
            )
        if self.lr_scheduler_type == WITHOUT_WARMUP and (self.warmup_steps or self.warmup_ratio):
            raise ValueError(
                "--lr-scheduler-type=constant has no warm-up; use constant_with_warmup, or leave --warmup-steps and "
                "--warmup-ratio out"
            )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The folder of a run, how it begins, and the trackers of its figures."""

    out: str = option("runs/docs", "Output folder; stages that are already finished in it are skipped")
    seed: int = option(0, "Random seed")
    restart: bool = option(
        False,
        "Start over; the results of an earlier run are moved to previous-1 (or the next number) inside --out",
    )
    zero_stage: int = option(0, "ZeRO stage of the trained models, 0 to 3")
    tokens_per_micro_batch: int = option(
        0,
        "Tokens per forward pass on each process, with sequences packed without padding where the model supports it; "
        "replaces --micro-batch-size; 0: use --micro-batch-size and pad",
    )
    rows_per_pass: int = option(
        0,
        "Maximum rows per forward pass without gradients on each process (held-out losses, references, values, "
        "scores); 0: chosen for speed, 8 to 64",
    )
    activation_checkpointing: bool = option(False, "Recompute activations in the backward pass: less memory, more time")
    tracker: tuple[str, ...] = option(
        (),
        "Trackers that log the metrics of each step, in addition to metrics.jsonl: tensorboard, wandb, mlflow, "
        "trackio, comet_ml, clearml, aim, dvclive or swanlab; one or more, each needs its package",
    )
    metric_names: str | None = option(
        None,
        "Metric names of trl, verl or openrlhf, for their dashboards; metrics without a counterpart keep their names",
    )

    def __post_init__(self) -> None:
        check_texts(self)
        check_between("seed", self.seed, 0, LARGEST_SEED)
        check_between("zero_stage", self.zero_stage, 0, 3)
        for name in ("tokens_per_micro_batch", "rows_per_pass"):
            check_count(name, getattr(self, name), 0)
        check_trackers(self.tracker)
        if self.metric_names is not None:
            check_one_of("metric_names", self.metric_names, FRAMEWORKS)


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(ScheduleOptions, DtypeOptions, RunOptions):
    """A run that writes checkpoints and resumes from the last of them."""

    resume: bool = option(
        False,
        "Continue from the last checkpoint of an interrupted run, or of a finished one with more --steps or --epochs",
    )
    save_every: int = option(20, "Steps between checkpoints, with one after the last step; 0 saves none")

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)
        ScheduleOptions.__post_init__(self)
        DtypeOptions.__post_init__(self)
        check_count("save_every", self.save_every, 0)


def is_due(every: int, step: int, num_steps: int) -> bool:
    """Whether an action that is due every `every` steps, and after the last, is due after `step`, which counts from 0.

    With `every` 0 it is never due.
    """
    return every > 0 and ((step + 1) % every == 0 or step + 1 == num_steps)


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How rows are read from a dataset."""

    split: str | None = option(None, "Split to read if the dataset has several; default: train")
    dataset_config: str | None = option(
        None,
        "Configuration (the hub's name for a part) to read if the dataset has several",
    )
    columns: tuple[str, ...] = option(
        (),
        "Columns to rename, as THEIRS=OURS, such as question=prompt solution=answer; dots select a nested value, such "
        "as reward_model.ground_truth=answer",
    )
    prompt_template: str | None = option(
        None,
        'Text, or a file with it, that wraps each prompt, with columns in braces: "{prompt} Think first."; without '
        '{prompt} it builds the prompts, such as "{context} {question}"',
    )
    system_prompt: str | None = option(
        None,
        "System prompt for conversations that have none; text prompts become conversations",
    )
    as_conversation: bool = option(
        False,
        "Convert text prompts to user turns and text answers to assistant turns, for models with a chat template",
    )
    skip_bad_rows: bool = option(
        False,
        "Skip invalid rows and report their number and the first reason; by default they are an error",
    )

    def __post_init__(self) -> None:
        read_names(self.columns)
        if self.prompt_template is not None:
            read_prompt_template(self.prompt_template)

    def source_of(self, *datasets: str, option: str) -> DataSource:
        """The datasets that `option` names, as these options read them."""
        return DataSource(
            datasets=datasets,
            option=option,
            split=self.split,
            configuration=self.dataset_config,
            columns=self.columns,
            prompt_template=None if self.prompt_template is None else read_prompt_template(self.prompt_template),
            system_prompt=self.system_prompt,
            is_conversation=self.as_conversation,
            skips_bad_rows=self.skip_bad_rows,
        )


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(RowOptions):
    """The user's datasets, and which of their rows are used and held out."""

    FOR_DATASETS: ClassVar[tuple[str, ...]] = (
        *("split", "dataset_config", "columns", "prompt_template", "system_prompt", "as_conversation"),
        *("skip_bad_rows", "row_key", "deduplicate"),
    )
    """Options that have no meaning without a dataset."""

    dataset: str | tuple[str, ...] | None = option(
        None,
        "A .jsonl, .json, .csv or .parquet file, a folder, a hub name or reasoning_gym:NAME (docs/data.md); several "
        "are mixed",
    )
    held_out_share: float = option(
        0.1,
        "Fraction of the dataset's prompts to hold out for evaluation, selected by hash",
    )
    row_key: tuple[str, ...] = option(
        (),
        "Columns that distinguish rows with the same prompt, such as the seed of a game: each value is held out or "
        "trained on separately; default: the columns that the rewards read, except references",
    )
    deduplicate: bool = option(
        False,
        "Remove duplicate rows (same prompt, answers and --row-key columns); the first is kept",
    )
    skip_too_long: bool = option(
        False,
        "Skip rows that would be refused as too long and prompts that would be truncated, and report their number",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dataset, (list, tuple)):
            one = None if not self.dataset else self.dataset[0] if len(self.dataset) == 1 else tuple(self.dataset)
            object.__setattr__(self, "dataset", one)
        for name in self.FOR_DATASETS:
            value = getattr(self, name)
            if value and self.dataset is None:
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"{flag(name)}={shown!r} needs --dataset; give one, or leave it out")
        check_between("held_out_share", self.held_out_share, 0, 0.9)

    @property
    def source(self) -> DataSource:
        """The source of the rows; only with `dataset`."""
        datasets = self.dataset if isinstance(self.dataset, tuple) else (str(self.dataset),)
        return replace(
            self.source_of(*datasets, option="dataset"),
            row_key=self.row_key,
            deduplicates=self.deduplicate,
            held_out_share=self.held_out_share,
        )


@dataclass(frozen=True, kw_only=True)
class DataOptions(DatasetOptions):
    """Options of the data that a run trains on, and is measured on."""

    FOR_DATASETS = (*DatasetOptions.FOR_DATASETS, "dataset_weights", "held_out_dataset", "held_out_split")
    dataset_weights: tuple[float, ...] = option(
        (),
        "Sampling weight of each --dataset: its share of an epoch, which has as many rows as all datasets together; "
        "default: each row once",
    )
    held_out_dataset: str | None = option(
        None,
        "Dataset to evaluate on, instead of a fraction of --dataset; its prompts are not trained on",
    )
    held_out_split: str | None = option(None, "Split of --held-out-dataset, or of --dataset, to evaluate on")

    def __post_init__(self) -> None:
        super().__post_init__()
        num_datasets = len(self.dataset) if isinstance(self.dataset, tuple) else 1
        for weight in self.dataset_weights:
            check_above("dataset_weights", weight, 0)
        if self.dataset_weights and len(self.dataset_weights) != num_datasets:
            shown = " ".join(f"{weight:g}" for weight in self.dataset_weights)
            raise ValueError(
                f"--dataset-weights={shown!r} must be {num_datasets} numbers above 0, one for each --dataset; change it"
            )
        for name in ("held_out_dataset", "held_out_split"):
            if getattr(self, name) is not None and self.held_out_share not in (0, DatasetOptions.held_out_share):
                raise ValueError(
                    f"--held-out-share={self.held_out_share} of --dataset is replaced by "
                    f"{flag(name)}={getattr(self, name)!r}; give one of them"
                )
        if self.held_out_dataset is None and self.held_out_split is not None and num_datasets > 1:
            raise ValueError(
                f"--held-out-split={self.held_out_split!r} does not say which of several datasets it belongs to; give "
                "--held-out-dataset too"
            )

    @property
    def source(self) -> DataSource:
        """The source of the rows; only with `dataset`."""
        return replace(
            super().source,
            weights=self.dataset_weights,
            held_out_dataset=self.held_out_dataset,
            held_out_split=self.held_out_split,
        )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """A LoRA adapter that is trained in place of all weights."""

    lora_rank: int = option(0, "Rank of the LoRA adapter to train; 0 trains all weights")
    lora_alpha: int = option(8, "LoRA scaling numerator: the adapter's output is multiplied by alpha / rank")
    lora_dropout: float = option(
        0.0,
        "Dropout probability of the adapter's inputs in training; evaluations and references use no dropout",
    )
    lora_targets: tuple[str, ...] = option(
        (),
        "Linear layers that get an adapter, by name suffix, such as q_proj v_proj; default: all except the head",
    )

    def __post_init__(self) -> None:
        check_count("lora_rank", self.lora_rank, 0)
        check_count("lora_alpha", self.lora_alpha, 1)
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"--lora-dropout={self.lora_dropout} must be at least 0 and below 1; change it")
        if self.lora_targets == ("all-linear",):  # peft's name of the default
            object.__setattr__(self, "lora_targets", ())
        for name in ("lora_alpha", "lora_dropout", "lora_targets"):
            value = getattr(self, name)
            if not self.lora_rank and value != getattr(AdapterOptions, name):
                shown = " ".join(value) if isinstance(value, tuple) else value
                raise ValueError(f"{flag(name)}={shown} needs an adapter; give --lora-rank, such as 8, or leave it out")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(AdapterOptions, ResumeOptions):
    """A run that trains `--model`. The plain attributes stand for options that only some recipes have."""

    LENGTH = "epochs"
    """The option that says how long the run is."""
    UPDATE = "batch_size"
    """The option with the samples of an optimizer step over all processes."""
    minibatch_of: ClassVar[tuple[int, int] | None] = None
    """The samples and the largest size that a `minibatch_size` was derived from; None if the user gave it."""
    exact = False
    shared_base = False
    measure_kl = False
    group_size = 1
    eval_samples = 1

    model: str | None = None
    micro_batch_size: int = 1

    def __post_init__(self) -> None:
        ResumeOptions.__post_init__(self)
        AdapterOptions.__post_init__(self)

    @property
    def needs_reference(self) -> bool:
        """Whether a rollout run compares its actor with the first weights."""
        return False

    @property
    def learns_from(self) -> tuple[str | None, ...]:
        """Names or folders of models whose distributions the run learns; None for a copy of its first actor."""
        return ()

    @property
    def keeps_average(self) -> bool:
        """Whether the run keeps a moving average of its actor's weights, from which the actor learns."""
        return False

    @property
    def keeps_reference(self) -> bool:
        """Whether a rollout run keeps the first weights besides the actor's, which an adapter leaves unchanged."""
        return self.needs_reference and not self.lora_rank

    @property
    def update_size(self) -> int:
        """Samples of an optimizer step over all processes."""
        return int(getattr(self, self.UPDATE))

    @property
    def run_length(self) -> int:
        """Steps of the run, or passes over its data."""
        return int(getattr(self, self.LENGTH))


LENGTHS = ("max_prompt_tokens", "max_new_tokens")
"""Options that `data/prompts.py` derives from data and model where they are 0."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(TrainingOptions):
    """How an actor answers, and how many held-out prompts."""

    OWN_LENGTHS = (96, 40)
    """`max_prompt_tokens` and `max_new_tokens` for the small model that is trained without `--model`."""
    ANSWERS_IN_PASS = 1
    """Number of answers, each with its prompt, that a pass of `--tokens-per-micro-batch` must hold together."""
    top_k = 0
    top_p = 1.0
    min_p = 0.0
    router_replay = False

    max_prompt_tokens: int = option(
        0,
        "Maximum prompt length in tokens; longer prompts lose their beginning; 0: the longest in the data, within the "
        "model's positions (96 without --model)",
    )
    max_new_tokens: int = option(
        0,
        "Maximum response length in tokens; 0: 256, or more if the data has longer answers, within the model's "
        "positions (without --model 40; grpo, online-dpo and distill: 48)",
    )
    temperature: float = option(1.0, "Temperature of sampling and of all log-probabilities")
    eval_prompts: int = option(
        256,
        "Held-out prompts to answer in each evaluation: before, after and, with --eval-every, during training",
    )
    max_running: int = option(
        0,
        "Maximum answers decoded at once on each process, which sets the size of the KV workspace; 0: chosen for the "
        "device",
    )

    @property
    def tokens_in_pass(self) -> int:
        """Tokens of a prompt with its answer that a pass can hold; 0: no limit."""
        return self.tokens_per_micro_batch // self.ANSWERS_IN_PASS

    def __post_init__(self) -> None:
        for name, own in zip(LENGTHS, self.OWN_LENGTHS, strict=True):
            check_count(name, getattr(self, name), 0)
            if getattr(self, name) == 0 and self.model is None:
                object.__setattr__(self, name, own)
        check_count("eval_prompts", self.eval_prompts, 1)
        check_count("max_running", self.max_running, 0)
        check_above("temperature", self.temperature, 0)


def check_rollout_budget(config: "RolloutRunOptions") -> None:
    """Raises ValueError if the longest prompt with the longest answer exceeds `--tokens-per-micro-batch`."""
    longest = config.max_prompt_tokens + config.max_new_tokens
    if 0 < config.tokens_per_micro_batch < longest:
        raise ValueError(
            f"--tokens-per-micro-batch={config.tokens_per_micro_batch} must hold the longest sequence, "
            f"--max-prompt-tokens and --max-new-tokens together; raise it to {longest} or more, or lower one of them"
        )


@dataclass(frozen=True, kw_only=True)
class LoopOptions(TrainingOptions):
    """A loop of rollouts and updates: how many, how large, and how often it is evaluated."""

    LENGTH = "steps"
    HAS_RATIOS = True
    """Whether an update compares answers' log-probabilities with those of their rollout."""

    steps: int = option(30, "Training steps, each a rollout followed by its updates")
    rollout_size: int = option(64, "Prompts per step, over all processes")
    micro_batch_size: int = option(64, "Maximum answers per forward pass on each process")
    eval_every: int = option(
        10,
        "Steps between evaluations on held-out prompts; the best model is kept; 0 evaluates only before and after",
    )

    def __post_init__(self) -> None:
        for name in ("steps", "rollout_size", "micro_batch_size"):
            check_count(name, getattr(self, name), 1)
        check_count("eval_every", self.eval_every, 0)
        TrainingOptions.__post_init__(self)
        if self.HAS_RATIOS and self.lora_dropout:
            raise ValueError(
                f"--lora-dropout={self.lora_dropout} would compare two different networks in the ratios of an update, "
                "because a rollout has no dropout: first_ratio would not be 1 and clipping would act on noise; leave "
                "it out"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutRunOptions(LoopOptions, AnswerOptions):
    """A run whose model learns from its own answers."""

    UPDATE = "minibatch_size"

    top_k: int = option(
        0,
        "Sample from the K likeliest tokens only; log-probabilities of the run are then renormalised over the tokens "
        "that the sampler kept, recorded with each token; 0 keeps all",
    )
    top_p: float = option(
        1.0,
        "Sample from the likeliest tokens that reach this probability together, recorded as with --top-k; 1 keeps all",
    )
    min_p: float = option(
        0.0,
        "Sample from tokens with at least this fraction of the likeliest one's probability, recorded as with --top-k; "
        "0 keeps all",
    )
    router_replay: bool = option(
        False,
        "Train a mixture of experts with the experts that each token took in the rollout, which are recorded with it",
    )

    def __post_init__(self) -> None:
        LoopOptions.__post_init__(self)
        AnswerOptions.__post_init__(self)
        check_rollout_budget(self)
        check_filters(self.top_k, self.top_p, self.min_p)

    @property
    def has_filters(self) -> bool:
        """Whether an option leaves a part of the vocabulary to sample from, which is recorded with each token."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


def check_filters(top_k: int, top_p: float, min_p: float) -> None:
    """Raises ValueError for filters that leave one token, or none: its log-probability is 0 under every policy."""
    check_count("top_k", top_k, 0)
    check_above("top_p", top_p, 0)
    check_between("top_p", top_p, 0, 1)
    check_between("min_p", min_p, 0, 1)
    for name, value, example in (("top_k", top_k, 20), ("min_p", min_p, 0.05)):
        if value == 1:
            raise ValueError(
                f"{flag(name)}={value} leaves one token, whose log-probability is 0 under every policy; give another "
                f"number, such as {example}, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(RolloutRunOptions):
    """How an actor answers, in training and in evaluation, if it learns from its own answers."""

    logprob_bound: float = option(
        1e-3,
        "Use the rollout's log-probabilities as the old ones if their mean difference from the trainer's is at most "
        "this",
    )
    exact: bool = option(
        False,
        "Make rollout log-probabilities bitwise equal to the trainer's, which is slower (docs/exact.md)",
    )

    def __post_init__(self) -> None:
        check_at_least("logprob_bound", self.logprob_bound, 0)
        if self.exact and self.activation_checkpointing:
            raise ValueError(
                "--exact uses its own forward pass, which keeps activations; leave it or --activation-checkpointing out"
            )
        if self.exact and self.router_replay:
            raise ValueError("--exact chooses the same experts in both anyway; leave it or --router-replay out")


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """The rewards that judge answers."""

    reward: tuple[str, ...] = option(
        (),
        "Rewards: exact, number, math, regex:PATTERN, length:..., reasoning_gym, the judges ruler:... and "
        "pairwise:..., the folder of a reward model, or module:function; several are summed (docs/rewards.md); "
        "default: that of the recipe's own task",
    )
    reward_weights: tuple[float, ...] = option((), "Weight of each --reward; default: 1 each")
    reward_time_limit: float = option(300.0, "Time limit of one reward call, in seconds")

    def __post_init__(self) -> None:
        if isinstance(self.reward, str):
            raise ValueError(f"--reward={self.reward!r} must be a list; put it in one: ({self.reward!r},)")
        check_above("reward_time_limit", self.reward_time_limit, 0)
        if self.reward_weights and not self.reward:
            raise ValueError("--reward-weights need rewards; give as many --reward")
        check_weights(len(self.reward), self.reward_weights or None)


@dataclass(frozen=True, kw_only=True)
class PromptRunOptions(RewardOptions, DataOptions, RolloutRunOptions):
    """A run whose model answers the prompts of a dataset, and whose answers get rewards."""

    def __post_init__(self) -> None:
        RolloutRunOptions.__post_init__(self)
        RewardOptions.__post_init__(self)
        DataOptions.__post_init__(self)

    @property
    def needs_reference(self) -> bool:
        """Whether the run compares its actor with the first weights."""
        return True

    @property
    def learns_given_answers(self) -> bool:
        """Whether the run learns from the answers that its prompts have in the column `completion`."""
        return False


def derive_minibatch(config: RolloutRunOptions, num_samples: int, most: int) -> None:
    """Fills in a `minibatch_size` of 0 of a new `Config`: the largest divisor of `num_samples` up to `most`.

    The number of processes is not known yet: `fit_minibatch` derives it again from the arguments stored here.
    """
    if config.update_size == 0:
        object.__setattr__(config, "minibatch_size", largest_divisor(num_samples, most))
        object.__setattr__(config, "minibatch_of", (num_samples, most))


def check_minibatch(rollout_size: int, group_size: int, minibatch_size: int) -> None:
    """Raises ValueError unless the minibatches of a step have equally many of its answers."""
    if rollout_size * group_size % minibatch_size:
        raise ValueError(
            f"--minibatch-size={minibatch_size} must divide the {rollout_size * group_size} answers of a step, "
            f"--rollout-size={rollout_size} times --group-size={group_size}; change one of them"
        )


def fit_minibatch(config: TrainingT, num_processes: int, saved_size: int | None = None) -> TrainingT:
    """`config` with a `minibatch_size` that the processes can divide equally, unless the user gave one.

    Args:
        config: of any recipe.
        num_processes: of the run.
        saved_size: the size of a run that is resumed; it stays if it fits.
    """
    if config.minibatch_of is None:
        return config
    num_samples, most = config.minibatch_of
    is_fitting = saved_size is not None and num_samples % saved_size == 0 and saved_size % num_processes == 0
    size = saved_size if is_fitting else largest_shared_divisor(num_samples, most, num_processes)
    changed: dict[str, Any] = {config.UPDATE: size}
    return replace(config, **changed)


def suitable_rate(config: TrainingOptions, *, small: float, trained: float = 1e-6, adapter: float = 1e-5) -> float:
    """The default peak of a learning rate: a pretrained model takes smaller steps than one trained from scratch.

    Args:
        config: with `model` and `lora_rank`.
        small: for the small model that is trained without `--model`.
        trained: for `--model`.
        adapter: for an adapter on it.
    """
    return small if config.model is None else adapter if config.lora_rank else trained


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def largest_shared_divisor(number: int, most: int, num_processes: int) -> int:
    """The largest divisor of `number` up to `most` that the processes can divide equally, at least one sample each.

    If they cannot divide `number` equally, its largest divisor up to `most`.
    """
    if number % num_processes:
        return largest_divisor(number, most)
    return num_processes * largest_divisor(number // num_processes, max(1, most // num_processes))


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker that does not exist, or whose package is not installed."""
    for name in names:
        check_one_of("tracker", name, list(TRACKERS))
        if not any(importlib.util.find_spec(package) for package in TRACKERS[name]):
            raise ValueError(
                f"--tracker={name} needs the package {TRACKERS[name][0]}, which is not installed; "
                f"install it, or leave the tracker out (metrics.jsonl has the same metrics)"
            )
