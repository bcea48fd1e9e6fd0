"""The annotations of the ops that traced models are made of; whoever has another registers it (`register_op`)."""

from hybrid_engine.extensions.parallelize.library import entries, layers, shapes
from hybrid_engine.extensions.parallelize.library.entries import LIBRARY, Rule, is_annotated, op_name, rule_for

__all__ = [
    "LIBRARY",
    "Rule",
    "elementwise",
    "is_annotated",
    "layers",
    "op_name",
    "products",
    "recurrent",
    "rule_for",
    "shapes",
]
