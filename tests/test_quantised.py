"""Bases in 4 and 8 bits, in a Python of its own that finds bitsandbytes and torchao beside the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(sys.prefix) / "quantised"
"""Where `make test` puts them: inside the environment every process would wait for their import."""


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="`make quantised` has put no bitsandbytes and torchao beside .venv")
def test_models_in_4_and_8_bits_train_and_roll_out():
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).parent / "quantised_models.py"),
    ]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-6000:]
