"""Chooses, checks and loads the teachers of `hybrid-engine distill` and `grpo` by their options; the recipes call it.

M: teachers of a run.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.config.checks import dtype_name
from hybrid_engine.distributed.processes import default_device, get_rank, get_world_size, on_rank_zero
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.ops.linear_divergence import HeadStates, TopTokens
from hybrid_engine.optim.build import cast_module
from hybrid_engine.rlhf.batches.head_log_probs import WholeLogProbs, likeliest
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.passes import ROWS_PER_PASS, RunPasses
from hybrid_engine.rlhf.data.encoding import encode_prompt
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.common_spans import OtherTokensTeacher
from hybrid_engine.rlhf.experience.policy import AVERAGE, AveragedWeights, MovingAverage, TrainedPolicy, playing
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, given_answers
from hybrid_engine.rlhf.experience.start import Start
from hybrid_engine.rlhf.experience.teacher_cache import (
    PassIdentity,
    StoredPass,
    begin_pass,
    publish_pass,
    weights_digest,
    write_rows,
)
from hybrid_engine.rlhf.experience.teacher_server import TeacherServer
from hybrid_engine.rlhf.experience.teachers import (
    ActorTeacher,
    AheadTeacher,
    ModelTeacher,
    ScoredTeacher,
    SeveralTeachers,
    StepAnswers,
    Teacher,
    TeacherPrompts,
    prompts_read,
)
from hybrid_engine.rlhf.options.distillation import (
    ADAPTER_PREFIX,
    FIRST_WEIGHTS,
    OWN_WEIGHTS,
    PRESENT_WEIGHTS,
    DistillConfig,
    adapter_of,
    is_address,
)
from hybrid_engine.rlhf.options.reinforcement import GRPOConfig
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.rewards.learned import find_adapter
from hybrid_engine.rlhf.runs.engine_config import torch_dtype
from hybrid_engine.rlhf.runs.run_checks import check_positions
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import explained, load_config, load_model, load_tokenizer, num_positions
from hybrid_engine.zero.sharding import full_tensor

PROBE = "12+30=42. The sum is 42."
"""A text that a server reads before training."""
ROWS_OF_TEMPLATE = 32
"""Conversations that the templates of teacher and actor are compared on."""
ROWS_OF_PART = 1024
"""Answers of a data set that a process scores for one file of a stored pass."""


def check_teacher(config: DistillConfig) -> None:
    """Raises ValueError if there is no teacher, it cannot be loaded, or it has other or too few tokens."""
    if not config.teachers:
        raise ValueError("--teacher is missing; give the Hugging Face name or folder of a model")
    is_stored = config.teacher_cache is not None and Path(config.teacher_cache).exists()
    for source in config.teachers.values():
        if folder := adapter_of(source):
            check_teacher_adapter(folder, config)
        elif is_address(source):
            if config.model is not None and not is_stored:  # a stored pass needs no server
                open_server(source, config, load_tokenizer(config.model))
        elif source not in OWN_WEIGHTS:
            check_model_teacher(source, None if config.has_other_tokens else config.model)
            check_teacher_top_k(config, source, load_config(source, "teacher"))
        elif config.model is not None:
            check_teacher_top_k(config, source, load_config(config.model))
    if is_stored and config.model is not None:
        StoredPass(Path(str(config.teacher_cache)), pass_identity(config, load_tokenizer(config.model)))


def check_model_teacher(teacher: str, actor: str | None) -> None:
    """Raises ValueError if the model `teacher` cannot be loaded, or the model `actor` has other tokens."""
    load_config(teacher, "teacher")
    if actor is not None:
        check_same_tokens(load_tokenizer(teacher), load_tokenizer(actor), teacher)


def check_same_tokens(teacher: PreTrainedTokenizerBase, actor: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ValueError unless both tokenizers give the same ids to the same tokens."""
    theirs, ours = teacher.get_vocab(), actor.get_vocab()
    if theirs != ours:
        other = min((token for token in {*theirs, *ours} if theirs.get(token) != ours.get(token)), key=str)
        raise ValueError(
            f"--teacher={name!r} has other tokens than the actor ({other!r} is {theirs.get(other)} and "
            f"{ours.get(other)}); a divergence needs one vocabulary, so give a teacher with the actor's tokenizer, "
            "or in distill --divergence span-jsd"
        )


