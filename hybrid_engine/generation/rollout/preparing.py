"""Turns a call of `generate()` on all processes into one request, or an error that all of them raise.

Each process checks its own arguments (`read_call`). Processes that share a model then plan one rollout of all their
prompts, and all agree on which backend generates and on the noise keys of their samples. The generator is only read, so
an error here leaves it unchanged.
"""

import difflib
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hybrid_engine.config.checks import check_integer
from hybrid_engine.config.notices import say_once
from hybrid_engine.containers.towers import IMAGE_WORDS, ImageInputs, names_of, split
from hybrid_engine.distributed.verdict import ErrorNotice, attempt, describe_error
from hybrid_engine.generation.core import (
    GenerateCall,
    LocalRequest,
    Request,
    RolloutPlan,
    Sequence,
    UserFunctions,
    prompt_digest,
    rank_seed,
    sample_keys,
)
from hybrid_engine.generation.memory import build_sequences, check_lengths, check_result_fits, plan_rollout
from hybrid_engine.generation.model.weights import ModelGroup
from hybrid_engine.generation.options import (
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

FUNCTIONS = ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "streamer")
"""Options that are functions of the user."""
MIXES_ROWS = ("rwkv", "recurrent_gemma")
"""Model types whose batches transformers mixes up: RWKV adds up states of rows, and RecurrentGemma reads padding."""
# Options of the whole rollout: the number of rows, and the form of the output.
OF_ALL_ROWS = {"num_return_sequences", "pad_token_id", "return_dict_in_generate"}
ROW_OPTIONS = set(NATIVE_DEFAULTS) - OF_ALL_ROWS


@dataclass(frozen=True, kw_only=True)
class Bid:
    """Message of one process to all others about a rollout."""

    problem: ErrorNotice | None
    """Why it cannot start, or None."""
    fallback: str | None
    """Why only the model's own `generate()` can run on this process, or None."""
    seed: int | None
    """Seed of the noise; None if this process draws none."""
    digests: list[bytes]
    """Digests of its prompts."""
    num_samples: int
    """Number of samples of each prompt."""
    only_native: str | None
    """Name of an option that only containers serve; None if this process has none."""


def check_prompts_somewhere(bids: list[Bid]) -> None:
    """Raises ValueError if no process has a prompt."""
    if not any(bid.digests for bid in bids):
        raise ValueError("generate(): input_ids is empty on every process; pass at least one prompt to one of them")


def reason_to_fall_back(bids: list[Bid], rank: int) -> str | None:
    """Returns why the model's own `generate()` runs on every process, or None if containers do.

    `rank` is this process's.
    """
    reasons = {other: bid.fallback for other, bid in enumerate(bids) if bid.fallback is not None}
    if not reasons or rank in reasons:
        return reasons.get(rank)
    other, reason = next(iter(reasons.items()))
    return f"rank {other}: {reason}"


def check_only_native(bids: list[Bid], fallback: str) -> None:
    """Raises ValueError if a process has an option that the model's own `generate()`, which must run, lacks."""
    for rank, bid in enumerate(bids):
        if bid.only_native is not None:
            raise ValueError(
                f"{bid.only_native} of rank {rank} needs inference containers, but the model's own generate() has to "
                f"run: {fallback}; leave one of them out"
            )


def choose_seed(bids: list[Bid]) -> int:
    """The seed of the first process that draws noise; 0 if none does."""
    return next((bid.seed for bid in bids if bid.seed is not None), 0)


