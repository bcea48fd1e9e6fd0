"""Checks the arguments of one process's `generate()`, without communication: they become its wishes, or an error."""

import difflib
from typing import Any

import torch
from transformers import GenerationConfig

from hybrid_engine.config.checks import check_integer
from hybrid_engine.generation.batching.in_step import NAMES as FUNCTIONS
from hybrid_engine.generation.batching.in_step import UserFunctions, read_functions
from hybrid_engine.generation.batching.plan import Wishes, check_lengths, check_result_fits
from hybrid_engine.generation.request.options import (
    NATIVE_DEFAULTS,
    OWN_OPTIONS,
    GenerationOptions,
    check_names,
    foreign_options,
    merge_options,
    override,
    own_options,
    read_options,
)
from hybrid_engine.generation.rollout.generator import Generator

MIXES_ROWS = ("rwkv", "recurrent_gemma")
"""Model types whose batches transformers mixes up: RWKV adds up states of rows, and RecurrentGemma reads padding."""
# Options of the whole rollout: the number of rows, and the form of the output.
OF_ALL_ROWS = {"num_return_sequences", "pad_token_id", "return_dict_in_generate"}
ROW_OPTIONS = set(NATIVE_DEFAULTS) - OF_ALL_ROWS


def read_wishes(
    generator: Generator,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    seed: int | None,
    kwargs: dict[str, Any],
    in_sequences: bool = False,
) -> Wishes:
    """Reads these arguments of `generate()` for `generator` in its current state; changes nothing.

    `in_sequences`: whether each row must be a sequence of its own, even if the model's own `generate()` runs.

    Raises:
        ValueError: they are invalid on this process.
    """
    kwargs = dict(kwargs)
    input_ids = _take_inputs(input_ids, kwargs)
    _check_call(generator, input_ids, generation_config, seed, "generate_async()" if in_sequences else "generate()")
    assert input_ids is not None
    check_names(kwargs, generator.accepted_names)
    row_options = kwargs.pop("row_options", None)
    merged = merge_options(generator.module.generation_config, generation_config, kwargs)
    vocab_size = generator.module.config.get_text_config().vocab_size
    width = input_ids.shape[-1] if hasattr(input_ids, "shape") else 0
    options = read_options(merged, width, vocab_size)
    pad = merged.get("pad_token_id")
    # As in transformers, a padding id that also ends sequences is not used to find padding.
    pad = None if pad in options.eos_token_ids else pad
    may_be_empty = generator.partners.size > 1 and not generator.group.has_same_prompts
    mask = check_prompts(input_ids, attention_mask, vocab_size, pad, may_be_empty)
    prompts = prompt_token_ids(input_ids, mask)
    of_prompts = read_row_options(row_options, merged, len(prompts), width, vocab_size)
    check_lengths(prompts, of_prompts, generator.config, _max_positions(generator))
    check_result_fits(prompts, of_prompts)
    functions = read_functions(merged)
    if functions is not None and row_options is not None:
        raise ValueError("row_options cannot be passed beside functions that are asked for all rows at once")
    if any(of_prompt.rules.prompt_logprobs is not None for of_prompt in of_prompts):
        _check_can_score(options)
    fallback = _reason_to_fall_back(generator, merged, functions, len(prompts) * options.num_return_sequences)
    only_native = "row_options" if row_options is not None else next(iter(own_options(merged)), None)
    is_drawn = False
    if fallback is not None:
        _check_can_fall_back(generator, fallback)
        ends_by_string = any(of_prompt.rules.stop_strings for of_prompt in of_prompts)
        mixes = mixes_rows(generator, len(prompts) * options.num_return_sequences)
        if in_sequences or mixes or only_native is not None or (options.return_dict and ends_by_string):
            undrawn = _reason_not_to_draw(merged)
            if mixes and undrawn is not None:
                raise ValueError(
                    f"generate(): transformers' {type(generator.module).__name__} mixes up the rows of a batch, and "
                    f"row by row cannot be served here: {undrawn}; pass one row a call, or leave that out"
                )
            is_drawn = undrawn is None
            if undrawn is not None and (in_sequences or only_native is not None):
                fallback = undrawn
    kwargs = {name: value for name, value in kwargs.items() if name not in OWN_OPTIONS}
    return Wishes(
        input_ids=input_ids,
        mask=mask,
        prompts=prompts,
        options=options,
        of_prompts=of_prompts,
        only_native=None if is_drawn else only_native,
        fallback=fallback,
        functions=functions,
        kwargs={"generation_config": generation_config, **kwargs},
        is_drawn=is_drawn,
    )


