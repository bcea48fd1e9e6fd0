"""The options in a reward's spec: `number:column=solution,tolerance=0.01`."""

import math
from collections.abc import Mapping


class SpecOptions:
    """`name=value` pairs behind the colon of a spec, on top of their defaults.

    A value ends at a comma and may hold `=`.
    """

    def __init__(self, spec: str, given: str, defaults: Mapping[str, str | float]):
        """Raises ValueError for what is no pair, or names an option that is not among `defaults`."""
        self._spec = spec
        self._values: dict[str, str | float] = dict(defaults)
        for pair in given.split(",") if given else []:
            name, equals, value = pair.partition("=")
            if not equals or name not in defaults:
                raise ValueError(
                    f"--reward={spec!r}: {pair!r} is no option of it; write name=value with one of "
                    f"{', '.join(defaults)}, and a comma between two"
                )
            self._values[name] = value

    def text(self, name: str) -> str:
        """The option as it stands."""
        return str(self._values[name])

    def number(self, name: str, smallest: float = -math.inf) -> float:
        """The option as a finite number; ValueError unless it is one and reaches `smallest`."""
        try:
            number = float(self._values[name])
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < smallest:
            rule = "a number" if smallest == -math.inf else f"a number of at least {smallest:g}"
            raise ValueError(f"--reward={self._spec!r}: {name}={self._values[name]!r} must be {rule}; fix it")
        return number
