"""Python source as a tree."""

import ast
import gc


def parse_source(source: str | bytes) -> ast.Module:
    """`ast.parse` while the garbage collector rests.

    Python 3.11 and 3.12 fail with `SystemError: AST constructor recursion depth mismatch` where a collection in the
    midst of it runs code that parses too, and printing a traceback does (CPython's gh-106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
