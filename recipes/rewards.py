"""The reward of a response: a learned model's score, or any Python function `module:function`.

Both are called with a list of prompts and a list of responses as text and return one number for each.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from hybrid_engine.recipes.sequences import ValueModel, build_sequences, last_token_scores
from hybrid_engine.recipes.stages import load_model, load_tokenizer
from hybrid_engine.zero.processes import default_device

Reward = Callable[[list[str], list[str]], list[float]]
ROWS_PER_PASS = 64


def load_reward(spec: str) -> Reward:
    """A reward-model folder (or hub name) as a frozen model, or `module:function` from the path or the present folder.

    Raises:
        ValueError: the function cannot be found or is not callable.
    """
    if ":" not in spec or Path(spec).exists():
        return LearnedReward(spec)
    module_name, _, function_name = spec.partition(":")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"reward={spec!r}: no module {error.name!r} here or on the path; write module:function"
        ) from error
    finally:
        sys.path.remove("")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward={spec!r}: {module_name} has no function {function_name!r}; write module:function")
    return function


class LearnedReward:
    """A sequence classifier's score at the end-of-sequence token behind the response, normalised, frozen."""

    def __init__(self, folder: str):
        self.tokenizer = load_tokenizer(folder)
        self.model = load_value_model(folder).to(default_device()).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        """Scores finished responses; one that was cut off is to be judged by the caller."""
        scores: list[float] = []
        for start in range(0, len(prompts), ROWS_PER_PASS):
            end = start + ROWS_PER_PASS
            encoded = [self._encode(texts[start:end]) for texts in (prompts, responses)]
            finished = [[*response, self.tokenizer.eos_token_id] for response in encoded[1]]
            batch = build_sequences(encoded[0], finished, self.tokenizer.pad_token_id, default_device())
            scores += last_token_scores(self.model, batch).tolist()
        return scores

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]


def load_value_model(folder: str) -> ValueModel:
    """The reward model of `folder` with a number for every token, in units of its normalised score.

    With the mean and the deviation that the reward stage noted in the config, (score - mean) / deviation is folded into
    the head; a foreign model without them is taken as it is.
    """
    classifier = load_model(AutoModelForSequenceClassification, folder, num_labels=1)
    mean = getattr(classifier.config, "score_mean", 0.0)
    std = getattr(classifier.config, "score_std", 1.0)
    head = nn.Linear(classifier.score.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(classifier.score.weight / std)
        head.bias.fill_(-mean / std)
    return ValueModel(getattr(classifier, classifier.base_model_prefix), head)


def build_critic(actor: str, reward: str) -> ValueModel:
    """The critic: the reward model's weights where both read the same tokens, else the actor's body and a head of 0."""
    is_model = ":" not in reward or Path(reward).exists()
    if is_model and load_tokenizer(reward).get_vocab() == load_tokenizer(actor).get_vocab():
        return load_value_model(reward)
    backbone = load_model(AutoModel, actor)
    head = nn.Linear(backbone.config.hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return ValueModel(backbone, head)
