"""docs/soak.md, of which each program writes its own section."""

import os
import platform
import re
import subprocess
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "soak.md"
HEAD = """# The server under load

Written by `make soak` and `make fuzz-serving`, each its own section; what they send and what counts as a failure stands
at the top of `tests/tools/soak.py` and `tests/tools/fuzz_serving.py`.
"""


def write_section(heading: str, text: str, page: Path = PAGE) -> None:
    """Puts a section in the place of the one with that heading, or at the page's end."""
    before = page.read_text() if page.exists() else HEAD
    head, *sections = re.split(r"(?m)^## ", before)
    kept = [section for section in sections if not section.startswith(f"{heading}\n")]
    parts = [head or HEAD, *(f"## {section}" for section in kept), f"## {heading}\n\n{text}"]
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def table(headings: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A Markdown table."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def machine() -> str:
    """What ran: commit, device and versions."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"Commit {commit}, CPU with {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}."
    )
