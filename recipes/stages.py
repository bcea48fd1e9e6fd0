"""What the three stages share: seeds, checks of options, and folders that are either complete or absent."""

import hashlib
import math
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from hybrid_engine.recipes.run_log import say
from hybrid_engine.zero.processes import on_rank_zero


def seed_everything(seed: int) -> None:
    """Seeds Python's and torch's generators, alike on every process."""
    random.seed(seed)
    torch.manual_seed(seed)


def check_finite(name: str, value: float) -> None:
    """ValueError if `value` of option `name` is infinite or not a number."""
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite; give a number")


def check_at_least(name: str, value: float, smallest: float) -> None:
    """ValueError unless `value` of option `name` is finite and reaches `smallest`."""
    check_finite(name, value)
    if value < smallest:
        raise ValueError(f"{name}={value} must be at least {smallest}; raise it")


def check_above(name: str, value: float, bound: float) -> None:
    """ValueError unless `value` of option `name` is finite and above `bound`."""
    check_finite(name, value)
    if value <= bound:
        raise ValueError(f"{name}={value} must be above {bound}; raise it")


def check_between(name: str, value: float, smallest: float, largest: float) -> None:
    """ValueError unless `value` of option `name` is one of `smallest` to `largest`, both included."""
    if not smallest <= value <= largest:
        raise ValueError(f"{name}={value} must be from {smallest} to {largest}; choose a number in that range")


def check_divides(name: str, value: int, divisor: int) -> None:
    """ValueError unless `value` of option `name` is a positive multiple of `divisor`."""
    if value < 1 or value % divisor:
        raise ValueError(
            f"{name}={value} must be a positive multiple of {divisor}; use {-(-max(value, 1) // divisor) * divisor}"
        )


def is_finished(folder: Path, restart: bool) -> bool:
    """Whether a stage left `folder` complete and may be skipped; with `restart` the folder is removed instead."""

    def look() -> bool:
        if restart:
            shutil.rmtree(folder, ignore_errors=True)
        return folder.exists()

    found = on_rank_zero(look)
    if found:
        say(f"{folder} is there: this stage is not run again (--restart does)")
    return found


def save_stage(engine: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes model and tokenizer as a Hugging Face folder that gets its name only when complete; collective."""
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    on_rank_zero(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    engine.save_16bit_model(unfinished)

    def publish() -> None:
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    on_rank_zero(publish)


def load_model(auto_class: Any, source: str | Path, **options: Any) -> nn.Module:
    """`auto_class.from_pretrained(source)` in fp32 with every dropout probability of its config set to 0.

    Dropout would make the log-probabilities of two passes over the same weights differ.
    """
    config = AutoConfig.from_pretrained(source, **options)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return auto_class.from_pretrained(source, config=config, dtype=torch.float32)


def score_head(classifier: nn.Module, option: str, source: str | Path) -> nn.Linear:
    """The head `score` of a sequence classifier that was loaded from `source`; ValueError, naming `option`, without."""
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{option}={str(source)!r} loads as {type(classifier).__name__}, which has no linear head named score; "
            "use a causal model family (such as Llama, Qwen2 or GPT-2)"
        )
    return head


def load_tokenizer(folder: str | Path, option: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer of a model, set to pad on the left; one without a pad token pads with its end-of-sequence token.

    That is safe here because padding is told from lengths, not from token ids.

    Raises:
        ValueError: naming `option`: nothing loads, the vocabulary is empty or there is no end-of-sequence token.
    """
    given = f"{option}={str(folder)!r}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:  # a folder without a tokenizer raises either, by the model's family
        raise ValueError(f"{given} must be a Hugging Face folder or name that loads: {error}") from error
    tokenizer.padding_side = "left"
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"{given} must hold a tokenizer and encodes text to no tokens; save the model's tokenizer there"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{given} has a tokenizer without eos_token; responses could not end: set one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def mix_seed(seed: int, index: int) -> int:
    """A seed for part `index` of a run; 32 bits, which is all that torch's generator on the CPU takes of a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "big")