def keys_of(bids: list[Bid], rank: int) -> list[int]:
    """Returns the noise keys of the samples of process `rank`, prompt by prompt."""
    earlier = [digest for bid in bids[:rank] for digest in bid.digests for _ in range(bid.num_samples)]
    return sample_keys(choose_seed(bids), bids[rank].digests, earlier, bids[rank].num_samples)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Message of one process to those that share its model: its prompts, options and memory."""

    can_start: bool
    prompts: list[list[int]]
    options: GenerationOptions | None
    """Options of this process; None if it cannot start."""
    of_prompts: list[GenerationOptions]
    """Options of each of its prompts."""
    is_native: bool
    """Whether containers run the rollout."""
    spare_bytes: int
    """Free memory for the KV workspace."""
    training_bytes: int
    """Bytes of that memory that training will take."""


def check_agreement(shares: list[Share], has_same_prompts: bool) -> None:
    """Raises ValueError if these processes, which can all start, cannot run one rollout together."""
    first = shares[0]
    for rank, share in enumerate(shares):
        if share.options != first.options:
            raise ValueError(
                f"generate(): rank {rank} of a tensor-parallel group has different options from its first rank, "
                f"{share.options} and {first.options}; pass the same options on every process"
            )
        if has_same_prompts and share.of_prompts != first.of_prompts:
            raise ValueError(
                f"generate(): rank {rank} of a tensor-parallel group has different row_options from its first rank; "
                "pass the same on every process"
            )
        if has_same_prompts and share.prompts != first.prompts:
            raise ValueError(
                f"generate(): rank {rank} of a tensor-parallel group has different prompts from its first rank; "
                "pass the same input_ids and attention_mask on every process"
            )


def prepare(generator: Generator, call: GenerateCall) -> Request:
    """Checks the input and plans the rollout without changing state. Collective on several processes.

    Each process passes its own prompts and options, unless processes share the model; a process may have no prompt. If
    only the model's own `generate()` can run on one process, it runs on all; it answers sequences one by one if the
    rows' options or the call require it.

    Raises:
        ValueError: on all processes, if the input of one is invalid, or none has a prompt.
    """
    group, partners = generator.group, generator.partners
    local, error = attempt(lambda: read_call(generator, call))
    seed = call.seed
    if seed is None and local is not None and _needs_seed(local, group):
        seed = int(torch.randint(2**62, ()).item())
    shares = group.gather_objects(_share(generator, local))
    plan = None
    if local is not None and all(share.can_start for share in shares):
        plan, error = attempt(lambda: _plan(generator, local, shares))
    bids = partners.exchange(_bid(local, seed, error))
    partners.raise_first(error, [bid.problem for bid in bids])
    check_prompts_somewhere(bids)
    assert local is not None
    fallback = reason_to_fall_back(bids, partners.rank)
    if fallback is None:
        assert plan is not None
        _name_noise(group, plan, bids, partners.rank)
        return Request(local=local, plan=plan, seed=None)
    check_only_native(bids, fallback)
    say_once(f"generate() uses the model's own implementation: {fallback}")
    if local.is_drawn:
        return Request(local=local, plan=None, seed=None, sequences=_sequences(group, local, bids, partners.rank))
    return Request(local=local, plan=None, seed=_seed_of_fallback(generator, seed, bids) if local.is_sampled else seed)


def _needs_seed(local: LocalRequest, group: ModelGroup) -> bool:
    """Whether this process's samples need a seed for their noise.

    If not, no seed is drawn, because drawing one changes torch's random state.
    """
    return local.is_sampled and (local.is_native or local.is_drawn or (group.has_same_prompts and group.size > 1))


def _share(generator: Generator, local: LocalRequest | None) -> Share:
    """Builds this process's message to those that share its model; `local` is None if it cannot start."""
    is_native = local is not None and local.is_native
    return Share(
        can_start=local is not None,
        prompts=local.prompts if local is not None and is_native else [],
        options=None if local is None else local.options,
        of_prompts=local.of_prompts if local is not None and is_native else [],
        is_native=is_native,
        training_bytes=generator.memory.training_bytes,
        spare_bytes=generator.memory.spare_bytes(generator.model),
    )


def _bid(local: LocalRequest | None, seed: int | None, error: BaseException | None) -> Bid:
    """Builds this process's message to all others; `error` is why it cannot start."""
    problem = None if error is None else describe_error(error)
    if local is None:
        return Bid(problem=problem, fallback=None, seed=None, digests=[], num_samples=1, only_native=None)
    return Bid(
        problem=problem,
        fallback=local.fallback,
        seed=seed if local.is_sampled else None,
        digests=[prompt_digest(*prompt) for prompt in zip(local.prompts, local.images, strict=True)],
        num_samples=local.options.num_return_sequences,
        only_native=local.only_native,
    )


