"""Where the repository, its documentation and the tests' data lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data"
DOCS = ROOT / "docs"
