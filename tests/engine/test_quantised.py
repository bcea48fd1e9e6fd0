"""Bases in 4 and 8 bits, in a Python of its own that finds bitsandbytes and torchao beside the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hybrid_engine
from hybrid_engine.engine import checks
from hybrid_engine.optim.build import check_quantised
from tests.support.paths import ROOT
from tests.support.training_reference import tiny_llama

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
        str(ROOT / "tests/support/quantised_models.py"),
    ]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-6000:]


class Params4bit(torch.nn.Parameter):
    """Named as bitsandbytes names its packed weights, by which they are known."""


def test_quantised_weights_are_refused_by_name_on_several_processes(monkeypatch):
    model = tiny_llama()
    check_quantised(model, is_wrapped=True)
    model.model.layers[1].mlp.up_proj.weight = Params4bit(model.model.layers[1].mlp.up_proj.weight.detach(), False)
    check_quantised(model, is_wrapped=False)
    monkeypatch.setattr(checks, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight is quantized: .* train it on one process"):
        hybrid_engine.initialize(model=model, config={"train_batch_size": 2, "optimizer": {"type": "AdamW"}})
