"""Reads a reward model that is an adapter and a head on the base of a run, as saved by stage `reward` or by peft."""

import copy
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from safetensors.torch import load_file
from torch import nn

from hybrid_engine.config.checks import check_number
from hybrid_engine.rlhf.runs.model_card import ADAPTER
from hybrid_engine.rlhf.runs.stages import explained, load_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD = "score.weight"


@dataclass(frozen=True, kw_only=True)
class RewardAdapter:
    """An adapter and a head for the base."""

    source: str
    """The value of `--reward`, for errors."""
    config: LoraConfig
    """Config for a causal model with the same body."""
    weights: dict[str, torch.Tensor]
    """Weights of the adapter, by peft's names."""
    head: nn.Linear
    """Head from hidden states to the normalized score."""


def find_adapter(spec: str) -> Path | None:
    """The folder of the adapter that `--reward=spec` names or contains; None if there is none."""
    folders = [Path(spec), Path(spec) / ADAPTER]
    return next((folder for folder in folders if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()), None)


def check_reward_adapter(spec: str, base: str) -> None:
    """Checks that the reward model `spec` is an adapter on the model `base`; reads no weights.

    Raises:
        ValueError: it has no adapter, or one on another base, of another kind than LoRA, or without a head `score`.
    """
    folder = find_adapter(spec)
    if folder is None:
        raise ValueError(
            f"--shared-base: --reward={spec!r} has no adapter of its own, and all roles stand on one base; train one "
            f"by `hybrid-engine reward --model {base} --lora-rank 8`, or leave --shared-base out"
        )
    with explained("reward", folder):
        config = PeftConfig.from_pretrained(str(folder))
    found = str(config.base_model_name_or_path)
    if found != base and Path(found).resolve() != Path(base).resolve():
        raise ValueError(
            f"--shared-base: the adapter of --reward={spec!r} stands on {found!r}, and the actor's base is {base!r}; "
            "train the reward on that base, or fix base_model_name_or_path in its adapter_config.json"
        )
    if not isinstance(config, LoraConfig) or "score" not in (config.modules_to_save or []):
        raise ValueError(
            f"--shared-base: the adapter of --reward={spec!r} must be LoRA with a head named score, as `hybrid-engine "
            f"reward --lora-rank 8` leaves it; it is {type(config).__name__} with {config.modules_to_save or 'no head'}"
        )


def read_reward_adapter(spec: str) -> RewardAdapter:
    """The adapter of the reward model `spec`, which passed `check_reward_adapter`; its head gives the normalized score.

    Raises:
        ValueError: its weights cannot be read, or do not have one head `score` with one label.
    """
    folder = find_adapter(spec)
    assert folder is not None, f"{spec=}"
    with explained("reward", folder):
        config = copy.deepcopy(PeftConfig.from_pretrained(str(folder)))
        weights = load_file(folder / WEIGHTS)
    heads = [weights.pop(name) for name in sorted(weights) if name.endswith(HEAD)]
    shapes = [tuple(head.shape) for head in heads]
    if len(heads) != 1 or len(shapes[0]) != 2 or shapes[0][0] != 1:
        raise ValueError(
            f"--reward={spec!r} must have one head named score, of one label ([1, hidden size]); it has "
            f"{', '.join(map(str, shapes)) or 'none'}; train it by `hybrid-engine reward`"
        )
    assert isinstance(config, LoraConfig)
    config.task_type, config.modules_to_save, config.inference_mode = "CAUSAL_LM", None, False
    has_model = (Path(spec) / "config.json").is_file()
    noted = load_config(spec, "reward") if has_model else None
    mean, std = getattr(noted, "score_mean", 0.0), getattr(noted, "score_std", 1.0)
    check_number(f"--reward={spec!r}: score_mean in its config.json", mean, -math.inf)
    check_number(f"--reward={spec!r}: score_std in its config.json", std, sys.float_info.min)
    head = nn.Linear(heads[0].shape[1], 1)
    with torch.no_grad():
        head.weight.copy_(heads[0].float() / std)
        head.bias.fill_(-mean / std)
    return RewardAdapter(source=spec, config=config, weights=weights, head=head)
