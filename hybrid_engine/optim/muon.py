"""DeepSpeed's optimizer type `Muon`: torch.optim.Muon steps hidden matrices, torch.optim.AdamW all other parameters.

`engine/checks.py` splits the groups, and `optim/build.py` builds the optimizer. Muon makes the step of a matrix nearly
orthogonal (Newton-Schulz), for which it needs the whole matrix: `optim/plain_steps.py` gathers one at a time, and steps
shards of the parameters of AdamW.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hybrid_engine.config.optimizer import MUON_RATES
from hybrid_engine.optim.param_groups import NamedGroup

IN_NAMES = ("embed", "lm_head")
"""DeepSpeed's rule (`set_optimizer_flags`): AdamW steps a matrix with one of these in its name."""
HEADS = ("score", "classifier", "v_head", "value_head")
"""Names of modules at the end of a reward, value or classification model."""


class MuonWithAdamW(torch.optim.Optimizer):
    """One optimizer whose groups' `use_muon` selects the class of torch.optim that steps them.

    Args:
        groups: parameter groups with `use_muon` and the options of that class.

    Raises:
        ValueError: a group of Muon has a parameter that is not a matrix.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        list(self._parts())  # fills in the options that the groups lack, and checks them

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts():
            part.step()
        return loss

    def _parts(self) -> Iterator[torch.optim.Optimizer]:
        """Both classes, on the groups and the state of this optimizer; they hold no other state."""
        kinds: list[tuple[bool, Any]] = [(True, torch.optim.Muon), (False, torch.optim.AdamW)]
        for use_muon, kind in kinds:
            groups = [group for group in self.param_groups if group["use_muon"] is use_muon]
            if groups:
                part = kind(groups)
                part.state = self.state
                yield part


def split_groups(groups: list[NamedGroup], module: nn.Module, params: dict[str, Any]) -> list[NamedGroup]:
    """Splits each group into up to two, for Muon and AdamW. A group's options override those of `optimizer.params`.

    Args:
        groups: the parameters to step, by name; `use_muon` of a group decides for all of it.
        module: the module that has these names.
        params: `optimizer.params`, already checked. `muon_lr` and `adam_lr` win over `lr`.

    Raises:
        ValueError: Muon would step nothing.
    """
    hidden = hidden_matrices(module)
    split = []
    for group in groups:
        for use_muon in (True, False):
            names = [name for name in group["names"] if group.get("use_muon", name in hidden) is use_muon]
            if names:
                split.append({**_options(params, use_muon), **group, "names": names, "use_muon": use_muon})
    if not any(group["use_muon"] for group in split):
        raise ValueError(
            'optimizer.type="Muon" steps matrices of hidden layers, and no parameter of the optimizer is one; write '
            '"AdamW"'
        )
    return split


def _options(params: dict[str, Any], use_muon: bool) -> dict[str, Any]:
    name = "muon_lr" if use_muon else "adam_lr"
    options = {"lr": params.get(name, params.get("lr", MUON_RATES[name])), "weight_decay": params["weight_decay"]}
    if use_muon:
        return {**options, "momentum": params["momentum"]}
    return {**options, "betas": params["betas"], "eps": params["eps"], "fused": True}


def hidden_matrices(module: nn.Module) -> set[str]:
    """The names of the trained two-dimensional parameters outside of embeddings and heads."""
    outside = {id(param) for part in _ends(module) for param in part.parameters()}
    return {
        name
        for name, param in module.named_parameters()
        if param.requires_grad
        and param.ndim == 2
        and id(param) not in outside
        and not any(word in name.lower() for word in IN_NAMES)
        and not set(HEADS).intersection(name.split("."))
    }


def _ends(module: nn.Module) -> Iterator[nn.Module]:
    """Embeddings by class, such as GPT-2's `wte`, and the output embeddings that transformers' models name."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield part
        head = getattr(part, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            yield head
