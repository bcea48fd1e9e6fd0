"""Methods that the training engine and the inference engine share: all act on a `Generator`.

`ModuleGenerate` replaces the module's own `generate()`, `warm_up` does the work that the first rollout would wait for,
and `describe_generation` is the generator's part of an engine's report.
"""

import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import GenerationConfig

from hybrid_engine.config.checks import check_integer
from hybrid_engine.containers import UnsupportedModelError
from hybrid_engine.containers.views import is_adapted
from hybrid_engine.generation.core import GenerateCall
from hybrid_engine.generation.memory import MAX_RUNNING, prefix_cache_reason
from hybrid_engine.generation.model.probe import describe_switch
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.generation.rollout.preparing import prepare
from hybrid_engine.generation.rollout.stages import StageModel
from hybrid_engine.generation.step import ContainerRollouts
from hybrid_engine.metrics.memory import format_bytes
from hybrid_engine.ops.cpu_kernels import use_compiled
from hybrid_engine.ops.dispatch import fallback_forced, naming_kernels, replaced_kernels, use_triton

PROMPT_LENGTH = 256


class PutGenerate:
    """A `generate` attribute of `module`; a copy or pickle of the module gets its class's method instead."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self.module)]  # copy.deepcopy is in the middle of copying the module
        return type(copied).generate.__get__(copied)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "generate")


class GeneratingEngine(Protocol):
    """An engine over a module, with a `generate()` of its own."""

    module: nn.Module

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """See `HybridEngine.generate`."""


class ModuleGenerate(PutGenerate):
    """`engine.module.generate`: the engine's, with the positions and names of the arguments of the model's.

    Once the engine is gone, the module's own `generate()` runs.
    """

    def __init__(self, engine: GeneratingEngine) -> None:
        super().__init__(engine.module)
        # A weak reference: the module must not keep an unused engine's optimizer state and KV workspace alive.
        self.engine = weakref.ref(engine)

    def __call__(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        engine = self.engine()
        if engine is None:
            return type(self.module).generate(self.module, inputs, generation_config, **kwargs)
        kwargs = with_one_name(inputs, kwargs)
        return engine.generate(generation_config=generation_config, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other == getattr(self.engine(), "generate", None)

    __hash__ = None  # type: ignore[assignment]


def with_one_name(inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns `kwargs` with transformers' `inputs`, if any, as `input_ids`; raises ValueError if both are passed."""
    if inputs is None:
        return kwargs
    if kwargs.get("input_ids") is not None:
        raise ValueError("generate(): inputs and input_ids both name the prompts; pass one of them")
    return {**kwargs, "input_ids": inputs}


def describe_generation(generator: Generator) -> str:
    """Describes which layers run on containers, how weights are gathered, the memory that this takes, and why."""
    lines = [_containers(generator), _gathering(generator)]
    if generator.native is not None:
        lines.append(_decoding(generator, generator.native))
    held, after = generator.workspace.allocated_bytes, generator.memory.describe_kept_workspace()
    lines.append(f"KV workspace: {format_bytes(held)} held now, sized for each rollout, {after}")
    if generator.model is not None:
        reason = prefix_cache_reason(generator.model, generator.config)
        how = "shared in blocks smaller than a sequence" if reason is None else f"not shared, because {reason}"
        lines.append(f"beginnings of prompts: {how}")
    difference = generator.logprob_difference
    if difference is not None:
        lines.append(
            f"log-probabilities, rollout against trainer: mean {difference.mean:.2e}, max {difference.max:.2e} apart"
        )
    if generator.switch_difference is not None and generator.model is not None:
        lines.append(describe_switch(generator.switch_difference, generator.model.angles.trained_length or 0))
    return "\n".join(lines)