def check_teacher_top_k(config: DistillConfig, source: str, model: PretrainedConfig) -> None:
    """Raises ValueError if the model has fewer tokens than `--teacher-top-k`."""
    num_tokens = model.get_text_config().vocab_size
    if config.teacher_top_k > num_tokens:
        raise ValueError(
            f"--teacher-top-k={config.teacher_top_k} must not exceed the {num_tokens} tokens of --teacher={source!r}; "
            "lower it, or leave it out for the whole vocabulary"
        )


def check_same_template(
    source: str, teacher: PreTrainedTokenizerBase, actor: PreTrainedTokenizerBase, rows: Sequence[PromptRow]
) -> None:
    """Raises ValueError if the teacher's chat template writes a conversation otherwise than the actor's.

    The teacher reads what the actor's template writes. Compares the first conversations of the data; a teacher without
    a template was trained with none.
    """
    conversations = (row for row in rows if not isinstance(row.prompt, str))
    for row in islice(conversations if teacher.chat_template is not None else (), ROWS_OF_TEMPLATE):
        theirs, ours = encode_prompt(teacher, row), encode_prompt(actor, row)
        if theirs != ours:
            shown = [tokenizer.decode(ids)[-80:] for tokenizer, ids in ((teacher, theirs), (actor, ours))]
            raise ValueError(
                f"--teacher={source!r} has another chat template than the actor: of {row.place} it makes "
                f"...{shown[0]!r}, the actor's ...{shown[1]!r}; give both one template, the teacher's, in the folder "
                "of --model"
            )


def check_teacher_adapter(folder: str, config: DistillConfig) -> None:
    """Raises ValueError unless `folder` has an adapter on the model that is trained."""
    given = f"--teacher={ADAPTER_PREFIX}{folder}"
    found = find_adapter(folder)
    if found is None:
        raise ValueError(
            f"{given} has no adapter; give a folder with the files of peft, such as actor/adapter of a run"
        )
    with explained("teacher", folder):
        base = str(PeftConfig.from_pretrained(str(found)).base_model_name_or_path)
    if base != config.model and Path(base).resolve() != Path(str(config.model)).resolve():
        raise ValueError(
            f"{given} belongs to the base {base!r}, but the actor's base is --model={config.model!r}; give an adapter "
            "on that base, or fix base_model_name_or_path in its adapter_config.json"
        )


def adapter_names(config: DistillConfig) -> dict[str, str]:
    """The names in the actor's model of the adapters that are teachers, by the folders that `--teacher` names."""
    folders = filter(None, map(adapter_of, config.teachers.values()))
    return {folder: f"teacher{number}" for number, folder in enumerate(folders)}


def teacher_adapters(config: DistillConfig) -> dict[str, str | None]:
    """The folders of the adapters that are teachers, by their names in the actor's model; None for an average."""
    averaged = {AVERAGE: None} if config.keeps_average and config.lora_rank else {}
    return averaged | {name: str(find_adapter(folder)) for folder, name in adapter_names(config).items()}


def load_teacher(config: DistillConfig, policy: TrainedPolicy, start: Start[DistillConfig]) -> Teacher:
    """The teacher of a run. Collective.

    Args:
        config: of the run.
        policy: its actor.
        start: its prompts.

    Raises:
        ValueError: a teacher has too few positions for the longest prompt with its answer, or other tokens; or a row
            does not have the columns that `--teacher-prompt` and `--teacher-column` read.
    """
    prompts = None
    if config.teacher_prompt is not None:
        prompts = TeacherPrompts(config.teacher_prompt, start.train, policy.tokenizer, config.max_new_tokens)
    if config.teacher_cache is not None:
        return _stored_teacher(config, policy, start, prompts)
    loaded = [_load_one(source, config, policy, start, prompts) for source in config.teachers.values()]
    if len(loaded) == 1:
        return loaded[0]
    weights = teacher_weights(config, start.train)
    return SeveralTeachers(loaded, weights, reads_always=config.zero_stage == 3)


