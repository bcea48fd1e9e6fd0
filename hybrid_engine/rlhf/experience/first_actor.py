"""Checks a run before training, finds or trains its first actor, builds the actor's engine and answers prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.config.checks import check_divides
from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.sequences import recompute_activations
from hybrid_engine.rlhf.data.encoding import Encoded, encode_prompt
from hybrid_engine.rlhf.data.parts import prompt_text
from hybrid_engine.rlhf.data.prompts import R, T, keep_fitting, limit_of, long_one, settle_lengths
from hybrid_engine.rlhf.data.rows import LabelledRow, PreferenceRow, PromptRow, encode_each
from hybrid_engine.rlhf.experience.evaluation import Evaluation, evaluate
from hybrid_engine.rlhf.experience.rollout import AnswerSampling
from hybrid_engine.rlhf.experience.start import SUMMARIES
from hybrid_engine.rlhf.options import sft
from hybrid_engine.rlhf.options.preference import PreferenceOptions
from hybrid_engine.rlhf.rewards.scores import Answers, Scores
from hybrid_engine.rlhf.runs.engine_config import Schedule, build_engine_config, largest_micro_batch
from hybrid_engine.rlhf.runs.run_checks import add_adapter, check_folder, check_model, check_positions, check_stage
from hybrid_engine.rlhf.runs.stages import load_model, num_positions
from hybrid_engine.rlhf.tasks.stdlib_docs import conforms

OptionsT = TypeVar("OptionsT", bound=PreferenceOptions)


def check_run(config: PreferenceOptions) -> None:
    """Checks that folder, processes and model fit the options; collective.

    Raises:
        ValueError: the folder cannot be written or holds an earlier run, there is no run to resume or it had other
            options, the model does not load, or the processes do not divide a batch.
    """
    folder = Path(config.out)
    on_rank_zero(lambda: check_folder(folder, config))
    check_divides("batch_size", config.batch_size, get_world_size())
    if config.model:
        check_model(config.model, config)
    else:
        check_model(None, config)
        check_stage(folder, "sft", SUMMARIES.actor_stage(config).batch_size)


def find_first_actor(config: PreferenceOptions, train_actor: Callable[[sft.Config], Path]) -> str:
    """The folder or name of the first actor: `--model`, or the run's sft, which `train_actor` makes if missing."""
    return config.model or str(train_actor(SUMMARIES.actor_stage(config)))


def check_enough(config: PreferenceOptions, num_train: int, num_held_out: int, what: str) -> None:
    """Raises ValueError if the training rows (`what`, such as "pairs") do not fill a batch, or no rows are held out."""
    if num_train < config.batch_size:
        raise ValueError(
            f"--batch-size={config.batch_size} must not exceed the {num_train} {what} to train on ({num_held_out} more "
            f"are held out for evaluation); lower it, or give more {what}"
        )
    if num_held_out:
        return
    apart = None if config.dataset is None else config.source.held_out_source
    if apart is not None:
        raise ValueError(f"{apart.shown} has 0 {what} to evaluate on; give other data, with at least one")
    raise ValueError(
        f"--held-out-share={config.held_out_share} holds out 0 {what} and leaves {num_train} to train on, but "
        f"evaluation needs at least one; raise it, give more {what}, or name other data with --held-out-dataset"
    )


def keep_what_fits(
    config: PreferenceOptions,
    first: PretrainedConfig,
    parts: tuple[Sequence[R], Sequence[R]],
    encode: Callable[[R], T],
    what: str,
) -> tuple[tuple[list[R], list[T]], tuple[list[R], list[T]]]:
    """The rows of each part that fit the model, whose config is `first`, with their tokens; a plan counts the same.

    `parts` are the training and the held-out rows.

    Raises:
        ValueError: there are rows that may not be left out, or too few are left; `what` names them, such as "pairs".
    """
    limit = limit_of(None, num_positions(first), f"--model={config.model or str(Path(config.out) / 'sft')!r}")
    train, held_out = (keep_fitting(config, *encode_each(config, rows, encode), limit) for rows in parts)
    check_enough(config, len(train[0]), len(held_out[0]), what)
    return train, held_out


def with_lengths(
    config: OptionsT,
    first: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    learned: Sequence[Encoded],
    *,
    is_said: bool = True,
) -> OptionsT:
    """The options with lengths that fit the `prompts` that are answered and the answers that are `learned`.

    A plan has the same.

    Raises:
        ValueError: given lengths exceed the positions of the model, whose config is `first`.
    """
    lengths = [len(encode_prompt(tokenizer, row)) for row in prompts]
    answer = long_one(sorted(len(answer.response_ids) for answer in learned))
    config = settle_lengths(config, lengths, answer, is_said=is_said)
    model = f"--model={config.model!r}" if config.model else "the model that stage sft makes"
    check_positions(config, max(lengths), model, num_positions(first))
    return config


def build_actor(config: PreferenceOptions, source: str, schedule: Schedule) -> Any:
    """The engine of the model in `source`, without dropout; with `lora_rank` it trains an adapter. Collective."""
    model = add_adapter(recompute_activations(load_model(AutoModelForCausalLM, source), config), config)
    engine_config = build_engine_config(
        batch_size=config.batch_size,
        micro_batch_size=largest_micro_batch(config.batch_size // get_world_size(), config.micro_batch_size),
        learning_rate=config.peak_learning_rate,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
        max_out_tokens=config.max_prompt_tokens + config.max_new_tokens,
        max_running=config.max_running,
    )
    actor = hybrid_engine.initialize(model=model, config=engine_config, lr_scheduler=schedule.build)[0]
    pack_where_exact(actor, config)
    return actor


def prompts_of(rows: Sequence[PreferenceRow | LabelledRow], config: PreferenceOptions) -> list[PromptRow]:
    """The first `eval_prompts` different prompts of held-out rows.

    Raises:
        ValueError: there are fewer prompts than processes.
    """
    prompts = {prompt_text(row.prompt): PromptRow(prompt=row.prompt, place=row.place) for row in reversed(rows)}
    chosen = list(prompts.values())[::-1][: config.eval_prompts]
    if len(chosen) < get_world_size():
        raise ValueError(
            f"--eval-prompts={config.eval_prompts} of {len(prompts)} held-out prompts must reach the number of "
            f"processes, {get_world_size()}; raise it, or give more rows"
        )
    return chosen


def answer_prompts(
    actor: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    config: PreferenceOptions,
    is_judged: bool,
) -> Evaluation:
    """One answer to each prompt, judged by PEP 257 or not at all; the actor is in training mode afterwards. Collective.

    Without a judge the figures have no score.
    """
    judge = judge_by_pep257 if is_judged else None
    found = evaluate(actor, tokenizer, prompts, judge, AnswerSampling.of(config))
    actor.train()
    return found


def judge_by_pep257(answers: Answers) -> Scores:
    """Scores 1 for a finished answer that is a summary line by PEP 257, else 0."""
    pairs = zip(answers.responses, answers.is_cut_off, strict=True)
    return Scores(total=[float(not cut and conforms(text)) for text, cut in pairs], by_name={}, per_token=None)
