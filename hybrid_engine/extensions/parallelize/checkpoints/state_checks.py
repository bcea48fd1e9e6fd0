"""Whether the state of an optimizer is whole, and what an optimizer of these parameters can go on with."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hybrid_engine.extensions.parallelize.checkpoints.parts import kind_of
from hybrid_engine.extensions.parallelize.values import is_number, shown

WHAT = "optimizer_state_dict"
HOW_WITHOUT = "give what was saved; of one that was never stepped the state is {}"


class Given(NamedTuple):
    """What a state dict has of one parameter."""

    name: str
    key: Any
    """By which `state` has it."""
    parameter: Tensor
    entries: Mapping[str, Any] | None
    """None: nothing, not even an empty dict."""
    group: Hashable
    """Parameters of one group and as many dimensions have the same entries."""


def check_keys(state: Mapping[str, Any], names: str) -> None:
    """ValueError where `state` is of parameters that no group has, or groups have the same one twice."""
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
    """ValueError where one parameter lacks what the others have, or has it of another kind.

    With `parts_elsewhere` None stands for a tensor that another process has.
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
    """What kind of a thing an optimizer keeps of a parameter, in words."""
    if isinstance(value, Tensor):
        kind = kind_of(value.dtype)
        if kind == "complex" and kind_of(given.parameter.dtype) != kind:
            raise ValueError(
                f"{WHAT}: {entry} of {given.name!r} is complex, and the parameter is not; give what was saved of it"
            )
        return f"a tensor of {kind} numbers" if value.dim() else "one number"
    return "one number" if is_number(value) else shown(value)


def check_same_optimizer(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> None:
    """ValueError where each of an optimizer's and a saved one's options, or states, has some that the other lacks.

    Releases of one optimizer add some, and users their own.
    """
    of_schedulers = {"initial_lr"}
    here = sorted(ours.keys() - theirs.keys() - of_schedulers)
    there = sorted(theirs.keys() - ours.keys() - of_schedulers)
    if here and there:
        raise ValueError(
            f"{WHAT} is of another optimizer: it has {what} {there}, and this one has {here} instead; build the same"
        )