def _take_inputs(input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns the prompts, which transformers' `generate()` calls `inputs`; removes them from `kwargs`."""
    inputs = kwargs.pop("inputs", None)
    if inputs is not None and input_ids is not None:
        raise ValueError("generate(): inputs and input_ids are both the prompts; pass one of them")
    return input_ids if inputs is None else inputs


def _check_call(
    generator: Generator,
    input_ids: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    seed: int | None,
    caller: str,
) -> None:
    """Raises ValueError, which names `caller`, for errors that do not concern options."""
    if generator.is_live:
        raise ValueError(f"{caller}: the model is being served; ask the server, or wait until serving ends")
    if input_ids is None:
        raise ValueError(
            f"{caller}: input_ids is missing; pass the prompts' token ids [batch, prompt length], also beside "
            "inputs_embeds"
        )
    if generator.module.training:
        raise ValueError(f"{caller}: the engine is in training mode; call engine.eval() first")
    if not isinstance(generation_config, GenerationConfig | None):
        kind = type(generation_config).__name__
        raise ValueError(f"generation_config is a {kind}; pass a transformers.GenerationConfig or keywords")
    if seed is not None:
        check_integer("seed", seed, -(2**63), 2**63 - 1)


def _max_positions(generator: Generator) -> int | None:
    """Number of tokens of the longest sequence that the model has positions for; None: no limit is known."""
    if generator.model is not None:
        return generator.model.max_positions
    return getattr(generator.module.config.get_text_config(), "max_position_embeddings", None)


def _check_can_score(options: GenerationOptions) -> None:
    if not options.return_dict:
        raise ValueError("prompt_logprobs is returned beside the tokens; pass return_dict_in_generate=True")


def _reason_to_fall_back(
    generator: Generator, merged: dict[str, Any], functions: UserFunctions | None, num_rows: int
) -> str | None:
    """Returns why only the model's own `generate()` can serve these options, or None if containers do."""
    if generator.fallback_reason is not None:
        return generator.fallback_reason
    foreign = [name for name in foreign_options(merged) if name not in FUNCTIONS]
    if foreign:
        return f"option {foreign[0]} is not served natively"
    if functions is None:
        return None
    name = next(name for name in FUNCTIONS if merged.get(name))
    if generator.group.size > 1:
        return f"option {name} is not served natively where processes share the model"
    assert generator.model is not None
    if generator.model.recompute_length is not None:
        return f"option {name} is not served natively where rotary angles depend on how long a sequence becomes"
    max_running = generator.config.max_running
    if 0 < max_running < num_rows:
        return (
            f"option {name} keeps {num_rows} rows in step, more than {generator.config.prefix}max_running={max_running}"
        )
    return None


def mixes_rows(generator: Generator, num_rows: int) -> bool:
    """Whether the model's own `generate()` would compute `num_rows` rows differently than each alone."""
    kind = getattr(generator.module.config, "model_type", None)
    return generator.fallback_reason is not None and num_rows > 1 and kind in MIXES_ROWS


def _reason_not_to_draw(merged: dict[str, Any]) -> str | None:
    """Returns why the model's own `generate()` cannot answer row by row with the rows' options, or None if it can."""
    foreign = foreign_options(merged)
    return f"option {foreign[0]} is not served row by row" if foreign else None


def _check_can_fall_back(generator: Generator, reason: str) -> None:
    """Raises ValueError if the model's own `generate()`, which must run for `reason`, cannot or must not."""
    if generator.config.exact:
        raise ValueError(f"generate(): {reason}, and hybrid_engine.exact is on; leave one of them out")
    if not generator.group.has_whole_module:
        raise ValueError(
            f"generate(): {reason}, and this process holds only its part of the model; leave the option out or "
            f"set {generator.group.remedy}"
        )


def check_prompts(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    vocab_size: int,
    pad_token_id: int | None,
    may_be_empty: bool = False,
) -> torch.Tensor:
    """Checks the prompts and returns their mask `[B, P]` bool, True for tokens.

    Without `attention_mask`, everything left of the first token other than `pad_token_id` is padding; if that is None,
    nothing is.

    Raises ValueError for an empty batch, unless it `may_be_empty`, an empty prompt, ids outside the vocabulary, a mask
    of another shape, a row without a token, and padding anywhere but on the left.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise ValueError(
            f"input_ids is a {type(input_ids).__name__}; it must be an int64 tensor [batch, prompt length]; pass the "
            "tokenizer's output with return_tensors='pt'"
        )
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids is {input_ids.dtype} {list(input_ids.shape)}; it must be int64 [batch, prompt length]; "
            "pass the tokenizer's output with return_tensors='pt'"
        )
    if 0 in input_ids.shape and not (may_be_empty and len(input_ids) == 0):
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; pass at least one prompt of one token or more")
    mask = _mask(input_ids, attention_mask, pad_token_id)
    check_left_padded("attention_mask", mask)
    outside = ((input_ids < 0) | (input_ids >= vocab_size)) & mask
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {column}]={int(input_ids[row, column])} is outside the vocabulary 0..{vocab_size - 1}; "
            "use the tokenizer of this model"
        )
    return mask


def check_left_padded(name: str, mask: torch.Tensor) -> None:
    """Raises ValueError unless each row of `mask [B, P]`, True for tokens, is padding and then at least one token."""
    if mask.shape[1] > 0 and mask.all():
        return
    empty = (~mask.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"{name} has no token in rows {empty[:10]}; every prompt needs at least one token")
    padded_right = (mask[:, :-1] & ~mask[:, 1:]).any(1).nonzero().flatten().tolist()
    if padded_right:
        raise ValueError(
            f"{name} has padding after a token in rows {padded_right[:10]}; prompts must be padded on the left: set "
            "tokenizer.padding_side='left'"
        )


def _mask(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None) -> torch.Tensor:
    if attention_mask is None:
        if pad_token_id is None or not (input_ids == pad_token_id).any():
            return torch.ones_like(input_ids, dtype=torch.bool)
        # Leading pads only: a pad id later in the prompt is an ordinary token.
        mask = (input_ids != pad_token_id).cumsum(1) > 0
        return mask & ~_trailing(input_ids == pad_token_id, mask)
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}; it must be a tensor of input_ids' shape"
        )
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be that of input_ids, "
            f"{list(input_ids.shape)}; pass both as the tokenizer returns them"
        )
    mask = attention_mask.to(torch.bool)
    wrong = attention_mask != mask
    if wrong.any():
        raise ValueError(
            f"attention_mask holds {attention_mask[wrong][0].item()}; it must be 1 for tokens and 0 for padding; pass "
            "it as the tokenizer returns it"
        )
    return mask


def _trailing(is_pad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Marks pads with only pads to their right, in rows that have a token: padding on the right, which is refused."""
    return is_pad.flip(1).cumprod(1).flip(1).bool() & mask


def prompt_token_ids(input_ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Returns each row's token ids without its padding."""
    return [row[kept].tolist() for row, kept in zip(input_ids.cpu().unbind(), mask.cpu().unbind(), strict=True)]


def read_row_options(
    row_options: Any, merged: dict[str, Any], num_prompts: int, prompt_width: int, vocab_size: int
) -> list[GenerationOptions]:
    """Returns the options of each prompt: those of `row_options[i]`, then the common ones in `merged`.

    Raises ValueError, which names the row, if one is invalid.
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
    if "max_length" in given and "max_new_tokens" not in given:  # which would take precedence
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
