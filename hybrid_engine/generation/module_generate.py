"""What stands in the place of a module's own `generate()`, as an attribute of that one module."""

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from transformers import GenerationConfig


class PutGenerate:
    """A `generate` that was put on `module`; a copy or a pickle of the module has its class's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self.module)]  # copy.deepcopy is in the middle of copying the module
        return type(copied).generate.__get__(copied)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "generate")


class GeneratingEngine(Protocol):
    """An engine around a module, with a `generate()` of its own."""

    module: nn.Module

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `HybridEngine.generate`."""


class ModuleGenerate(PutGenerate):
    """`engine.module.generate`: the engine's, with the positions and names of the arguments that the model's has.

    The module, once the engine is gone, generates by itself.
    """

    def __init__(self, engine: GeneratingEngine) -> None:
        super().__init__(engine.module)
        # Weak: a module that is kept must not keep optimizer state and KV workspace of an engine that nobody has.
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
    """`kwargs` with transformers' `inputs`, if any, under the name `input_ids`; ValueError where both are given."""
    if inputs is None:
        return kwargs
    if kwargs.get("input_ids") is not None:
        raise ValueError("generate(): inputs and input_ids are two names of the prompts; pass one of them")
    return {**kwargs, "input_ids": inputs}
