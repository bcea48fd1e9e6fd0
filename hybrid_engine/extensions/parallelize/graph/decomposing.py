"""Ops made of others, of which nobody wrote how they split, are opened into those that they are made of.

`cosine_similarity` becomes products and sums, `instance_norm` a batch norm: as PyTorch itself computes them.
"""

import torch
from torch.export import ExportedProgram, default_decompositions

from hybrid_engine.extensions.parallelize.graph.library import is_annotated


def open_composites(exported: ExportedProgram) -> ExportedProgram:
    """The program without composite ops that have no annotation; the very same where there are none."""
    before: set[torch._ops.OpOverload] = set()
    while (composites := _composites(exported)) and composites != before:
        table = default_decompositions()
        # Views are not in the table: they are opened in any case.
        exported = exported.run_decompositions({op: table[op] for op in composites if op in table})
        before = composites
    return exported


def _composites(exported: ExportedProgram) -> set[torch._ops.OpOverload]:
    """The composite ops of the program that nobody annotated."""
    ops = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    known = {op for op in ops if isinstance(op, torch._ops.OpOverload)}
    return {op for op in known if not is_annotated(op) and _is_composite(op)}


def _is_composite(op: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
