"""`engine.warm_up()`: does the work that the first rollout would wait for in advance, and reports how long it took."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.config.checks import check_integer
from hybrid_engine.containers import UnsupportedModelError
from hybrid_engine.generation.batching.demand import MAX_RUNNING
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.generation.rollout.preparing import prepare
from hybrid_engine.ops.kernel_errors import naming_kernels

PROMPT_LENGTH = 256


@dataclass(frozen=True)
class WarmUp:
    """The work of a warm-up; times in seconds."""

    seconds: float
    probe_seconds: float
    """Duration of the wide probe; 0 if its verdict was known, or there are no containers."""
    graphs: int
    """Number of steps that were recorded."""
    graph_seconds: float

    def __str__(self) -> str:
        probe = f"{self.probe_seconds:.1f} s for the probe" if self.probe_seconds else "nothing to probe"
        return (
            f"warm-up: {self.seconds:.1f} s, of these {probe} and {self.graph_seconds:.1f} s for {self.graphs} graphs"
        )


def warm_up(
    generator: Generator, num_prompts: int | None, prompt_length: int | None, options: dict[str, Any]
) -> WarmUp:
    """Probes containers widely, compiles kernels and records every step of rollouts with these options; collective.

    No output is generated, and no random state changes. A model without containers has nothing to warm up.

    Args:
        generator: generator whose module is in eval mode.
        num_prompts: number of prompts of later rollouts; None: on a GPU as many as are decoded at once, elsewhere one.
        prompt_length: number of tokens of the shortest prompt; None: 256, or half of the longest sequence if that is
            less.
        options: options of `generate()`; without `max_new_tokens`, answers fill sequences up to their longest length.

    Raises:
        ValueError: `generate()` would refuse the options.
        KernelError: a kernel does not compile.
    """
    start = time.perf_counter()
    probe_seconds = 0.0
    try:
        if generator.model is not None and generator.group.has_whole_module and generator.probe_widely():
            probe_seconds = time.perf_counter() - start
    except UnsupportedModelError as error:
        generator.drop_containers(str(error))
        generator.measure_own()
    if generator.model is None or generator.native is None:
        return WarmUp(time.perf_counter() - start, probe_seconds, 0, 0.0)
    prompts, options = _prompts(generator, num_prompts, prompt_length, options)
    request = prepare(generator, prompts, torch.ones_like(prompts), None, 0, options)
    graphs, graph_seconds = 0, 0.0
    if request.plan is not None:
        with ExitStack() as release:
            kv = generator.gather(request, release)
            assert kv is not None
            native, plan = generator.native, request.plan
            with naming_kernels():
                stats = generator.partners.agree(lambda: native.warm_up(plan, kv))
            graphs, graph_seconds = stats.captures, stats.seconds
        generator.gatherer.count_bytes()  # not a rollout's
    return WarmUp(time.perf_counter() - start, probe_seconds, graphs, graph_seconds)


def _prompts(
    generator: Generator, num_prompts: int | None, prompt_length: int | None, options: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns synthetic prompts `[num_prompts, prompt_length]`, and the options with a length of the answers."""
    model, config = generator.model, generator.config
    assert model is not None
    most = min(config.max_out_tokens, model.max_positions or config.max_out_tokens)
    length = min(PROMPT_LENGTH, max(1, most // 2)) if prompt_length is None else prompt_length
    at_once = config.max_running or MAX_RUNNING.get(generator.device.type, 1)
    rows = (at_once if generator.device.type == "cuda" else 1) if num_prompts is None else num_prompts
    check_integer("num_prompts", rows, 1)
    check_integer("prompt_length", length, 1)
    tokens = (torch.arange(rows * length, device=generator.device) * 7919 + 11) % model.vocab_size
    return tokens.view(rows, length), {"max_new_tokens": max(1, most - length), **options}
