"""Tiny models of single characters and prompts for them, for recipes that learn from their own answers."""

import json
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_engine.rlhf.tasks.corpus import build_small_llama


def save_small_actor(folder: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """A model from nothing with its tokenizer, in a folder that recipes load."""
    torch.manual_seed(0)
    build_small_llama(tokenizer, hidden_size=64, num_layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_sums(folder: Path) -> str:
    """A file of 80 additions with their answers."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(80)))
    return str(path)
