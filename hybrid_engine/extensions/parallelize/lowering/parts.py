"""The parts of tensors that processes hold, whole tensors from parts, and checks of saved tensors and states.

The checkpoint functions use this; reducers and pipelines use `local_part`.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from hybrid_engine.extensions.parallelize.options.values import is_number, shown

WHAT = "optimizer_state_dict"
HOW_WITHOUT = "give what was saved; of one that was never stepped the state is {}"


# Lets `torch.load` read each rank's own `state_dict()` under torch 2.11; 2.12 and later do not need it.
torch.serialization.add_safe_globals([_StridedShard])


def extent(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """The position of the part of the process at `coordinate` of a mesh of `sizes`, in a tensor of `shape`.

    The axes of the plan divide the tensor first, from left to right. FSDP2 then divides those parts, which DTensor
    calls strided.
    """
    ranges = [(0, size) for size in shape]
    sharded = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]
    for axis in sorted(sharded, key=lambda axis: hasattr(placements[axis], "split_factor")):
        dim = placements[axis].dim  # type: ignore[attr-defined]
        start, stop = ranges[dim]
        length = -(-(stop - start) // sizes[axis])
        ranges[dim] = tuple(min(start + length * number, stop) for number in (coordinate[axis], coordinate[axis] + 1))
    return tuple(slice(*bounds) for bounds in ranges)


def extent_of(tensor: DTensor) -> tuple[slice, ...]:
    """The position of this process's part of a sharded tensor in the whole, also for a tensor loaded from a file."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"{mesh=} without this process"
    return extent(tensor.shape, mesh.shape, coordinate, tensor.placements)


def place_of(tensor: Tensor) -> str:
    """A description of a tensor's shape and of the part that this process holds."""
    if not isinstance(tensor, DTensor):
        return f"all of {list(tensor.shape)}"
    ranges = ", ".join(f"{part.start}:{part.stop}" for part in extent_of(tensor))
    return f"[{ranges}] of {list(tensor.shape)}"


def kind_of(dtype: torch.dtype) -> str:
    """The kind of numbers of a dtype."""
    if dtype == torch.bool:
        return "logical"
    return "complex" if dtype.is_complex else "floating-point" if dtype.is_floating_point else "whole"


def check_values(what: str, given: Tensor, live: Tensor) -> None:
    """Raises ValueError unless `given` is dense with numbers of `live`'s kind; others would be lost or rounded."""
    if given.is_meta or given.layout is not torch.strided:
        raise ValueError(f"{what} must be a dense tensor with values, not one on {given.device} of {given.layout}")
    if kind_of(given.dtype) != kind_of(live.dtype):
        raise ValueError(
            f"{what} has dtype {given.dtype} and the module has {live.dtype}: {kind_of(given.dtype)} numbers are not "
            f"{kind_of(live.dtype)} ones; give what was saved, or convert it before"
        )


def whole_of(parts: Iterable[Any]) -> Tensor:
    """The whole tensor, on the CPU, from the parts of all processes; a tensor that is not a DTensor is already whole.

    Raises ValueError if a part is missing, or if the parts have different shapes or dtypes.
    """
    listed = list(parts)
    for part in listed:
        if not isinstance(part, Tensor):
            raise ValueError(f"a process has {shown(part)} in the place of a tensor; they are of two models")
        if (part.shape, part.dtype) != (listed[0].shape, listed[0].dtype):
            found = [f"{one.dtype} of shape {list(one.shape)}" for one in (listed[0], part)]
            raise ValueError(f"parts are {found[0]} and {found[1]}; they are of two models")
    whole = next((part for part in listed if not isinstance(part, DTensor)), None)
    if whole is not None:
        return whole.detach().cpu().clone()
    whole = torch.empty(listed[0].shape, dtype=listed[0].dtype)
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    for part in listed:
        where = extent_of(part)
        whole[where] = part.to_local().detach().cpu()
        covered[where] = True
    if not covered.all():
        raise ValueError("a process's part of a tensor is missing; give the state dicts of all processes")
    return whole


