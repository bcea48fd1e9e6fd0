"""Settings every test runs under: no network, few threads, and helpers beside the tests importable."""

import os
import sys
from pathlib import Path

# Before transformers or datasets are imported; spawned processes inherit it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# `from distributed import run_distributed`: spawned processes find a worker by its module, so the path must reach them.
sys.path.insert(0, str(Path(__file__).parent))

# The tests' tensors are tiny: more threads than cores only make them wait for each other.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(2, os.cpu_count() or 1))))
