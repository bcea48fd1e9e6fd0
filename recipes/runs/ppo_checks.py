"""What can be known of a PPO run before any model is loaded or trained: all of it is checked first."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import get_world_size, on_rank_zero
from hybrid_engine.recipes import reward as reward_stage
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.recipes.data.prompts import load_prompts
from hybrid_engine.recipes.data.rows import PromptRow
from hybrid_engine.recipes.rewards.learned import shares_tokens
from hybrid_engine.recipes.rewards.loading import load_rewards
from hybrid_engine.recipes.rewards.rewards import Rewards
from hybrid_engine.recipes.runs.adapters import check_adapter
from hybrid_engine.recipes.runs.checkpoints import check_resume
from hybrid_engine.recipes.runs.checks import check_divides
from hybrid_engine.recipes.runs.run_folder import check_nothing_is_lost, check_out
from hybrid_engine.recipes.runs.stages import load_config, load_tokenizer, num_positions
from hybrid_engine.recipes.tasks.small_llama import MAX_POSITIONS

PROMPTS_PER_CALL = 1000


def check_ppo(config: Any) -> tuple[list[PromptRow], list[PromptRow]]:
    """Checks a `ppo.Config` against the folder, the data and the models it names; collective.

    Returns:
        The prompts to train on, and those held out.

    Raises:
        ValueError: the folder cannot be written or holds an earlier run, there is nothing to resume or under other
            options, a source does not load, a number does not fit the processes, the prompts or the model.
    """
    folder = Path(config.out)
    on_rank_zero(lambda: check_folder(folder, config))
    check_processes(folder, config)
    rewards = check_sources(config)  # reading the prompts takes seconds
    train, held_out = load_prompts(config.dataset)
    if len(held_out[: config.eval_prompts]) < get_world_size():
        raise ValueError(
            f"--eval-prompts={config.eval_prompts} of {len(held_out)} held-out prompts must reach the number of "
            f"processes, {get_world_size()}; raise it, or give more prompts"
        )
    if rewards is not None:
        rewards.check_columns(set.intersection(*(set(row.columns) for row in (*train, *held_out))))
    check_models(folder, config, [str(row.prompt) for row in (*train, *held_out)])
    return train, held_out[: config.eval_prompts]


def check_folder(folder: Path, config: Any) -> None:
    """Whether the run may write to `folder`, and goes on with what is in it or moves it aside; for one process."""
    check_out(config.out)
    check_resume(folder, config, "ppo")
    if not config.resume and not config.restart:
        check_nothing_is_lost(folder)


def check_processes(folder: Path, config: Any) -> None:
    """Whether the batches of PPO, and of the earlier stages that it will run, divide by the number of processes."""
    check_divides("minibatch_size", config.minibatch_size, get_world_size())
    stages = {"sft": (sft_stage, config.model), "reward": (reward_stage, config.reward)}
    for name, (stage, given) in stages.items():
        batch_size = stage.Config().batch_size
        if not given and not (folder / name).exists() and batch_size % get_world_size():
            raise ValueError(
                f"{get_world_size()} processes do not divide the {batch_size} samples of an optimizer step of {name}; "
                f"run `hybrid-engine {name}` by itself first, with another --batch-size and the same --out"
            )


def check_sources(config: Any) -> Rewards | None:
    """Whether the model and the reward that the options name are there; the reward, if one is named."""
    if config.model:
        load_tokenizer(config.model)
        load_config(config.model)
    return load_rewards([config.reward]) if config.reward else None


def check_models(folder: Path, config: Any, prompts: list[str]) -> None:
    """Whether the models that are there load, and have positions enough for the longest prompt and its response."""
    source = config.model or (str(folder / "sft") if (folder / "sft").exists() else None)
    if source is None:  # the model will be made, its tokenizer too: a byte is a token at most
        longest = max(len(prompt.encode()) for prompt in prompts)
        check_positions(config, longest, "the model that stage sft makes", MAX_POSITIONS)
    else:
        tokenizer, model_config = load_tokenizer(source), load_config(source)
        longest = longest_prompt(tokenizer, prompts)
        check_positions(config, longest, f"--model={source!r}", num_positions(model_config))
        check_adapter(config.lora_rank, model_config, source)
    if config.reward and source is not None and shares_tokens(config.reward, source):  # it will be the critic too
        limit = num_positions(load_config(config.reward, "reward"))
        check_positions(config, longest, f"--reward={config.reward!r}", limit)


def longest_prompt(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> int:
    """Tokens of the longest prompt; ValueError for one without any."""
    longest = 0
    for start in range(0, len(prompts), PROMPTS_PER_CALL):
        part = prompts[start : start + PROMPTS_PER_CALL]
        lengths = [len(tokens) for tokens in tokenizer(part)["input_ids"]]
        if min(lengths) == 0:
            raise ValueError(
                f"--dataset: the prompt {part[lengths.index(0)]!r} has no tokens, and nothing can follow it; remove it"
            )
        longest = max(longest, *lengths)
    return longest


def check_positions(config: Any, longest: int, model: str, limit: int | None) -> None:
    """ValueError if a prompt of up to `longest` tokens and its response exceed the `limit` positions of `model`."""
    prompt_tokens = min(longest, config.max_prompt_tokens)
    total = prompt_tokens + config.max_new_tokens
    if limit is not None and total > limit:
        raise ValueError(
            f"--max-new-tokens={config.max_new_tokens} behind prompts of up to {prompt_tokens} tokens makes {total}, "
            f"more than the {limit} positions of {model}; lower it, or --max-prompt-tokens={config.max_prompt_tokens}"
        )
