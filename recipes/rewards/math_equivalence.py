"""Whether two texts mean the same in mathematics, by the library math-verify: `\\frac{1}{2}` and 0.5 do."""

import logging
from collections.abc import Callable

from hybrid_engine.recipes.rewards.time_limit import OutOfTime, within


def load_math_equivalence(spec: str, seconds: float) -> Callable[[str, str], bool]:
    """Compares a response with a reference; what takes longer than `seconds` is not the same.

    The function raises ValueError for a reference that holds no mathematics.

    Raises:
        ValueError: math-verify is not installed, with how to install it.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(
            f"--reward={spec!r} needs the library math-verify, which is not installed ({error}); install it with "
            "pip install 'hybrid-engine[math]'"
        ) from error
    # It warns that no limit of its own is set; ours is, and holds in threads too.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def is_equal(text: str, reference: str) -> bool:
        marked = reference if "$" in reference or "\\boxed" in reference else f"${reference}$"
        right = parse(marked, parsing_timeout=None)
        if not right:
            raise ValueError("holds no mathematics that math-verify can read")
        try:
            return within(seconds, lambda: verify(right, parse(text, parsing_timeout=None), timeout_seconds=None))
        except OutOfTime:
            return False

    return is_equal