def load_model_teacher(config: GRPOConfig, policy: TrainedPolicy, start: Start[GRPOConfig]) -> ModelTeacher:
    """The model that `--teacher` of `hybrid-engine grpo` names. Collective.

    Args:
        config: of the run; the teacher's distributions are at its temperature, as the reference's are.
        policy: its actor.
        start: its prompts.

    Raises:
        ValueError: the teacher has too few positions for the longest prompt with its answer, other tokens, or another
            chat template.
    """
    assert config.teacher is not None
    source, limit = config.teacher, num_positions(load_config(config.teacher))
    check_positions(config, start.answered.longest, f"--teacher={source!r}", limit)
    check_same_template(source, load_tokenizer(source, "teacher"), policy.tokenizer, start.train)
    return ModelTeacher(model=load_frozen(source, config, policy), temperature=config.temperature)


def with_average(policy: TrainedPolicy, teacher: Teacher, config: DistillConfig) -> TrainedPolicy:
    """The policy with the average that `teacher` computes by, if `--teacher-average` asks for one. Collective."""
    if not config.keeps_average:
        return policy
    module = policy.actor.module
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if config.lora_rank:
        names = {name: name.replace(f".{module.active_adapter}.", f".{AVERAGE}.") for name in trained}
    else:
        names, module = {name: name for name in trained}, teacher.modules[config.learns_from.index(None)]
    of_teacher = dict(module.named_parameters())
    if get_world_size() == 1 and config.dtype == "fp32":  # the teacher's weights are the average
        weights = [of_teacher[name] for name in names.values()]
    else:
        first = (full_tensor(weight).float().cpu() for weight in trained.values())
        weights = [nn.Parameter(weight, requires_grad=False) for weight in first]
    engine = shard_frozen(AveragedWeights(weights))
    average = MovingAverage(policy.actor, module, names, config.teacher_average, engine)
    return replace(policy, average=average)


def _stored_teacher(
    config: DistillConfig, policy: TrainedPolicy, start: Start[DistillConfig], prompts: TeacherPrompts | None
) -> Teacher:
    """The pass of `--teacher-cache`, which is made if it is missing, in place of its teacher. Collective."""
    folder, identity = Path(str(config.teacher_cache)), pass_identity(config, policy.tokenizer)
    if not on_rank_zero(folder.exists):
        say(f"teacher: scores the {len(start.train)} answers of the data set into {folder}")
        unfinished = folder.with_name(f".{folder.name}-unfinished")
        on_rank_zero(lambda: begin_pass(unfinished))
        write_pass(unfinished, config, policy, start, prompts)
        on_rank_zero(lambda: publish_pass(unfinished, folder, identity))
    stored = agree(lambda: StoredPass(folder, identity))
    for step in data_set_parts(config, policy, start):
        agree(partial(stored.check, prompts_read(prompts, step), step.answers.response_ids))
    return ScoredTeacher(stored, prompts)


def write_pass(
    folder: Path,
    config: DistillConfig,
    policy: TrainedPolicy,
    start: Start[DistillConfig],
    prompts: TeacherPrompts | None,
) -> None:
    """Writes what the teacher says of this process's share of the data set's answers. Collective."""
    (source,) = config.teachers.values()
    teacher = _load_one(source, config, policy, start, prompts)
    for number, step in enumerate(data_set_parts(config, policy, start)):
        scored = score_answers(teacher, step, policy.sizes, config.teacher_top_k)
        path = folder / f"part-{get_rank()}-{number}.safetensors"
        agree(partial(write_rows, path, prompts_read(prompts, step), step.answers.response_ids, scored))


def data_set_parts(config: DistillConfig, policy: TrainedPolicy, start: Start[DistillConfig]) -> Iterator[StepAnswers]:
    """The answers of the data set, of which every token is read, in as many parts on every process."""
    world, options = get_world_size(), AnswerSampling.of(config)
    for first in range(0, len(start.train), world * ROWS_OF_PART):
        last = min(first + world * ROWS_OF_PART, len(start.train))
        records = list(range(first + get_rank(), last, world)) or [first]
        rows = [start.train[record] for record in records]
        answers, sequences = given_answers(policy.actor, policy.tokenizer, rows, options)
        is_token = sequences.attention_mask[:, -sequences.response_mask.shape[1] :].bool()
        yield StepAnswers(replace(sequences, response_mask=is_token).numbered(), answers, records, None)


