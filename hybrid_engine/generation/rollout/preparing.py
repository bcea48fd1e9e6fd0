"""Turns a call of `generate()` on all processes into one request, or an error that all of them raise.

Each process checks its own arguments (`checking.py`). Processes that share a model then plan one rollout of all their
prompts, and all agree on which backend generates and on the noise keys of their samples. The generator is only read, so
an error here leaves it unchanged.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.verdict import Problem, attempt, describe_error
from hybrid_engine.generation.batching.plan import Plan, Request, Wishes, build_sequences, plan_rollout
from hybrid_engine.generation.model.model_group import ModelGroup
from hybrid_engine.generation.request.core import Sequence, prompt_digest, rank_seed, sample_keys
from hybrid_engine.generation.request.options import GenerationOptions
from hybrid_engine.generation.rollout.checking import read_wishes
from hybrid_engine.generation.rollout.generator import Generator


@dataclass(frozen=True, kw_only=True)
class Bid:
    """Message of one process to all others about a rollout."""

    problem: Problem | None
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
                f"{bid.only_native} of rank {rank} is served by inference containers only, and the model's own "
                f"generate() has to run: {fallback}; leave one of them out"
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
                f"generate(): rank {rank} of a tensor-parallel group has other options than its first rank, "
                f"{share.options} and {first.options}; pass the same options on every process"
            )
        if has_same_prompts and share.of_prompts != first.of_prompts:
            raise ValueError(
                f"generate(): rank {rank} of a tensor-parallel group has other row_options than its first rank; pass "
                "the same on every process"
            )
        if has_same_prompts and share.prompts != first.prompts:
            raise ValueError(
                f"generate(): rank {rank} of a tensor-parallel group has other prompts than its first rank; pass "
                "the same input_ids and attention_mask on every process"
            )


def prepare(
    generator: Generator,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    seed: int | None,
    kwargs: dict[str, Any],
    in_sequences: bool = False,
) -> Request:
    """Checks the input and plans the rollout without changing state. Collective on several processes.

    Each process passes its own prompts and options, unless processes share the model; a process may have no prompt. If
    only the model's own `generate()` can run on one process, it runs on all; it answers sequences one by one if the
    rows' options or `in_sequences` require it.

    Raises:
        ValueError: on all processes, if the input of one is invalid, or none has a prompt.
    """
    group, partners = generator.group, generator.partners
    wishes, error = attempt(
        lambda: read_wishes(generator, input_ids, attention_mask, generation_config, seed, kwargs, in_sequences)
    )
    if seed is None and wishes is not None and _needs_seed(wishes, group):
        seed = int(torch.randint(2**62, ()).item())
    shares = group.gather_objects(_share(generator, wishes))
    plan = None
    if wishes is not None and all(share.can_start for share in shares):
        plan, error = attempt(lambda: _plan(generator, wishes, shares))
    bids = partners.exchange(_bid(wishes, seed, error))
    partners.raise_first(error, [bid.problem for bid in bids])
    check_prompts_somewhere(bids)
    assert wishes is not None
    fallback = reason_to_fall_back(bids, partners.rank)
    if fallback is None:
        assert plan is not None
        _name_noise(group, plan, bids, partners.rank)
        return Request(wishes=wishes, plan=plan, seed=None)
    check_only_native(bids, fallback)
    say_once(f"generate() uses the model's own implementation: {fallback}")
    if wishes.is_drawn:
        return Request(wishes=wishes, plan=None, seed=None, sequences=_sequences(group, wishes, bids, partners.rank))
    return Request(
        wishes=wishes, plan=None, seed=_seed_of_fallback(generator, seed, bids) if wishes.is_sampled else seed
    )


def _needs_seed(wishes: Wishes, group: ModelGroup) -> bool:
    """Whether this process's samples need a seed for their noise.

    If not, no seed is drawn, because drawing one changes torch's random state.
    """
    return wishes.is_sampled and (wishes.is_native or wishes.is_drawn or (group.has_same_prompts and group.size > 1))


def _share(generator: Generator, wishes: Wishes | None) -> Share:
    """Builds this process's message to those that share its model; `wishes` is None if it cannot start."""
    is_native = wishes is not None and wishes.is_native
    return Share(
        can_start=wishes is not None,
        prompts=wishes.prompts if wishes is not None and is_native else [],
        options=None if wishes is None else wishes.options,
        of_prompts=wishes.of_prompts if wishes is not None and is_native else [],
        is_native=is_native,
        training_bytes=generator.memory.training_bytes,
        spare_bytes=generator.memory.spare_bytes(generator.model),
    )


def _bid(wishes: Wishes | None, seed: int | None, error: BaseException | None) -> Bid:
    """Builds this process's message to all others; `error` is why it cannot start."""
    problem = None if error is None else describe_error(error)
    if wishes is None:
        return Bid(problem=problem, fallback=None, seed=None, digests=[], num_samples=1, only_native=None)
    return Bid(
        problem=problem,
        fallback=wishes.fallback,
        seed=seed if wishes.is_sampled else None,
        digests=[prompt_digest(prompt) for prompt in wishes.prompts],
        num_samples=wishes.options.num_return_sequences,
        only_native=wishes.only_native,
    )


def _plan(generator: Generator, wishes: Wishes, shares: list[Share]) -> Plan | None:
    """Plans the rollout of all prompts of the group, equal on each of its processes; None if containers do not run it.

    Raises:
        ValueError: the processes disagree, or memory does not suffice.
    """
    group = generator.group
    check_agreement(shares, group.has_same_prompts)
    if not all(share.is_native for share in shares):
        return None
    assert generator.model is not None and generator.native is not None
    num_samples = wishes.options.num_return_sequences
    own = slice(None)
    prompts, of_prompts = wishes.prompts, wishes.of_prompts
    if not group.has_same_prompts:
        prompts = [prompt for share in shares for prompt in share.prompts]
        of_prompts = [options for share in shares for options in share.of_prompts]
        first = num_samples * sum(len(share.prompts) for share in shares[: group.rank])
        own = slice(first, first + num_samples * len(wishes.prompts))
    is_in_step = wishes.functions is not None
    if is_in_step:  # all samples run at once, and each is prefilled for itself
        prompts = [prompt for prompt in prompts for _ in range(num_samples)]
        of_prompts = [options for options in of_prompts for _ in range(num_samples)]
    sequences = build_sequences(prompts, of_prompts, 1 if is_in_step else num_samples, shares_equal=not is_in_step)
    spare_bytes = min(share.spare_bytes for share in shares)
    training_bytes = max(share.training_bytes for share in shares)
    reserved, config = generator.native.num_reserved_blocks, generator.config
    return plan_rollout(
        generator.model, sequences, wishes.options, config, spare_bytes, reserved, training_bytes, own, is_in_step
    )


def _sequences(group: ModelGroup, wishes: Wishes, bids: list[Bid], rank: int) -> list[Sequence]:
    """Builds this process's sequences with their noise keys; `rank` is that of `_name_noise`."""
    sequences = build_sequences(wishes.prompts, wishes.of_prompts, wishes.options.num_return_sequences)
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


def _name_noise(group: ModelGroup, plan: Plan, bids: list[Bid], rank: int) -> None:
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
