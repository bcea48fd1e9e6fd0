"""The arguments of one process's `generate()`, checked: they become its wishes, or an error. Asks no other process."""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from hybrid_engine.config.checks import check_integer
from hybrid_engine.generation.batching.plan import check_lengths, check_result_fits
from hybrid_engine.generation.generator import Generator
from hybrid_engine.generation.options import (
    OWN_OPTIONS,
    GenerationOptions,
    check_names,
    foreign_options,
    merge_options,
    own_options,
    read_options,
)
from hybrid_engine.generation.prompts import check_prompts, prompt_token_ids
from hybrid_engine.generation.request import Wishes
from hybrid_engine.generation.sampling.in_step import NAMES as FUNCTIONS
from hybrid_engine.generation.sampling.in_step import UserFunctions, read_functions
from hybrid_engine.generation.sampling.row_options import read_row_options

MIXES_ROWS = ("rwkv", "recurrent_gemma")
"""Model types whose batches transformers gets wrong: RWKV adds up states of rows, and RecurrentGemma reads padding."""


def check_uncompiled(function: str, model: nn.Module) -> None:
    """Raises ValueError for what `torch.compile(model)` returns, a module around the model; local."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ValueError(
            f"{function}(): model is what torch.compile() returned, which has no generate() of its own; pass the model "
            "itself, after model.compile() if its forward should be compiled"
        )


def read_wishes(
    generator: Generator,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    seed: int | None,
    kwargs: dict[str, Any],
    in_sequences: bool = False,
) -> Wishes:
    """The wishes in these arguments of `generate()` to `generator`, as it is now; changes nothing.

    `in_sequences`: each row must be a sequence of its own, also where the model's own `generate()` runs.

    Raises:
        ValueError: if they cannot work on this process.
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
    # As in transformers, a padding id that also ends sequences says nothing about padding.
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
    """The prompts, which transformers' `generate()` calls `inputs`; takes them out of `kwargs`."""
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
    """ValueError, which names `caller`, for what is wrong before any option is read."""
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
    """Tokens of the longest sequence that the model has positions for; None: no limit is known."""
    if generator.model is not None:
        return generator.model.max_positions
    return getattr(generator.module.config.get_text_config(), "max_position_embeddings", None)


def _check_can_score(options: GenerationOptions) -> None:
    if not options.return_dict:
        raise ValueError("prompt_logprobs is returned beside the tokens; pass return_dict_in_generate=True")


def _reason_to_fall_back(
    generator: Generator, merged: dict[str, Any], functions: UserFunctions | None, num_rows: int
) -> str | None:
    """Why only the model's own `generate()` can serve these options; None where containers do."""
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
    """Whether the model's own `generate()` would give `num_rows` rows what they do not get alone."""
    kind = getattr(generator.module.config, "model_type", None)
    return generator.fallback_reason is not None and num_rows > 1 and kind in MIXES_ROWS


def _reason_not_to_draw(merged: dict[str, Any]) -> str | None:
    """Why the model's own `generate()` cannot answer row by row, tokens drawn by the rows' options; None: it can."""
    foreign = foreign_options(merged)
    return f"option {foreign[0]} is not served row by row" if foreign else None


def _check_can_fall_back(generator: Generator, reason: str) -> None:
    """Raises ValueError where the model's own `generate()`, which has to run for `reason`, cannot or must not."""
    if generator.config.exact:
        raise ValueError(f"generate(): {reason}, and hybrid_engine.exact is on; leave one of them out")
    if not generator.group.has_whole_module:
        raise ValueError(
            f"generate(): {reason}, and this process holds only its part of the model; leave the option out or "
            f"set {generator.group.remedy}"
        )
