"""`row_options`: what single prompts are asked for beside the options of all."""

import difflib
from typing import Any

from hybrid_engine.generation.options import NATIVE_DEFAULTS, GenerationOptions, override, read_options

# What holds for the whole rollout: how many rows there are, and what is returned of them.
OF_ALL_ROWS = {"num_return_sequences", "pad_token_id", "return_dict_in_generate"}
ROW_OPTIONS = set(NATIVE_DEFAULTS) - OF_ALL_ROWS


def read_row_options(
    row_options: Any, merged: dict[str, Any], num_prompts: int, prompt_width: int, vocab_size: int
) -> list[GenerationOptions]:
    """The options of each prompt: those of `row_options[i]`, then those of all in `merged`.

    Raises ValueError, which names the row, where one cannot work.
    """
    common = read_options(merged, prompt_width, vocab_size)
    if row_options is None:
        return [common] * num_prompts
    if not isinstance(row_options, list | tuple) or len(row_options) != num_prompts:
        has = f"{len(row_options)} entries" if isinstance(row_options, list | tuple) else type(row_options).__name__
        raise ValueError(f"row_options ({has}) must be a list of one dict for each of the {num_prompts} prompts")
    return [
        _read_row(row, given, common, merged, prompt_width, vocab_size) if given else common
        for row, given in enumerate(row_options)
    ]


def _read_row(
    row: int, given: Any, common: GenerationOptions, merged: dict[str, Any], prompt_width: int, vocab_size: int
) -> GenerationOptions:
    if not isinstance(given, dict):
        raise ValueError(f"row_options[{row}] is a {type(given).__name__}; pass a dict of options, {{}} for none")
    for name in given:
        if name not in ROW_OPTIONS:
            raise ValueError(f"row_options[{row}]: {name} is no option of a row; {_remedy(name)}")
    others = merged
    if "max_length" in given and "max_new_tokens" not in given:  # which would come before it
        others = {name: value for name, value in merged.items() if name != "max_new_tokens"}
    try:
        return read_options(override(others, given), prompt_width, vocab_size)
    except ValueError as error:
        raise ValueError(f"row_options[{row}]: {error}") from error


def _remedy(name: str) -> str:
    if name in OF_ALL_ROWS:
        return "pass it to generate() for all rows"
    nearest = difflib.get_close_matches(name, ROW_OPTIONS, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(sorted(ROW_OPTIONS))}"
