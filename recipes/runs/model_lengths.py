"""The longest prompt and the longest answer of a run whose user gives none: as the model of `--model` reads them."""

from typing import Any

from hybrid_engine.recipes.runs.options import LENGTHS
from hybrid_engine.recipes.runs.run_log import say
from hybrid_engine.recipes.runs.stages import load_config, num_positions

LONGEST_ANSWER = 256
"""Tokens of an answer in training, of which a step draws hundreds; TRL's default too."""
WITHOUT_POSITIONS = 4096
"""Tokens of a prompt and its answer, where the model's config names no most."""


def derive_lengths(config: Any, recipe: str) -> dict[str, int]:
    """`max_prompt_tokens` and `max_new_tokens` of a run of `recipe`, where one of them is 0; else nothing.

    An answer has up to 256 tokens and half of what the model reads, a prompt what that leaves. A pass of
    `--tokens-per-micro-batch` holds both.
    """
    if all(getattr(config, name, 1) for name in LENGTHS):
        return {}
    positions = num_positions(load_config(config.model)) or WITHOUT_POSITIONS
    in_pass = config.tokens_per_micro_batch // (2 if recipe == "online-dpo" else 1)  # both answers of a pair
    total = min(positions, in_pass or positions)
    free = total - config.max_prompt_tokens if config.max_prompt_tokens else total // 2
    longest = config.max_new_tokens or max(1, min(LONGEST_ANSWER, free))
    return {"max_prompt_tokens": config.max_prompt_tokens or max(1, total - longest), "max_new_tokens": longest}


def say_lengths(config: Any) -> None:
    """Says what became of lengths that nobody gave."""
    model = f"--model={config.model!r}"
    if num_positions(load_config(config.model)) is None:
        reason = f"since the config of {model} names no positions"
    else:
        reason = f"as {model} reads them"
    say(
        f"prompts of up to {config.max_prompt_tokens} tokens, longer ones lose their beginning, and answers of up to "
        f"{config.max_new_tokens}, {reason} (--max-prompt-tokens, --max-new-tokens)"
    )
