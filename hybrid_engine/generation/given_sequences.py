"""Sequences that somebody else made, run by the processes that share a model, and told of as they end.

Nobody joins while it runs: that is `live.py`, for one process.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import torch

from hybrid_engine.distributed.interrupts import holding_interrupts
from hybrid_engine.generation.batching.plan import check_lengths, plan_rollout
from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.generator import Generator


def run_sequences(
    generator: Generator, sequences: list[Sequence], max_running: int | None, tell: Callable[[], None]
) -> None:
    """Runs `sequences`, the same on all processes and of the same options, until all have ended; collective.

    Args:
        max_running: that decode at once; None: as many as in a rollout.
        tell: called again and again, on every process; those that have a `finish_reason` and as many log-probabilities
            as tokens have ended. Its error ends the rollout on all.

    Raises:
        ValueError: the model has no containers, a sequence is too long or there is no memory for one.
    """
    if not sequences:
        return
    if generator.model is None or generator.native is None:
        raise ValueError(f"{generator.fallback_reason}; processes share models with containers only")
    model, native, partners, options = generator.model, generator.native, generator.partners, sequences[0].options
    config = replace(generator.config, max_running=max_running or generator.config.max_running)
    check_lengths([s.prompt.tokens for s in sequences], [options] * len(sequences), config, model.max_positions)
    num_samples = sum(sequence.prompt is sequences[0].prompt for sequence in sequences)
    if options.do_sample:
        options = replace(options, num_return_sequences=num_samples)
    else:  # all samples of a prompt are the same then, and none is a fork
        for sequence in sequences:
            sequence.prompt = sequence.prompt.with_own_blocks()
    spare = generator.memory.spare_bytes(model)
    (least,) = partners.highest([-spare])
    plan = plan_rollout(model, sequences, options, config, -least, native.num_reserved_blocks)
    with holding_interrupts(), torch.inference_mode(False), torch.no_grad(), ExitStack() as release:
        kv = partners.agree(lambda: native.gather(plan, release))
        partners.agree(lambda: native.run_turns(plan, kv, None, tell))
    partners.agree(tell)
