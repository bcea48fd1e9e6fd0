"""What an action raises, as the words that a test compares between processes."""

from collections.abc import Callable


def message(action: Callable[[], object], kind: type[Exception] = Exception) -> str:
    """The words of the error of `kind` that `action` raises; empty where it raises none."""
    try:
        action()
    except kind as error:
        return str(error)
    return ""