@torch.no_grad()
def score_answers(teacher: Teacher, step: StepAnswers, sizes: RunPasses, num_likeliest: int) -> list[TopTokens]:
    """The likeliest tokens at each place of each answer of a step, on the host. Collective.

    Args:
        teacher: a single one, of the whole vocabulary or of `num_likeliest` tokens.
        step: the answers.
        sizes: of the run's passes.
        num_likeliest: K.
    """
    teacher.begin_step(step)

    def score(rows: torch.Tensor) -> list[TopTokens]:
        sequences = step.sequences.rows(rows)
        (taught,) = teacher.read(sequences)
        told = taught.statement
        assert isinstance(told, TopTokens | HeadStates | WholeLogProbs), f"{told=}"
        top = told if isinstance(told, TopTokens) else likeliest(told, num_likeliest)
        counts = sequences.on_host.response_mask.sum(dim=1).tolist()
        parts = (part.cpu().split(counts) for part in (top.ids, top.logprobs, top.all_but_listed()))
        return [TopTokens(*part) for part in zip(*parts, strict=True)]

    order = torch.arange(len(step.records))
    return [row for part in sizes.without_gradients(order.split, score, ROWS_PER_PASS) for row in part]


def pass_identity(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> PassIdentity:
    """The facts on which the pass of `--teacher-cache` depends."""
    (source,) = config.teachers.values()
    weights = "" if is_address(source) else weights_digest(source)
    return PassIdentity.of(source, tokenizer, config.teacher_temperature, config.teacher_top_k, weights)


def _load_one(
    source: str,
    config: DistillConfig,
    policy: TrainedPolicy,
    start: Start[DistillConfig],
    prompts: TeacherPrompts | None,
) -> Teacher:
    if is_address(source):
        return ScoredTeacher(open_server(source, config, policy.tokenizer), prompts)
    if config.has_other_tokens:
        return _load_with_other_tokens(start.source if source == FIRST_WEIGHTS else source, config, policy, start)
    adapter = adapter_of(source)
    is_own = source in OWN_WEIGHTS or adapter is not None
    longest = start.answered.longest if prompts is None else prompts.longest
    limit = num_positions(policy.actor.module.config if is_own else load_config(source))
    check_teacher_positions(config, longest, source, limit, has_prompts=prompts is not None)
    if is_own and not (source == FIRST_WEIGHTS and not config.lora_rank):
        below = AVERAGE if config.keeps_average else None
        name = below if adapter is None else adapter_names(config)[adapter]
        play = nullcontext if source == PRESENT_WEIGHTS else partial(playing, policy.actor.module, name)
        return ActorTeacher(actor=policy.actor, play=play, temperature=config.teacher_temperature, prompts=prompts)
    source = start.source if source == FIRST_WEIGHTS else source
    check_same_template(source, load_tokenizer(source, "teacher"), policy.tokenizer, start.train)
    place = torch.device("cpu") if config.teacher_offload else None
    model = load_frozen(source, config, policy, place)
    if config.teacher_sharded:
        model = shard_frozen(model)
    if config.teacher_offload or config.teacher_sharded:
        return AheadTeacher(model, config.teacher_temperature, policy.sizes, prompts, waits_on=place)
    return ModelTeacher(model=model, temperature=config.teacher_temperature, prompts=prompts)


def _load_with_other_tokens(
    source: str, config: DistillConfig, policy: TrainedPolicy, start: Start[DistillConfig]
) -> Teacher:
    tokenizer = load_tokenizer(source, "teacher")
    template = config.teacher_prompt or "{prompt}"
    prompts = TeacherPrompts(template, start.train, tokenizer, config.max_new_tokens)
    limit = num_positions(load_config(source))
    check_teacher_positions(config, prompts.longest, source, limit, has_prompts=True)
    model = load_frozen(source, config, policy, is_same_vocabulary=False)
    sorts = config.divergence == "uld"
    compared = "the sorted probabilities at the ends" if sorts else "the probabilities"
    say(
        f"teacher: --divergence {config.divergence} compares {compared} of common spans of text of {source!r} "
        f"({len(tokenizer)} tokens) and of the actor ({len(policy.tokenizer)} tokens)"
    )
    tokenizers = (policy.tokenizer, tokenizer)
    return OtherTokensTeacher(model, config.teacher_temperature, tokenizers, prompts, limit, sorts=sorts)


def load_frozen(
    source: str,
    config: TrainingOptions,
    policy: TrainedPolicy,
    device: torch.device | None = None,
    *,
    is_same_vocabulary: bool = True,
) -> nn.Module:
    """The model in `source`, frozen, in the run's dtype, whose passes are packed if that is exact. Collective.

    Args:
        source: Hugging Face name or folder.
        config: of the run.
        policy: its actor.
        device: where the model is; None: where the actor is.
        is_same_vocabulary: whether its tokens must be the actor's.

    Raises:
        ValueError: it has other tokens than the actor.
    """
    if is_same_vocabulary:
        check_same_tokens(load_tokenizer(source), policy.tokenizer, source)
    model = load_model(AutoModelForCausalLM, source)
    cast_module(model, torch_dtype(config.dtype))
    model = model.to(device or default_device()).eval().requires_grad_(False)
    pack_where_exact(model, config)
    sizes = [module.get_output_embeddings().weight.shape[0] for module in (model, policy.actor.module)]
    if is_same_vocabulary and sizes[0] != sizes[1]:
        say(f"teacher: heads of {sizes[0]} and {sizes[1]} tokens; the divergence is over the first {min(sizes)}")
    return model


def shard_frozen(model: nn.Module) -> nn.Module:
    """An engine that evaluates `model` and shards its weights over the processes. Collective."""
    dtype = dtype_name(next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()))
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    if dtype in ("bf16", "fp16"):
        config[dtype] = {"enabled": True}
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    return engine.eval()


