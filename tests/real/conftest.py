"""The real model: SmolLM2-135M-Instruct where `make real` writes it, or the folder that REAL_MODEL names."""

import os
from pathlib import Path

import pytest

WRITTEN = Path(__file__).parents[2] / ".venv" / "smollm2"


@pytest.fixture(scope="session")
def real_model():
    """The model's folder, for options and for `from_pretrained`."""
    folder = Path(os.environ.get("REAL_MODEL", WRITTEN))
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"{folder} holds no model; make real writes it")
    return str(folder)
