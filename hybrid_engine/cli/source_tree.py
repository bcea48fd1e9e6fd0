"""Parses Python source into a tree."""

import ast
import gc


def parse_source(source: str | bytes) -> ast.Module:
    """`ast.parse` with the garbage collector disabled.

    Python 3.11 and 3.12 fail with `SystemError: AST constructor recursion depth mismatch` if a collection during the
    parse runs code that parses too, such as printing a traceback (CPython's gh-106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
