"""Triton's interpreter without what it does again for each call of a function inside a kernel.

For a kernel it puts its own functions into `triton.language`, and takes them out at the end; for each function that the
kernel calls it puts the same ones there once more, which is over a third of the time of our kernels. Where this Triton
does it otherwise nothing is changed.
"""

import inspect
from functools import cache

import triton.language as tl
from triton.runtime import interpreter


class _PatchedOnce:
    """Stands for `interpreter._patch_lang`."""

    def __init__(self, patch) -> None:
        self._patch = patch
        self._patched = frozenset()
        """The ids of the modules that have the interpreter's functions now."""

    def __call__(self, function):
        wanted = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if wanted and wanted <= self._patched:
            return interpreter._LangPatchScope()
        scope, before = self._patch(function), self._patched
        self._patched = before | wanted
        restore = scope.restore

        def restore_all():
            self._patched = before
            restore()

        scope.restore = restore_all
        return scope


@cache
def install() -> None:
    """Makes interpreted kernels faster in this process."""
    if hasattr(interpreter, "_LangPatchScope") and list(inspect.signature(interpreter._patch_lang).parameters) == [
        "fn"
    ]:
        interpreter._patch_lang = _PatchedOnce(interpreter._patch_lang)