def _containers(generator: Generator) -> str:
    model = generator.model
    if model is None:
        return f"containers: none, generate() is the model's own, because {generator.fallback_reason}"
    if generator.exact is not None:
        return (
            f"containers: none, exact mode generates by the module's own {model.layer_class} layers in fixed shapes; "
            "the log-probabilities of a rollout are the trainer's to the bit and need no second pass"
        )
    adapted = sum(is_adapted(linear.module) for layer in model.layers for linear in layer.linears)
    lora = f"; LoRA on {adapted} linears, fused into buffers of their own for each rollout" if adapted else ""
    if isinstance(model, StageModel):
        ends = ["embedding"] if model.stage.is_first else []
        ends += ["final norm", "LM head"] if model.stage.is_last else []
        held = [f"{len(model.layers)} of {model.num_layers} {model.layer_class} layers", *ends]
        return f"containers: {', '.join(held)}, as views of the parameters{lora}"
    return (
        f"containers: all {len(model.layers)} {model.layer_class} layers, embedding, final norm and LM head, as views "
        f"of the parameters{lora}"
    )


def _gathering(generator: Generator) -> str:
    gatherer, group = generator.gatherer, generator.group
    if group.size > 1:
        how = "taken from its shards for each rollout" if group.slices is not None else "held"
        what = [f"stage {group.stage.index} of {group.stage.size}"] if group.stage is not None else []
        what += [f"rank {group.parallel.rank} of {group.parallel.size}"] if group.parallel.size > 1 else []
        kind = "tensor parallelism" if group.stage is None else "pipeline"
        return f"{kind}: {', '.join(what)}, its part of the weights {how}"
    if gatherer.is_streamed and not gatherer.can_stream:
        why = "they would not all fit" if gatherer.is_pinned else "pin_parameters is false"
        return (
            f"gathering: none; adapters are fused and weights dequantised layer by layer on every pass, because {why}"
        )
    if not generator.sharding.is_sharded:
        return "gathering: none, the weights are whole on this process"
    if gatherer.is_streamed:
        why = "the whole weights do not fit" if gatherer.is_pinned else "pin_parameters is false"
        return (
            f"gathering: layer by layer on every pass, the next one on its way, because {why}; "
            f"{format_bytes(gatherer.resident_bytes)} gathered at once"
        )
    return f"gathering: all layers once per rollout; {format_bytes(gatherer.resident_bytes)} gathered"


def _decoding(generator: Generator, native: ContainerRollouts) -> str:
    if generator.exact is not None:
        return "decoding: the module's forward in pieces of fixed shapes; each step by itself"
    weight = native.model.weight
    if use_triton(weight):
        ops = "; ".join(["Triton kernels", *(f"in torch, because {text}" for text in replaced_kernels())])
    elif weight.is_cpu and use_compiled(torch.empty(0, dtype=weight.dtype)):
        ops = "compiled functions between torch's products"
    else:
        why = "HYBRID_ENGINE_FALLBACK=1" if fallback_forced() else f"the weights are on {weight.device.type}"
        ops = f"torch references, because {why}"
    if native.steps.stats.played:
        graphs = f"the forward passes of {native.steps.stats.played} steps of the last rollout played from tapes"
    elif native.steps.recorder is None:
        config = generator.config
        off = (
            "enable_cuda_graph is false" if not config.enable_cuda_graph else "the experts' reference reads the device"
        )
        why = off if weight.is_cuda else "there is no GPU"
        graphs = f"each step launched by itself, because {why}"
    elif generator.gatherer.is_streamed:
        graphs = "each step launched by itself, because layers are gathered one by one"
    else:
        graphs = f"one graph replay per step, {native.steps.stats.captures} graphs recorded in the last rollout"
    return f"decoding: {ops}; {graphs}"


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
    call = GenerateCall(input_ids=prompts, attention_mask=torch.ones_like(prompts), seed=0, options=options)
    request = prepare(generator, call)
    graphs, graph_seconds = 0, 0.0
    if request.plan is not None:
        with ExitStack() as release:
            cache = generator.gather(request, release)
            assert cache is not None
            native, plan = generator.native, request.plan
            with naming_kernels():
                stats = generator.partners.agree(lambda: native.warm_up(plan, cache))
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