def open_server(address: str, config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> TeacherServer:
    """The server at an address, which scores a text as the actor's tokenizer reads it."""
    return TeacherServer.open(
        address,
        config.teacher_top_k,
        config.teacher_timeout,
        config.teacher_requests,
        PROBE,
        tokenizer(PROBE)["input_ids"],
    )


def teacher_weights(config: DistillConfig, rows: Sequence[PromptRow]) -> torch.Tensor:
    """`[rows, M]` fp32: the weights of the teachers for each row, which sum to 1.

    The column `--teacher-column` has the name of a teacher, or weights by their names. Without it every row has the
    same weights, those of `--teacher-weights`.

    Raises:
        ValueError: a row names a teacher that does not exist, or its weights are negative or sum to 0.
    """
    names, column = list(config.teachers), config.teacher_column
    if column is None:
        weights = torch.tensor(config.teacher_weights or [1.0] * len(names))
        return (weights / weights.sum()).expand(len(rows), -1)
    found = torch.tensor([_row_weights(row, column, names) for row in rows])
    return found / found.sum(dim=1, keepdim=True)


def _row_weights(row: PromptRow, column: str, names: Sequence[str]) -> list[float]:
    value = row.columns.get(column)
    given = {value: 1.0} if isinstance(value, str) else value
    where = f"{row.place} has {value!r} in the column {column!r} of --teacher-column"
    if not isinstance(given, Mapping) or not given.keys() <= set(names):
        raise ValueError(f"{where}; write the name of a teacher, or weights by names, which are {', '.join(names)}")
    weights = [given.get(name) or 0.0 for name in names]  # datasets fill in None for the missing ones
    if not all(isinstance(weight, int | float) and 0 <= weight < math.inf for weight in weights) or not sum(weights):
        raise ValueError(f"{where}; weights must be at least 0 and sum to more than 0")
    return weights


def check_teacher_positions(
    config: DistillConfig, longest: int, source: str, limit: int | None, *, has_prompts: bool
) -> None:
    """Raises ValueError if the longest prompt that a teacher reads leaves no room for an answer.

    Args:
        config: of the run.
        longest: tokens of that prompt.
        source: the teacher.
        limit: its positions.
        has_prompts: whether it reads prompts of its own, which are never cut off.
    """
    if not has_prompts:
        check_positions(config, longest, f"--teacher={source!r}", limit)
    elif limit is not None and longest + config.max_new_tokens > limit:
        raise ValueError(
            f"--teacher-prompt makes prompts of up to {longest} tokens, with --max-new-tokens={config.max_new_tokens} "
            f"more than the {limit} positions of --teacher={source!r}; shorten it, or lower --max-new-tokens"
        )