def part_like(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this process holds of `like`, sharded in the same way; both have the same shape."""
    if not isinstance(like, DTensor):
        return whole.to(like.device, copy=True)
    local = whole[extent_of(like)].to(like.device, copy=True).contiguous()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def local_part(tensor: Tensor) -> Tensor:
    """This process's part, which shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Given(NamedTuple):
    """The entry of one parameter in a state dict."""

    name: str
    key: Any
    """Key of the parameter in `state`."""
    parameter: Tensor
    entries: Mapping[str, Any] | None
    """None: there is no entry, not even an empty dict."""
    group: Hashable
    """Parameters of one group with the same number of dimensions must have the same entries."""


def check_keys(state: Mapping[str, Any], names: str) -> None:
    """Raises ValueError if `state` has parameters that no group has, or if groups list a parameter twice."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    listed = [name for group in state["param_groups"] for name in group[names]]
    for found in (keys, listed):
        twice = next((one for one in found if found.count(one) > 1), None) if len(set(found)) < len(found) else None
        if twice is not None:
            raise ValueError(f"{WHAT}: parameter {twice!r} is in its groups twice; give what was saved")
    unknown = [key for key in state["state"] if key not in set(keys)]
    if unknown:
        raise ValueError(f"{WHAT}: state has {unknown[0]!r}, which is in none of its groups; give what was saved")


def check_states(found: Iterable[Given], *, parts_elsewhere: bool) -> None:
    """Raises ValueError if a parameter lacks an entry that the others have, or has one of another kind.

    With `parts_elsewhere`, None stands for a tensor that another process has.
    """
    listed = list(found)
    has_any = any(given.entries for given in listed)
    first: dict[Hashable, tuple[str, dict[str, str | None]]] = {}
    for given in listed:
        if given.entries is None and has_any:
            raise ValueError(f"{WHAT} has no state of {given.name!r}, state[{given.key!r}]; {HOW_WITHOUT}")
        if not given.entries:
            continue
        forms = {
            entry: None if value is None and parts_elsewhere else _form(given, entry, value)
            for entry, value in given.entries.items()
        }
        other, expected = first.setdefault((given.group, given.parameter.dim()), (given.name, forms))
        if forms.keys() != expected.keys():
            raise ValueError(
                f"{WHAT} has {sorted(expected)} of {other!r} and {sorted(forms)} of {given.name!r}, which are of one "
                f"group; {HOW_WITHOUT}"
            )
        for entry, form in forms.items():
            if None not in (form, expected[entry]) and form != expected[entry]:
                raise ValueError(
                    f"{WHAT}: {entry} is {expected[entry]} of {other!r} and {form} of {given.name!r}, which are of one "
                    "group; give what was saved"
                )


def _form(given: Given, entry: str, value: Any) -> str:
    """A description of the kind of value that an optimizer keeps for a parameter."""
    if isinstance(value, Tensor):
        kind = kind_of(value.dtype)
        if kind == "complex" and kind_of(given.parameter.dtype) != kind:
            raise ValueError(
                f"{WHAT}: {entry} of {given.name!r} is complex, and the parameter is not; give what was saved of it"
            )
        return f"a tensor of {kind} numbers" if value.dim() else "one number"
    return "one number" if is_number(value) else shown(value)


def check_same_optimizer(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    """Raises ValueError if an optimizer and a saved one each have options or states that the other lacks.

    If only one of them has more, it is accepted: versions of an optimizer add some, and users add their own.
    """
    of_schedulers = {"initial_lr"}
    here = sorted(ours.keys() - theirs.keys() - of_schedulers)
    there = sorted(theirs.keys() - ours.keys() - of_schedulers)
    if here and there:
        raise ValueError(
            f"{WHAT} is of another optimizer: it has {what} {there}, and this one has {here} instead; build the same"
        )
