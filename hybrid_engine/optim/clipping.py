"""Which gradients are clipped by one norm: all of them, but for groups of parameters that ask to be clipped apart."""

from typing import Any

from hybrid_engine.zero.trained_parameter import TrainedParameter

APART = "clips_apart"
"""Option of a parameter group: True clips its gradients by their own norm, as if an optimizer had them alone."""


def clipped_together(groups: list[dict[str, Any]], parameters: list[TrainedParameter]) -> list[list[TrainedParameter]]:
    """`parameters` in lists that are clipped by one norm each: the first has what no group keeps apart."""
    apart = [{id(param) for param in group["params"]} for group in groups if group.get(APART)]
    rest = [t for t in parameters if not any(id(t.master) in ids for ids in apart)]
    return [rest, *([t for t in parameters if id(t.master) in ids] for ids in apart)]
