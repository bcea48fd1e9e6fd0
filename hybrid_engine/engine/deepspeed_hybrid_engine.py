"""`deepspeed.runtime.hybrid_engine`: the hybrid engine with the private attributes that training code and tests read.

They are computed when they are read: adapters come and go, and `create_inference_containers()` builds new ones. Lists
by layer are empty where the model has no containers. Parameters are the model's own objects, sharded under ZeRO-3.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.model import find_decoder
from hybrid_engine.containers.views import active_adapters, carries_lora
from hybrid_engine.engine.deepspeed_engine import DeepSpeedEngine
from hybrid_engine.engine.hybrid_engine import HybridEngine


class DeepSpeedHybridEngine(HybridEngine, DeepSpeedEngine):
    """HybridEngine with what else DeepSpeed's answers to; `initialize()` builds one where the config enables it."""

    @property
    def Z3_enabled(self) -> bool:
        """Whether the parameters are sharded."""
        return self.zero_optimization_partition_weights()

    @property
    def gather_all_layers(self) -> bool:
        """`hybrid_engine.pin_parameters`: whether the whole weights are gathered once around `generate()`."""
        return self.config.hybrid_engine.pin_parameters

    @property
    def is_lora_fused(self) -> bool:
        """Whether the containers see adapters fused into their weights now."""
        return any(linear.is_fused for layer in self._inference_containers for linear in layer.linears)

    @property
    def all_layers_params(self) -> list[nn.Parameter]:
        """Every parameter of the module, adapters included."""
        return list(self.module.parameters())

    @property
    def layer_params(self) -> list[list[nn.Parameter | None]]:
        """Per layer: weight and bias of the MLP's norm, those of attention's norm, then all others except adapters.

        None where the layer has no such norm or the norm no bias.
        """
        pairs = zip(self._inference_containers, self._layers(), strict=True)
        return [_layer_params(container, layer) for container, layer in pairs]

    @property
    def lora_params(self) -> list[list[list[Any]]]:
        """Per layer: `[right, left, scaling]` of each active adapter.

        As they are stored: right `[in, r]` and left `[r, out]` of modules that carry them, right `[r, in]` and left
        `[out, r]` of peft's.
        """
        return [_lora_params(layer) for layer in self._layers()]

    @property
    def layer_lora_params(self) -> list[list[nn.Parameter]]:
        """Per layer: right and left of each active adapter."""
        return [[factor for right, left, _ in adapters for factor in (right, left)] for adapters in self.lora_params]

    @property
    def all_lora_params(self) -> list[nn.Parameter]:
        """Right and left of each active adapter of all layers."""
        return [factor for factors in self.layer_lora_params for factor in factors]

    @property
    def _inference_containers(self) -> list[InferenceLayer]:
        model = self.generator.model
        return [] if model is None else model.layers

    @property
    def _generate(self) -> Callable[..., Any]:
        """The module's own `generate()`, as it was before the engine put its own there."""
        module = self.module
        return type(module).generate.__get__(module)

    def _layers(self) -> list[nn.Module]:
        model = self.generator.model
        return [] if model is None else list(find_decoder(model.base, model.base.config.get_text_config())[1])


def _layer_params(container: InferenceLayer, layer: nn.Module) -> list[nn.Parameter | None]:
    norms = [view.module if view else None for view in (container.mlp_norm, container.attention_norm)]
    first = [getattr(norm, name, None) for norm in norms for name in ("weight", "bias")]
    others = [p for name, p in layer.named_parameters() if "lora_" not in name and all(p is not q for q in first)]
    return [*first, *others]


def _lora_params(layer: nn.Module) -> list[list[Any]]:
    adapted = [module for module in layer.modules() if carries_lora(module) or hasattr(module, "lora_A")]
    adapters = [adapter for module in adapted for adapter in active_adapters(module, type(module).__name__)]
    return [[adapter.right, adapter.left, adapter.scale] for adapter in adapters]
