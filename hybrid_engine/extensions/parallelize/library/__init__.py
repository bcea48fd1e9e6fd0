"""The annotations of the ops that traced models consist of; `register_op` adds more."""

# The modules fill LIBRARY when they are imported.
from hybrid_engine.extensions.parallelize.library import layers, shapes  # noqa: F401
from hybrid_engine.extensions.parallelize.library.entries import LIBRARY, Rule, is_annotated, op_name, rule_for

__all__ = ["LIBRARY", "Rule", "is_annotated", "op_name", "rule_for"]