def _plan(generator: Generator, local: LocalRequest, shares: list[Share]) -> RolloutPlan | None:
    """Plans the rollout of all prompts of the group, equal on each of its processes; None if containers do not run it.

    Raises:
        ValueError: the processes disagree, or memory does not suffice.
    """
    group = generator.group
    check_agreement(shares, group.has_same_prompts)
    if not all(share.is_native for share in shares):
        return None
    assert generator.model is not None and generator.native is not None
    num_samples = local.options.num_return_sequences
    own = slice(None)
    prompts, of_prompts, images = local.prompts, local.of_prompts, local.images
    if not group.has_same_prompts:
        prompts = [prompt for share in shares for prompt in share.prompts]
        of_prompts = [options for share in shares for options in share.of_prompts]
        images = images if len(shares) == 1 else [None] * len(prompts)  # groups of processes take none
        first = num_samples * sum(len(share.prompts) for share in shares[: group.rank])
        own = slice(first, first + num_samples * len(local.prompts))
    is_in_step = local.functions is not None
    if is_in_step:  # all samples run at once, and each is prefilled for itself
        prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        of_prompts = [options for options in of_prompts for _ in range(num_samples)]
        images = [own for own in images for _ in range(num_samples)]
    sequences = build_sequences(prompts, of_prompts, 1 if is_in_step else num_samples, not is_in_step, images)
    spare_bytes = min(share.spare_bytes for share in shares)
    training_bytes = max(share.training_bytes for share in shares)
    reserved, config = generator.native.num_reserved, generator.config
    return plan_rollout(
        generator.model, sequences, local.options, config, spare_bytes, reserved, training_bytes, own, is_in_step
    )


def _sequences(group: ModelGroup, local: LocalRequest, bids: list[Bid], rank: int) -> list[Sequence]:
    """Builds this process's sequences with their noise keys; `rank` is that of `_name_noise`."""
    sequences = build_sequences(local.prompts, local.of_prompts, local.options.num_return_sequences)
    if group.has_same_prompts:
        bids, rank = bids[:: group.size], rank // group.size
    for sequence, key in zip(sequences, keys_of(bids, rank), strict=True):
        sequence.key = key
    return sequences


