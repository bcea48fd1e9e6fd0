"""What is behind the errors of libraries that write files: torch and safetensors wrap a full disk in their own."""

from collections.abc import Iterator

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException


def find_cause(error: BaseException) -> BaseException:
    """What is behind an error of torch's: an interruption, a system error, or a ValueError with its words."""
    causes = [cause for cause in _causes(error) if not isinstance(cause, CheckpointException)]
    for cause in causes:
        if not isinstance(cause, Exception):  # KeyboardInterrupt and its like
            return cause
    for kind in (OSError, ValueError):
        for cause in causes:
            if isinstance(cause, kind):
                return cause
    first = causes[0] if causes else error
    if isinstance(first, SafetensorError):
        return OSError(str(first))
    text = str(first).strip().splitlines()[0] if str(first).strip() else ""
    return ValueError(f"{type(first).__name__}: {text}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, what it wraps, and what it came from."""
    if error is None:
        return
    yield error
    if isinstance(error, CheckpointException):
        for wrapped, _ in error.failures.values():
            yield from _causes(wrapped)
    yield from _causes(error.__cause__ or error.__context__)
