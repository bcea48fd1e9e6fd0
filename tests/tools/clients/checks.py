"""What the scripts of all clients share: each of their checks is told on a line of its own, as pytest's are.

A script runs in its client's own environment, which has nothing of this project.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ.get("SERVED_URL", "")
"""Where `hybrid-engine serve` listens, with `/v1`; set by run.py."""
MODEL = "tiny"
QUESTION = [{"role": "user", "content": "Where is it warm?"}]
CITIES = ["Paris", "Rome"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": CITIES}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


def run_checks(names: dict[str, Any]) -> None:
    """Runs all functions `check_*` among a script's `names`; exits with 1 where one raises."""
    checks: list[Callable[[], None]] = [value for name, value in names.items() if name.startswith("check_")]
    failed = [check for check in checks if not is_passed(check)]
    sys.exit(bool(failed))


def is_passed(check: Callable[[], None]) -> bool:
    """Whether `check` raises nothing; says so."""
    try:
        check()
    except Exception:
        traceback.print_exc()
        print(f"FAILED {check.__name__}", flush=True)
        return False
    print(f"PASSED {check.__name__}", flush=True)
    return True
