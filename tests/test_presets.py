"""The presets of GRPO's family against goldens, and what they say and refuse."""

import pytest
import torch
from goldens import assert_golden, load_golden

from hybrid_engine.recipes.algorithms.advantages import compute_advantages
from hybrid_engine.recipes.algorithms.presets import build_algorithm

GROUP_GOLDENS = {
    "deepseekmath": "grpo_verl_slime_eps1e6",
    "trl": "grpo_trl_torchtune_eps1e4",
    "verl": "grpo_verl_slime_eps1e6",
    "openrlhf": "grpo_openrlhf_eps1e9",
    "nemo": "nemo_loo_std",
    "slime": "grpo_verl_slime_eps1e6",
    "dapo": "grpo_verl_slime_eps1e6",
    "dr-grpo": "dr_grpo",
    "rloo": "rloo",
}


@pytest.mark.parametrize("preset", GROUP_GOLDENS)
def test_the_advantages_of_a_preset_are_the_golden(preset):
    golden = load_golden("group")
    algorithm, _ = build_algorithm(preset, {})
    rewards = golden["rewards"]
    zeros, mask = torch.zeros(rewards.numel(), 3, dtype=torch.float64), torch.ones(rewards.numel(), 3).bool()
    advantages = compute_advantages(algorithm, rewards.flatten(), 4, zeros, zeros, mask, algorithm.kl_coef)
    assert_golden(advantages, golden[GROUP_GOLDENS[preset]].flatten()[:, None].expand(-1, 3))
