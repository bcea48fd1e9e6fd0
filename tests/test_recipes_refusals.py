"""What the recipes refuse before they train anything: options out of range, and sources that cannot serve."""

import re

import pytest

from hybrid_engine.recipes import ppo, reward, sft

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("recipe", "option", "values", "rule"),
    [
        (ppo, "minibatch_size", (0, -32), "must be at least 1"),
        (ppo, "kl_coef", (-0.1,), "must be at least 0"),
        (ppo, "logprob_bound", (-1.0,), "must be at least 0"),
        (ppo, "kl_bound", (-1.0,), "must be at least 0"),
        (ppo, "save_every", (-1,), "must be at least 0"),
        (ppo, "temperature", (0.0, -1.0), "must be above 0"),
        (ppo, "clip", (0.0, -1.0), "must be above 0"),
        (ppo, "value_clip", (0.0, -1.0), "must be above 0"),
        (ppo, "actor_lr", (0.0, -1.0), "must be above 0"),
        (ppo, "critic_lr", (0.0, -1.0), "must be above 0"),
        (ppo, "gamma", (-0.1, 2.0, NAN), "must be from 0 to 1"),
        (ppo, "lam", (-0.1, 2.0, NAN), "must be from 0 to 1"),
        (ppo, "zero_stage", (-1, 7), "must be from 0 to 3"),
        (ppo, "missing_eos_score", (NAN, INFINITY), "must be finite"),
        (ppo, "temperature", (NAN, INFINITY), "must be finite"),
        (ppo, "kl_coef", (NAN, INFINITY), "must be finite"),
        (ppo, "clip", (NAN, INFINITY), "must be finite"),
        (ppo, "actor_lr", (NAN, INFINITY), "must be finite"),
        (reward, "learning_rate", (0.0, -1.0), "must be above 0"),
        (reward, "learning_rate", (NAN, INFINITY), "must be finite"),
        (reward, "max_examples", (-1,), "must be at least 0"),
        (reward, "max_pairs", (-1,), "must be at least 0"),
        (reward, "zero_stage", (-1, 7), "must be from 0 to 3"),
        (sft, "learning_rate", (0.0, -1.0), "must be above 0"),
        (sft, "learning_rate", (NAN, INFINITY), "must be finite"),
        (sft, "max_examples", (-1,), "must be at least 0"),
        (sft, "zero_stage", (-1, 7), "must be from 0 to 3"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_option_and_rule(recipe, option, values, rule):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f"{option}={value} {rule}")):
            recipe.Config(**{option: value})
