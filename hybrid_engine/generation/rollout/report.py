"""Describes in words how an engine generates, for its report."""

import torch

from hybrid_engine.containers.linear import is_adapted
from hybrid_engine.generation.model.stages import StageModel
from hybrid_engine.generation.probing.agreement import describe_switch
from hybrid_engine.generation.rollout.backend import ContainerRollouts
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.metrics.memory_plan import format_bytes
from hybrid_engine.ops.cpu_kernels import use_compiled
from hybrid_engine.ops.dispatch import fallback_forced, use_triton
from hybrid_engine.ops.kernel_errors import replaced_kernels


def describe_generation(generator: Generator) -> str:
    """Describes which layers run on containers, how weights are gathered, the memory that this takes, and why."""
    lines = [_containers(generator), _gathering(generator)]
    if generator.native is not None:
        lines.append(_decoding(generator, generator.native))
    held, after = generator.workspace.allocated_bytes, generator.memory.describe_kept_workspace()
    lines.append(f"KV workspace: {format_bytes(held)} held now, sized for each rollout, {after}")
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