def _seed_of_fallback(generator: Generator, seed: int | None, bids: list[Bid]) -> int | None:
    """Returns a seed with which processes draw alike if and only if they have the same prompts."""
    if generator.group.has_same_prompts and generator.group.size > 1:
        size, partners = generator.group.size, generator.partners
        return choose_seed(bids) if partners.size == size else rank_seed(choose_seed(bids), partners.rank // size)
    if generator.partners.size == 1:
        return seed
    # Scripts seed all processes alike, so equal prompts would get equal samples.
    return rank_seed(int(torch.randint(2**62, ()).item()) if seed is None else seed, generator.partners.rank)


def _name_noise(group: ModelGroup, plan: RolloutPlan, bids: list[Bid], rank: int) -> None:
    """Sets the noise key of each sequence of `plan`; a group of processes with the same prompts counts once.

    `rank` is this process's index in `bids`, which is 0 if it generates alone.
    """
    if group.has_same_prompts:
        keys = keys_of(bids[:: group.size], rank // group.size)
    else:
        first = rank // group.size * group.size
        keys = [key for other in range(first, first + group.size) for key in keys_of(bids, other)]
    for sequence, key in zip(plan.sequences, keys, strict=True):
        sequence.key = key


def read_call(generator: Generator, call: GenerateCall) -> LocalRequest:
    """Reads a call for `generator` in its current state; changes nothing.

    Raises:
        ValueError: its arguments are invalid on this process.
    """
    kwargs = dict(call.options)
    input_ids = _take_inputs(call.input_ids, kwargs)
    _check_call(generator, input_ids, call)
    assert input_ids is not None
    check_names(kwargs, generator.accepted_names)
    row_options = kwargs.pop("row_options", None)
    merged = merge_options(generator.module.generation_config, call.generation_config, kwargs)
    vocab_size = generator.module.config.get_text_config().vocab_size
    width = input_ids.shape[-1] if hasattr(input_ids, "shape") else 0
    options = read_options(merged, width, vocab_size)
    mask = _read_mask(generator, input_ids, call.attention_mask, merged, options)
    prompts = prompt_token_ids(input_ids, mask)
    of_prompts = read_row_options(row_options, merged, len(prompts), width, vocab_size)
    check_lengths(prompts, of_prompts, generator.config, _max_positions(generator))
    check_result_fits(prompts, of_prompts)
    images, text = _take_images(generator, merged, prompts, call)
    functions = read_functions(merged)
    if functions is not None and row_options is not None:
        raise ValueError("row_options cannot be combined with functions that handle all rows at once")
    _check_result(generator, options, of_prompts)
    kwargs = {name: value for name, value in kwargs.items() if name not in OWN_OPTIONS}
    local = LocalRequest(
        input_ids=input_ids,
        mask=mask,
        prompts=prompts,
        images=images,
        options=options,
        of_prompts=of_prompts,
        only_native="row_options" if row_options is not None else next(iter(own_options(merged)), None),
        fallback=_reason_to_fall_back(generator, text, functions, len(prompts) * options.num_return_sequences),
        functions=functions,
        kwargs={"generation_config": call.generation_config, **kwargs},
    )
    return local if local.is_native else _fall_back(generator, local, merged, call.in_sequences)


def _take_images(
    generator: Generator, merged: dict[str, Any], prompts: list[list[int]], call: GenerateCall
) -> tuple[list[ImageInputs | None], dict[str, Any]]:
    """Returns the images of each prompt, and the options without them if containers serve images in this call.

    If they do not, the options keep them as ones that only the model's own `generate()` serves.

    Raises ValueError for a video, and for images and image tokens that do not belong together.
    """
    none: list[ImageInputs | None] = [None] * len(prompts)
    given = {name: value for name, value in merged.items() if isinstance(value, torch.Tensor) and _is_of_images(name)}
    model = generator.model
    if model is None or model.tower is None or not (given.keys() <= set(names_of(model.tower))):
        return none, merged
    if given and not _serves_images(generator, call, merged):
        return none, merged
    images = split(model.base, model.tower, given, prompts)
    return images, {name: value for name, value in merged.items() if name not in given}


def _is_of_images(name: str) -> bool:
    return name == "token_type_ids" or any(word in name for word in IMAGE_WORDS)


def _serves_images(generator: Generator, call: GenerateCall, merged: dict[str, Any]) -> bool:
    """Whether containers take images in this call."""
    is_gathered_by_layer = generator.gatherer.is_streamed and generator.gatherer.can_stream
    is_alone = generator.group.size == 1 and generator.exact is None
    return is_alone and not is_gathered_by_layer and not call.in_sequences and merged.get("prompt_logprobs") is None


def _read_mask(
    generator: Generator,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    merged: dict[str, Any],
    options: GenerationOptions,
) -> torch.Tensor:
    """Checks the prompts and returns their mask, as `check_prompts` does."""
    vocab_size = generator.module.config.get_text_config().vocab_size
    pad = merged.get("pad_token_id")
    # As in transformers, a padding id that also ends sequences is not used to find padding.
    pad = None if pad in options.eos_token_ids else pad
    may_be_empty = generator.partners.size > 1 and not generator.group.has_same_prompts
    return check_prompts(input_ids, attention_mask, vocab_size, pad, may_be_empty)


def _fall_back(generator: Generator, local: LocalRequest, merged: dict[str, Any], in_sequences: bool) -> LocalRequest:
    """Returns `local` in the form in which the model's own `generate()` serves it: all rows at once, or row by row.

    Raises ValueError if it cannot.
    """
    assert local.fallback is not None
    if local.options.rules.record_routing:
        raise ValueError(f"record_routing=True needs inference containers, but {local.fallback}")
    _check_can_fall_back(generator, local.fallback)
    mixes = mixes_rows(generator, len(local.prompts) * local.options.num_return_sequences)
    needs_rows = in_sequences or local.only_native is not None
    ends_by_string = any(options.rules.stop_strings for options in local.of_prompts)
    if not (needs_rows or mixes or (local.options.return_dict and ends_by_string)):
        return local
    undrawn = _reason_not_to_draw(merged)
    if undrawn is None:
        return replace(local, is_drawn=True, only_native=None)
    if mixes:
        raise ValueError(
            f"generate(): transformers' {type(generator.module).__name__} mixes up the rows of a batch, and "
            f"running row by row excludes this: {undrawn}; pass one row per call, or leave that out"
        )
    return replace(local, fallback=undrawn) if needs_rows else local


def read_functions(merged: dict[str, Any]) -> UserFunctions | None:
    """Returns the functions among the options `merged`, or None if there are none.

    Raises ValueError for a value that is not a function, a list of functions or a streamer.
    """
    given = {name: merged.get(name) for name in FUNCTIONS}
    for name in ("logits_processor", "stopping_criteria"):
        value = given[name]
        if value is not None and (not isinstance(value, list | tuple) or not all(map(callable, value))):
            raise ValueError(f"{name}={value!r} must be a list of functions of (input_ids, scores)")
    prefix, streamer = given["prefix_allowed_tokens_fn"], given["streamer"]
    if prefix is not None and not callable(prefix):
        raise ValueError(f"prefix_allowed_tokens_fn={prefix!r} must be a function of (batch_id, input_ids)")
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise ValueError(f"streamer={streamer!r} must have put() and end(), as transformers' BaseStreamer")
    if streamer is None and prefix is None and not any(given[name] for name in FUNCTIONS[::2]):
        return None
    return UserFunctions(
        logits_processor=LogitsProcessorList(given["logits_processor"] or []),
        prefix_allowed_tokens_fn=prefix,
        stopping_criteria=StoppingCriteriaList(given["stopping_criteria"] or []),
        streamer=streamer,
        is_min_new=merged.get("min_new_tokens") is not None,
    )


def _take_inputs(input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Returns the prompts, which transformers' `generate()` calls `inputs`; removes them from `kwargs`."""
    inputs = kwargs.pop("inputs", None)
    if inputs is not None and input_ids is not None:
        raise ValueError("generate(): inputs and input_ids are both the prompts; pass one of them")
    return input_ids if inputs is None else inputs


def _check_call(generator: Generator, input_ids: torch.Tensor | None, call: GenerateCall) -> None:
    """Raises ValueError, which names the caller, for errors that do not concern options."""
    if generator.is_live:
        raise ValueError(f"{call.caller}: the model is being served; ask the server, or wait until serving ends")
    if input_ids is None:
        raise ValueError(
            f"{call.caller}: input_ids is missing; pass the prompts' token ids [batch, prompt length], also beside "
            "inputs_embeds"
        )
    if generator.module.training:
        raise ValueError(f"{call.caller}: the engine is in training mode; call engine.eval() first")
    if not isinstance(call.generation_config, GenerationConfig | None):
        kind = type(call.generation_config).__name__
        raise ValueError(f"generation_config is a {kind}; pass a transformers.GenerationConfig or keywords")
    if call.seed is not None:
        check_integer("seed", call.seed, -(2**63), 2**63 - 1)


def _max_positions(generator: Generator) -> int | None:
    """Number of tokens of the longest sequence that the model has positions for; None: no limit is known."""
    if generator.model is not None:
        return generator.model.max_positions
    return getattr(generator.module.config.get_text_config(), "max_position_embeddings", None)


def _check_result(generator: Generator, options: GenerationOptions, of_prompts: list[GenerationOptions]) -> None:
    """Raises ValueError for figures of rows that the result cannot have."""
    has_scores = any(of_prompt.rules.prompt_logprobs is not None for of_prompt in of_prompts)
    has_supports = any(of_prompt.rules.record_supports for of_prompt in of_prompts)
    for name, is_wanted in (("prompt_logprobs", has_scores), ("record_supports", has_supports)):
        if is_wanted and not options.return_dict:
            raise ValueError(f"{name} needs return_dict_in_generate=True")
    if has_supports and generator.group.stage is not None:
        raise ValueError("record_supports=True is not supported with pipeline stages; leave it out")
    if any(of_prompt.rules.record_routing != options.rules.record_routing for of_prompt in of_prompts):
        raise ValueError("record_routing must be the same for all rows; pass it to generate() itself")
    if options.rules.record_routing:
        _check_routing(generator, options)


def _check_routing(generator: Generator, options: GenerationOptions) -> None:
    """Raises ValueError if the experts that tokens take cannot be recorded."""
    if not options.return_dict:
        raise ValueError("record_routing needs return_dict_in_generate=True")
    if generator.group.stage is not None:
        raise ValueError("record_routing=True is not supported with pipeline stages; leave it out")
    if generator.exact is not None:
        raise ValueError(
            "record_routing=True adds nothing to exact mode, in which the trainer chooses the same experts"
        )
    name = type(generator.module).__name__
    if generator.model is None:
        raise ValueError(f"record_routing=True needs inference containers, which {name} does not use")
    if not generator.model.mixtures:
        raise ValueError(f"record_routing=True needs a mixture of experts, and {name} has none; leave it out")


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
            raise ValueError(f"row_options[{row}]: {name} is not an option of a row; {_remedy(name)}")
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
