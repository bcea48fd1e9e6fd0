"""The annotations of the ops that traced models are made of; whoever has another registers it (`register_op`)."""

from hybrid_engine.parallel.graph.library import elementwise, layers, products, shapes
from hybrid_engine.parallel.graph.library.entries import LIBRARY, Rule, op_name, rule_for

__all__ = ["LIBRARY", "Rule", "elementwise", "layers", "op_name", "products", "rule_for", "shapes"]
