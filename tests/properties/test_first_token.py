"""A reader of `generate()` follows one path: few files have a part in it up to the first sampled token."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_engine
from hybrid_engine.ops import SampleOp, dispatch
from tests.support.paths import ROOT

MOST_FILES = 25
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "hybrid_engine": {"enabled": True},
}
PRODUCT = ("hybrid_engine", "containers", "ops")


class FilesUntilSampled:
    """Product files in which a function was called before the first token was sampled; a profiler of `sys`."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return" and code is SampleOp.__call__.__code__:
            sys.setprofile(None)
        path = Path(code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
            self.names.add(path.relative_to(ROOT).as_posix())


def test_the_first_token_of_a_rollout_comes_through_few_files(monkeypatch):
    # As on a machine without a GPU: neither references nor interpreted kernels.
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, pad_token_id=0, **SIZES))
    engine, *_ = hybrid_engine.initialize(model=model, config=CONFIG)
    engine.eval()
    files = FilesUntilSampled()
    sys.setprofile(files)
    try:
        engine.generate(torch.randint(1, 64, (2, 5)), max_new_tokens=2, do_sample=True)
    finally:
        sys.setprofile(None)
    assert "hybrid_engine/generation/step.py" in files.names and "ops/sample.py" in files.names
    assert len(files.names) <= MOST_FILES, "\n".join(sorted(files.names))
