"""What PyTorch prints by itself of a module that it cannot trace, which the error that is raised says in a line."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any

LOGGERS = (
    "torch._export.non_strict_utils",
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
    "torch.fx.experimental.symbolic_shapes",
)
PARTIAL_GRAPH = "def forward(self, arg"
"""How code begins that torch.export prints of what it has traced until an error."""


@contextmanager
def only_our_words() -> Iterator[None]:
    """While a module is traced: no warning but of state that a forward pass keeps, none of PyTorch's own reports.

    What was asked for by TORCH_LOGS below the level of warnings, and what the module itself prints, is there as ever.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", "forward sets the attributes")
        for logger in map(logging.getLogger, LOGGERS):
            logger.addFilter(_is_no_warning)
            stack.callback(logger.removeFilter, _is_no_warning)
        stream: Any = _WithoutGraphs(sys.stderr)
        stack.enter_context(redirect_stderr(stream))
        yield


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno < logging.WARNING


class _WithoutGraphs:
    """A stream that graphs are left out of, with the end of line that `print` writes after each."""

    def __init__(self, stream: Any):
        self._stream, self._is_left_out = stream, False

    def write(self, text: str) -> int:
        """Writes all but a graph."""
        was_left_out, self._is_left_out = self._is_left_out, text.lstrip().startswith(PARTIAL_GRAPH)
        is_end = was_left_out and text == "\n"
        if not self._is_left_out and not is_end:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
