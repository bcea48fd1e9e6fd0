"""What is checked of a run before anything is trained, where its actor comes from, and the actor's engine."""

from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import hybrid_engine
from hybrid_engine.checkpoint.peft_models import without_renamed_attribute_warning
from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.recipes.data.encoding import check_lengths
from hybrid_engine.recipes.data.rows import Row
from hybrid_engine.recipes.preference.options import PreferenceOptions
from hybrid_engine.recipes.runs.checks import check_divides
from hybrid_engine.recipes.runs.engine_config import build_engine_config
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
        width = getattr(load_config(config.model).get_text_config(), "hidden_size", config.lora_rank)
        if config.lora_rank > width:
            raise ValueError(
                f"--lora-rank={config.lora_rank} exceeds the width of --model={config.model!r}, {width}; lower it"
            )
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


def check_positions(config: PreferenceOptions, source: str, rows: list[Row], lengths: list[int]) -> None:
    """ValueError for a row of more tokens than the model has positions, or where the answers to prompts have more."""
    limit = num_positions(load_config(source))
    if limit is None:
        return
    check_lengths(rows, lengths, limit, f"the positions of --model={source!r}, {limit}", "use a model with more")
    if config.max_prompt_tokens + config.max_new_tokens > limit:
        raise ValueError(
            f"--max-new-tokens={config.max_new_tokens} behind --max-prompt-tokens={config.max_prompt_tokens} exceeds "
            f"the {limit} positions of --model={source!r}; lower one of them"
        )


def build_actor(config: PreferenceOptions, source: str, num_steps: int) -> Any:
    """The engine of the model in `source`, without dropout; with `lora_rank` of an adapter on it. Collective."""
    model = load_model(AutoModelForCausalLM, source)
    if config.lora_rank:
        adapter = LoraConfig(r=config.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        with without_renamed_attribute_warning():
            model = get_peft_model(model, adapter)
    per_process = config.batch_size // get_world_size()
    engine_config = build_engine_config(
        batch_size=config.batch_size,
        # The largest divisor: every optimizer step must have the same number of equal micro-batches.
        micro_batch_size=max(n for n in range(1, config.micro_batch_size + 1) if per_process % n == 0),
        learning_rate=config.learning_rate,
        num_steps=num_steps,
        warmup_steps=min(10, num_steps),
        zero_stage=config.zero_stage,
        max_out_tokens=config.max_prompt_tokens + config.max_new_tokens,
    )
    return hybrid_engine.initialize(model=model, config=engine_config)[0]
