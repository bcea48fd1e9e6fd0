"""The reward of a response: a learned model's score, or any Python function `module:function`.

Both are called with a list of prompts and a list of responses as text and return one number for each.
"""

import importlib
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification

from hybrid_engine.distributed.processes import default_device
from hybrid_engine.recipes.data.sequences import ValueModel, build_sequences, last_token_scores
from hybrid_engine.recipes.runs.stages import load_model, load_tokenizer, num_positions, score_head

Reward = Callable[[list[str], list[str]], list[float]]
ROWS_PER_PASS = 64


def load_reward(spec: str) -> Reward:
    """A reward-model folder (or hub name) as a frozen model, or `module:function` from the path or the present folder.

    Errors that the user's module or function raises are theirs and pass as they are. What is returned
    raises a ValueError where a call gives anything but one finite number for each response.

    Raises:
        ValueError: the model does not load or has no single score; the function cannot be found or is not callable.
    """
    score = LearnedReward(spec) if _is_model(spec) else _find_function(spec)
    return lambda prompts, responses: check_scores(spec, score(prompts, responses), len(responses))


def check_scores(spec: str, scores: Any, count: int) -> list[float]:
    """What the reward `spec` returned for `count` responses, as numbers; ValueError unless all are there and finite."""
    if not isinstance(scores, Iterable):
        raise ValueError(f"--reward={spec!r} must return a list of numbers and returned {scores!r}; mend the function")
    given = list(scores)  # outside of `try`: a generator of the user's may fail in here
    try:
        numbers = [float(score) for score in given]
    except (TypeError, ValueError) as error:
        raise ValueError(f"--reward={spec!r} must return a list of numbers: {error}; mend the function") from error
    if len(numbers) != count:
        raise ValueError(
            f"--reward={spec!r} returned {len(numbers)} scores for {count} responses; return one for each, in their "
            "order"
        )
    wrong = next((index for index, number in enumerate(numbers) if not math.isfinite(number)), None)
    if wrong is not None:
        raise ValueError(
            f"--reward={spec!r} gave response {wrong} the score {numbers[wrong]}; scores must be finite: mend it"
        )
    return numbers


def _is_model(spec: str) -> bool:
    return ":" not in spec or Path(spec).exists()


def _find_function(spec: str) -> Reward:
    module_name, _, function_name = spec.partition(":")
    for part, name in (("module", module_name), ("function", function_name)):
        if not name:
            raise ValueError(f"--reward={spec!r} names no {part}; write module:function")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # the module is there, and imports one that is not
            raise
        raise ValueError(
            f"--reward={spec!r}: no module {error.name!r} here or on the path; write module:function"
        ) from error
    finally:
        sys.path.remove("")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--reward={spec!r}: {module_name} has no function {function_name!r}; write module:function")
    return function


class LearnedReward:
    """A sequence classifier's score at the end-of-sequence token behind the response, normalised, frozen."""

    def __init__(self, folder: str):
        self.tokenizer = load_tokenizer(folder, "reward")
        self.model = load_value_model(folder).to(default_device()).eval().requires_grad_(False)
        self.num_positions = num_positions(self.model.backbone.config)

    @torch.no_grad()
    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        """Scores finished responses; one that was cut off is to be judged by the caller.

        What has more tokens than the model has positions loses its beginning.
        """
        scores: list[float] = []
        for start in range(0, len(prompts), ROWS_PER_PASS):
            end = start + ROWS_PER_PASS
            encoded = [self._encode(texts[start:end]) for texts in (prompts, responses)]
            pairs = [self._fit(*pair) for pair in zip(*encoded, strict=True)]
            batch = build_sequences(
                [prompt for prompt, _ in pairs],
                [response for _, response in pairs],
                self.tokenizer.pad_token_id,
                default_device(),
            )
            scores += last_token_scores(self.model, batch).tolist()
        return scores

    def _fit(self, prompt: list[int], response: list[int]) -> tuple[list[int], list[int]]:
        """As many of the last tokens as fit, of the prompt one at least, and the end-of-sequence token."""
        finished = [*response, self.tokenizer.eos_token_id]
        if self.num_positions is None:
            return prompt, finished
        finished = finished[-(self.num_positions - 1) :]
        return prompt[-(self.num_positions - len(finished)) :], finished

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]


def load_value_model(folder: str) -> ValueModel:
    """The reward model of `folder` with a number for every token, in units of its normalised score.

    With the mean and the deviation that the reward stage noted in the config, (score - mean) / deviation is folded into
    the head; a foreign model without them is taken as it is.

    Raises:
        ValueError: `folder`, which the option `reward` named, has not exactly one label or no head named `score`.
    """
    classifier = load_model(AutoModelForSequenceClassification, folder, "reward")
    if classifier.config.num_labels != 1:
        raise ValueError(
            f"--reward={folder!r} must be a sequence classifier with one label, the score, and has "
            f"{classifier.config.num_labels}; train one, for example with `hybrid-engine reward`"
        )
    score = score_head(classifier, "reward", folder)
    mean = getattr(classifier.config, "score_mean", 0.0)
    std = getattr(classifier.config, "score_std", 1.0)
    head = nn.Linear(score.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(score.weight / std)
        head.bias.fill_(-mean / std)
    return ValueModel(getattr(classifier, classifier.base_model_prefix), head)


def shares_tokens(reward: str, actor: str) -> bool:
    """Whether the reward is a model that reads the same tokens as the actor, and so can be the critic's beginning."""
    return _is_model(reward) and load_tokenizer(reward, "reward").get_vocab() == load_tokenizer(actor).get_vocab()


def build_critic(actor: str, reward: str) -> ValueModel:
    """The critic: the reward model's weights where both read the same tokens, else the actor's body and a head of 0."""
    if shares_tokens(reward, actor):
        return load_value_model(reward)
    backbone = load_model(AutoModel, actor)
    head = nn.Linear(backbone.config.hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return ValueModel(backbone, head)
