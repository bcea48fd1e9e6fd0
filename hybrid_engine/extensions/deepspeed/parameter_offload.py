"""`optimizer.parameter_offload`: what libraries read of DeepSpeed's stage 3 optimizer.

TRL's `unwrap_model_for_generation` takes DeepSpeed's hooks off a gathered model, because they would gather and free
each parameter again, and puts them back. Here a gathered model generates as it is: there is nothing to take off.
"""

from typing import Any


class WithoutParameters:
    """Stands for the module whose parameters have records of the hooks to clear: none has."""

    def named_parameters(self, recurse: bool = True) -> list[tuple[str, Any]]:
        """No parameters: none has records of hooks."""
        return []

    def ds_external_parameters(self) -> list[tuple[str, Any]]:
        """No parameters: none has records of hooks."""
        return []


class ParameterOffload:
    """DeepSpeed's names for hooks that gather parameters; there are none here."""

    def __init__(self) -> None:
        self.module = WithoutParameters()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Does nothing: there are no hooks to put back."""
