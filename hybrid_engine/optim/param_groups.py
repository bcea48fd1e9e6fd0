"""Parameter groups by name: sharding and masters replace the parameters an optimizer was built on, but names stay.

`engine/checks.py` names the groups before the model is changed, `build.py` makes an optimizer's groups of them. Muon's
groups are here too, with the optimizer that steps them: it makes the step of a matrix nearly orthogonal, and AdamW
steps the other parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hybrid_engine.config.optimizer import MUON_RATES

NamedGroup = dict[str, Any]
"""A torch parameter group with `names` (of the module's parameters) instead of `params`."""
IN_NAMES = ("embed", "lm_head")
"""DeepSpeed's rule (`set_optimizer_flags`): AdamW steps a matrix with one of these in its name."""
HEADS = ("score", "classifier", "v_head", "value_head")
"""Names of modules at the end of a reward, value or classification model."""


def name_groups(model_parameters: Iterable[Any] | None, module: nn.Module) -> list[NamedGroup]:
    """Groups by name from parameters in any form that `torch.optim` accepts; None means all that require a gradient.

    Raises:
        ValueError: an entry is not a parameter or not one of `module`'s, a group has no parameters, or no parameter
            requires a gradient.
    """
    named = dict(module.named_parameters())
    if model_parameters is None:
        groups: list[NamedGroup] = [{"names": [name for name, param in named.items() if param.requires_grad]}]
    else:
        if not isinstance(model_parameters, Iterable):
            raise ValueError(f"model_parameters={model_parameters!r} must be parameters or groups of them; pass a list")
        names = {id(param): name for name, param in named.items()}
        groups = [_name_group(group, names) for group in _as_groups(list(model_parameters))]
    if not any(named[name].requires_grad for group in groups for name in group["names"]):
        raise ValueError(
            f"model_parameters: none of the {len(named)} parameters for the optimizer requires a gradient; "
            f"call requires_grad_() on those to be trained, or pass neither optimizer nor config['optimizer'] for an "
            f"evaluation engine"
        )
    return groups


def _as_groups(entries: list[Any]) -> list[dict[str, Any]]:
    return entries if entries and isinstance(entries[0], dict) else [{"params": entries}]


def _name_group(group: dict[str, Any], names: dict[int, str]) -> NamedGroup:
    if "params" not in group:
        raise ValueError(f'model_parameters: a group with {sorted(group)} has no "params"; name its parameters there')
    entries = group["params"]
    params = [entries] if isinstance(entries, torch.Tensor) else list(entries)
    params = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    for index, param in enumerate(params):
        if not isinstance(param, torch.Tensor):
            raise ValueError(
                f"model_parameters: entry {index} of a group is a {type(param).__name__}, it must be a parameter; pass "
                f"model.parameters() or groups of them"
            )
        if id(param) not in names:
            raise ValueError(
                f"optimizer or model_parameters: parameter {index} of a group, of shape {tuple(param.shape)}, is not a "
                f"parameter of the model; use model.parameters() of the very model given to initialize()"
            )
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {**options, "names": [names[id(param)] for param in params]}


def build_groups(groups: list[NamedGroup], masters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """The groups for a new optimizer, on the masters; frozen parameters do not have one and are left out."""
    return [
        {
            **{key: value for key, value in group.items() if key != "names"},
            "params": [masters[name] for name in group["names"] if name in masters],
        }
        for group in groups
    ]


def repoint_groups(
    optimizer: torch.optim.Optimizer, groups: list[NamedGroup], masters: dict[str, nn.Parameter]
) -> None:
    """Makes an existing optimizer step the masters, in place, so that a scheduler built on it keeps working.

    The state that it was built with is moved to the masters too.
    """
    replaced = {}
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        pairs = zip(group["params"], named["names"], strict=True)
        pairs_of_group = {param: masters[name] for param, name in pairs if name in masters}
        replaced.update(pairs_of_group)
        group["params"] = list(pairs_of_group.values())
        group.pop("param_names", None)
    carry_state(optimizer, replaced)


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` has state of steps; also True if its state does not count steps."""
    return any(float(entry.get("step", 1)) != 0 for entry in optimizer.state.values())


@torch.no_grad()
def carry_state(optimizer: torch.optim.Optimizer, masters: dict[nn.Parameter, nn.Parameter]) -> None:
    """Moves the state of parameters to their masters, in the masters' dtype, device and sharding; local.

    Args:
        optimizer: its groups hold the masters, its state still the parameters; the state of others is dropped.
        masters: the master of each parameter.
    """
    if not optimizer.state or all(param is master for param, master in masters.items()):
        return
    state = dict(optimizer.state)
    optimizer.state.clear()
    for param, entry in state.items():
        if param in masters:
            master = masters[param]
            optimizer.state[master] = {
                key: _shard(value, master) if _is_like(value, param) else value for key, value in entry.items()
            }
    optimizer.load_state_dict(optimizer.state_dict())  # casts and moves each entry to the form its optimizer needs


def _is_like(value: Any, param: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _shard(value: torch.Tensor, master: Any) -> torch.Tensor:
    if not isinstance(master, DTensor) or isinstance(value, DTensor):
        return value
    mesh = master.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, master.placements, src_data_rank=None)


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
