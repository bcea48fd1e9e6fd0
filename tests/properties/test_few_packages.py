"""Training and generating need PyTorch, transformers and Triton; what else is installed serves single features."""

import subprocess
import sys

# A machine lent for an hour has what it has, and no network.
FEATURES_ONLY = ("accelerate", "datasets", "matplotlib", "peft", "psutil", "scipy")
SCRIPT = f"""
import sys
from importlib.machinery import PathFinder

ABSENT = {FEATURES_ONLY!r}

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without

import torch, hybrid_engine
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
config = {{"train_batch_size": 1, "optimizer": {{"type": "AdamW"}}, "hybrid_engine": {{"enabled": True}}}}
engine, *_ = hybrid_engine.initialize(model=LlamaForCausalLM(LlamaConfig(**sizes)), config=config)
tokens = engine.eval().generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
engine.train()
engine.backward(engine(input_ids=tokens, labels=tokens).loss)
engine.step()
print(engine.report())
"""


def test_an_engine_trains_and_generates_without_the_packages_of_single_features():
    # A Python of its own: transformers decides at its import what it takes from accelerate.
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "LlamaDecoderLayer" in result.stdout
