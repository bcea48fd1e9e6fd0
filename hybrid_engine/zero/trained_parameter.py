"""A trained parameter in its two forms: the one that the module computes with, and the one that is stepped."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class TrainedParameter:
    """A parameter as the module computes with it and as the optimizer steps it."""

    name: str
    """The parameter's name in the module."""
    param: nn.Parameter
    """In the module's dtype; a DTensor when sharded."""
    master: nn.Parameter
    """`param` itself when that has the masters' dtype and device, otherwise such a copy, sharded alike."""

    @property
    def has_master(self) -> bool:
        return self.master is not self.param

    @property
    def grad_lies_like_masters(self) -> bool:
        """Whether the parameter's gradient has the dtype and the device of the master and the master has none yet."""
        grad, master = self.param.grad, self.master
        return grad is not None and master.grad is None and (grad.dtype, grad.device) == (master.dtype, master.device)
