"""What is checked of a run before anything is trained, where its actor comes from, and the actor's engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

import hybrid_engine
from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.recipes.data.encoding import check_fits
from hybrid_engine.recipes.data.rows import Row
from hybrid_engine.recipes.preference.options import PreferenceOptions
from hybrid_engine.recipes.runs.adapters import add_adapter, check_adapter
from hybrid_engine.recipes.runs.checks import check_divides
from hybrid_engine.recipes.runs.engine_config import build_engine_config, largest_micro_batch
from hybrid_engine.recipes.runs.ppo_checks import check_folder
from hybrid_engine.recipes.runs.stages import load_config, load_model, load_tokenizer, num_positions


def check_run(config: PreferenceOptions) -> None:
    """Whether folder, processes and model fit the options; collective.

    Raises:
        ValueError: the folder cannot be written or holds an earlier run, there is nothing to resume or under other
            options, the model does not load, or the processes do not divide a batch.
    """
    folder = Path(config.out)
    on_rank_zero(lambda: check_folder(folder, config))
    check_divides("batch_size", config.batch_size, get_world_size())
    if config.model:
        load_tokenizer(config.model)
        check_adapter(config.lora_rank, load_config(config.model), config.model)
    elif not (folder / "sft").exists() and sft_stage.Config().batch_size % get_world_size():
        raise ValueError(
            f"{get_world_size()} processes do not divide the {sft_stage.Config().batch_size} samples of an optimizer "
            "step of sft; run `hybrid-engine sft` by itself first, with another --batch-size and the same --out"
        )


def find_first_actor(config: PreferenceOptions) -> str:
    """The folder or name of the actor as it begins: `--model`, or the run's sft, which is trained if missing."""
    if config.model:
        return config.model
    stage = sft_stage.Config(
        out=config.out,
        seed=config.seed,
        zero_stage=config.zero_stage,
        tracker=config.tracker,
        metric_names=config.metric_names,
    )
    return str(sft_stage.run(stage))


def check_positions(config: PreferenceOptions, source: str, rows: Sequence[Row], lengths: Sequence[int]) -> None:
    """ValueError for a row of more tokens than the model has positions, or where the answers to prompts have more."""
    limit = num_positions(load_config(source))
    check_fits(rows, lengths, None, limit, f"--model={source!r}")
    if limit is not None and config.max_prompt_tokens + config.max_new_tokens > limit:
        raise ValueError(
            f"--max-new-tokens={config.max_new_tokens} behind --max-prompt-tokens={config.max_prompt_tokens} exceeds "
            f"the {limit} positions of --model={source!r}; lower one of them"
        )


def build_actor(config: PreferenceOptions, source: str, num_steps: int) -> Any:
    """The engine of the model in `source`, without dropout; with `lora_rank` of an adapter on it. Collective."""
    model = add_adapter(load_model(AutoModelForCausalLM, source), config.lora_rank)
    engine_config = build_engine_config(
        batch_size=config.batch_size,
        micro_batch_size=largest_micro_batch(config.batch_size // get_world_size(), config.micro_batch_size),
        learning_rate=config.learning_rate,
        num_steps=num_steps,
        warmup_steps=min(10, num_steps),
        zero_stage=config.zero_stage,
        max_out_tokens=config.max_prompt_tokens + config.max_new_tokens,
    )
    return hybrid_engine.initialize(model=model, config=engine_config)[0]
