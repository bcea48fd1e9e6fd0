"""Binds containers to gathered weights: once, to copies at fixed addresses, or layer by layer if layers are streamed.

`Generator` uses it around every rollout. It also checks that containers can generate with the weights of a model that a
plan splits, builds that model's group, and detects changes of a module's children, hooks and forward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.device import LastingBuffer
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.tensor_parallel import Cut, TensorParallel
from hybrid_engine.distributed.verdict import agree
from hybrid_engine.generation.model.model_group import ModelGroup, join_model_group, join_stages
from hybrid_engine.zero.gathering import WeightGatherer
from hybrid_engine.zero.slicing import PartReader, places_of_ranks
from hybrid_engine.zero.split_module import num_stages_of, original_of, split_axes_of, stages_of, unit_size_of

Read = Callable[[torch.Tensor, Cut | None, int, str], torch.Tensor]
"""Signature of `TensorParallel.read`: returns a rank's part of a parameter."""
OPTION = "plan_ngpus"
WITHOUT_EFFECT = ("hybrid_engine.", "torch.distributed.")
"""Packages whose hooks and forwards do not change what a module computes."""


class LastingWeights:
    """Copies of gathered parameters at fixed addresses; FSDP2 gathers to another address every time.

    Recorded steps read them, so the next rollout does not have to record again. A layer's gathered weights are freed
    once they are copied: a rollout holds the whole weights once, and two layers of them twice.
    """

    def __init__(self, read: Read, wait: Callable[[], None]):
        """`read` and `wait` are those of the `TensorParallel` that generates."""
        self._read, self._wait = read, wait
        self._copies: dict[tuple[int, Cut | None], tuple[torch.Tensor, LastingBuffer]] = {}
        self._filled: set[tuple[int, Cut | None]] = set()
        self.is_used = False

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """Returns the part of `rank`; inside `taken`, its copy, which is made once."""
        key = (id(parameter), cut)
        if key in self._filled:
            return self._copies[key][1].held
        part = self._read(parameter, cut, rank, name)
        if not self.is_used:
            return part
        self._wait()
        _, buffer = self._copies.setdefault(key, (parameter, LastingBuffer()))
        self._filled.add(key)
        return buffer.take(tuple(part.shape), part.dtype, part.device).copy_(part)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, `read` returns copies; their memory is released at the end."""
        self.is_used = True
        try:
            yield
        finally:
            self.is_used = False
            self._copies = {key: self._copies[key] for key in self._filled}  # the other parameters are gone
            for _, buffer in self._copies.values():
                buffer.release()
            self._filled.clear()


@contextmanager
def bound_to_copies(model: InferenceModel, gatherer: WeightGatherer, weights: LastingWeights) -> Iterator[None]:
    """Inside, containers read copies of the sharded weights, adapters fused; nothing stays gathered. Collective."""
    with weights.taken():
        try:
            with gatherer.gathered_outside_layers():
                model.bind_rest()
                model.fuse_rest()
                for layer in gatherer.stream(model.layers):
                    layer.bind()
                    layer.fuse_lora()
            yield
        finally:
            model.unfuse_lora()


@contextmanager
def bound(model: InferenceModel, gatherer: WeightGatherer, layers_at_once: int = 1) -> Iterator[None]:
    """Inside, containers read the weights that `gatherer` has gathered, adapters fused.

    If layers are streamed, only the weights outside them are bound here.

    `layers_at_once`: number of layers whose parts are in flight together, if other processes send them.
    """
    if gatherer.is_streamed:
        model.bind_rest()
    else:
        model.bind(layers_at_once)
    try:
        if gatherer.is_streamed:
            model.fuse_rest()
        else:
            model.fuse_lora()
        yield
    finally:
        model.unfuse_lora()


def pass_over_layers(model: InferenceModel, gatherer: WeightGatherer) -> Iterable[InferenceLayer]:
    """Returns the layers in order for one forward pass; streamed ones are gathered, bound and fused while in use."""
    return _streamed(model, gatherer) if gatherer.is_streamed else model.layers


def _streamed(model: InferenceModel, gatherer: WeightGatherer) -> Iterator[InferenceLayer]:
    for layer in gatherer.stream(model.layers):
        layer.bind()
        model.parallel.wait()
        layer.fuse_lora(lender=model.layers[0])
        yield layer
        layer.unfuse_lora(keeps_lent=True)


def check_parts(model: nn.Module, is_exact: bool, tp_size: int) -> None:
    """Raises ValueError if containers of `model`, which a plan has split, cannot generate in its parts; collective.

    A model without containers generates by its own `generate()`, whose hooks work on parts; in stages it cannot.
    """
    size = unit_size_of(model)
    if size == 1:
        return
    if tp_size > 1:
        raise ValueError(
            f"hybrid_engine.inference_tp_size={tp_size}: a parallel module generates on the {size} processes of a "
            "unit, by its plan; leave it out"
        )
    if is_exact:
        raise ValueError("hybrid_engine.exact: a model that a plan splits sums in parts; leave hybrid_engine.exact out")
    agree(lambda: _check_containers(model, size // num_stages_of(model)))


def _check_containers(model: nn.Module, num_parts: int) -> None:
    root = original_of(model)
    try:
        containers = InferenceModel(root, TensorParallel(size=num_parts, option=OPTION))
    except UnsupportedModelError as error:
        if root is not model:
            raise ValueError(
                f"hybrid_engine.enabled: a plan with stages, or of a graph, generates on containers, and {error}; pass "
                "lowering='eager' to ComputeConfig, or leave hybrid_engine out of the config"
            ) from error
        return
    if num_stages_of(model) > 1:
        layers_of_stages(model, root, containers)


def layers_of_stages(model: nn.Module, root: nn.Module, containers: InferenceModel) -> tuple[range, ...]:
    """Returns the layers of each stage of the plan; `containers` were built from `root`.

    Raises ValueError if rollouts cannot pass through them in the plan's stages.
    """
    num_stages = num_stages_of(model)
    paths = {id(module): path for path, module in root.named_modules()}
    ends: list[tuple[Any, int]] = [
        (containers.embedding, 0),
        (containers.position_embedding, 0),
        (containers.embedding_norm, 0),
    ]
    ends += [(containers.project_in, 0), (containers.project_out, num_stages - 1)]
    ends += [(containers.final_norm, num_stages - 1), (containers.lm_head, num_stages - 1)]
    for view, stage in ends:
        path = None if view is None else paths[id(view.module)]
        if path is not None and stage not in stages_of(model, path):
            raise ValueError(
                f"plan.stages: {path!r} is of stage {min(stages_of(model, path))}, and rollouts have it in stage "
                f"{stage}; move it there"
            )
    layers = [paths[id(layer.module)] for layer in containers.layers]
    stages = [sorted(stages_of(model, path)) for path in layers]
    for path, found in zip(layers, stages, strict=True):
        if len(found) != 1:
            raise ValueError(f"plan.stages: {path!r} lies in the stages {found}, and rollouts take it in one; join it")
    order = [found[0] for found in stages]
    counts = [order.count(stage) for stage in range(num_stages)]
    if order != sorted(order) or not all(counts):
        raise ValueError(
            f"plan.stages: the {len(layers)} layers are of the stages {order}; rollouts need at least one in each of "
            f"the {num_stages}, in their order; name the modules of each stage"
        )
    return tuple(range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(num_stages))


def share_unit(model: nn.Module, device: torch.device) -> ModelGroup:
    """Returns the group in which the processes of a unit generate from the same prompts; collective.

    Of several axes, the one that splits most is the outermost for tensor parallelism, so that the weights a process
    generates with are among those that it trains.
    """
    root, size, num_stages = original_of(model), unit_size_of(model), num_stages_of(model)
    if num_stages > 1:
        bounds = layers_of_stages(model, root, InferenceModel(root))
        group = join_stages(size // num_stages, num_stages, device, OPTION, bounds)
        group = replace(group, stage_option=OPTION)
    else:
        group = join_model_group(size, device, OPTION)
    sizes, order = split_axes_of(model)
    places = places_of_ranks(sizes, order)
    if len(sizes) > 1:
        group = group.in_order(places)
    parts = PartReader(places)
    parallel = replace(group.parallel, read=parts.read, wait=parts.wait)
    return replace(group, has_same_prompts=True, has_whole_module=root is model, parts=parts, parallel=parallel)


def computes_by(module: nn.Module) -> tuple[Any, ...]:
    """Returns a value that stays equal while `module` has the same children and the same foreign hooks and forward."""
    children = tuple(module._modules.values())
    forward = vars(module).get("forward")
    if forward is None and not module._forward_hooks and not module._forward_pre_hooks:
        return children
    functions = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if "_original_forward" not in vars(module):  # accelerate's, for mixed precision
        functions.append(forward)
    return (children, *(function for function in functions if function is not None and _has_effect(function)))


def _has_effect(function: Any) -> bool:
    function = getattr(function, "func", function)  # unwraps a functools.partial
    return not str(getattr(function, "__module__", "")).startswith(WITHOUT_EFFECT)
