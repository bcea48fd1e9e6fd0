"""The presets of GRPO's family against goldens and an independent computation, and what is said and refused."""

import json
from dataclasses import fields

import pytest
import torch

from hybrid_engine.rl.losses import count_step
from hybrid_engine.rlhf.algorithms import (
    AGGREGATIONS,
    BASELINES,
    BATCH_BASELINES,
    BATCH_SCALES,
    CORRECTIONS,
    IDLE,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    SCALES,
    Coefficients,
    PolicyBatch,
    compute_advantages,
    describe,
    policy_objective,
)
from hybrid_engine.rlhf.options.algorithm import CHOICES, PRESETS, Algorithm
from tests.support.goldens import assert_golden, load_golden
from tests.support.paths import DATA

GROUP_GOLDENS = {
    "deepseekmath": "grpo_verl_slime_eps1e6",
    "trl": "grpo_trl_torchtune_eps1e4",
    "verl": "grpo_verl_slime_eps1e6",
    "openrlhf": "grpo_openrlhf_eps1e9",
    "nemo": "nemo_loo_std",
    "slime": "grpo_verl_slime_eps1e6",
    "prime-rl": "dr_grpo",
    "skyrl": "grpo_verl_slime_eps1e6",
    "dapo": "grpo_verl_slime_eps1e6",
    "dr-grpo": "dr_grpo",
    **dict.fromkeys(("gspo", "luspo", "sapo", "gmpo", "dppo", "vespo"), "grpo_verl_slime_eps1e6"),
    "rloo": "rloo",
}
BATCHES = json.loads((DATA / "preset_goldens.json").read_text())


def from_preset(preset: str, **given) -> Algorithm:
    return Algorithm.from_options({"preset": preset, **given})


@pytest.mark.parametrize("preset", GROUP_GOLDENS)
def test_the_advantages_of_a_preset_are_the_golden(preset):
    golden = load_golden("group")
    algorithm = from_preset(preset)
    rewards = golden["rewards"]
    zeros, mask = torch.zeros(rewards.numel(), 3, dtype=torch.float64), torch.ones(rewards.numel(), 3).bool()
    advantages = compute_advantages(algorithm, rewards.flatten(), 4, zeros, zeros, mask, algorithm.kl_coef)
    assert_golden(advantages, golden[GROUP_GOLDENS[preset]].flatten()[:, None].expand(-1, 3))


def test_the_advantages_of_reinforce_plus_plus_are_the_golden():
    golden, rows = load_golden("reinforce_pp"), load_golden("gae_g1_l95")
    algorithm = from_preset("reinforce++", kl_coef=rows["kl_coef"])
    arguments = rows["score"], 1, rows["logprob"], rows["ref"], rows["mask"], rows["kl_coef"]
    assert_golden(compute_advantages(algorithm, *arguments), golden["adv_biased"])
    unbiased = from_preset("reinforce++", kl_coef=rows["kl_coef"], scale="batch-whiten")
    assert_golden(compute_advantages(unbiased, *arguments), golden["adv_unbiased"])


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({"scale": "batch-std", "scale_eps": 1e-4}, "scale_rewards_batch_trl"),
        (
            {"baseline": "group-then-batch-mean", "scale": "batch-whiten-biased"},
            "reinforce_baseline_batch_norm_biased",
        ),
    ],
)
def test_advantages_over_the_batch_are_the_goldens(choices, name):
    golden = load_golden("group")
    zeros, mask = torch.zeros(12, 2, dtype=torch.float64), torch.ones(12, 2).bool()
    advantages = compute_advantages(Algorithm(**choices), golden["rewards"].flatten(), 4, zeros, None, mask, 0.0)
    assert_golden(advantages, golden[name].flatten()[:, None].expand(-1, 2))


@pytest.mark.parametrize("preset", PRESETS)
def test_advantages_and_loss_of_a_preset_are_those_of_an_independent_computation(preset):
    batch = {name: torch.tensor(value, dtype=torch.float64) for name, value in BATCHES["batch"].items()}
    mask, expected, algorithm = batch["mask"].bool(), BATCHES[preset], from_preset(preset)
    arguments = batch["scores"], BATCHES["group_size"], batch["old"], batch["ref"], mask
    advantages = compute_advantages(algorithm, *arguments, algorithm.kl_coef)
    assert_golden(advantages, expected["advantages"])
    logprobs = batch["logprobs"].requires_grad_()
    tokens = PolicyBatch(logprobs, batch["old"], advantages, mask, batch["ref"])
    counts = count_step(mask, BATCHES["max_length"])
    loss = policy_objective(algorithm, tokens, counts, Coefficients.first(algorithm))
    assert_golden(loss.detach(), expected["loss"])
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert_golden(gradient, expected["gradient"])


def test_the_tables_know_every_choice_and_no_other():
    tables = {
        "baseline": BASELINES,
        "scale": SCALES,
        "policy_loss": POLICY_LOSSES,
        "aggregation": AGGREGATIONS,
        "kl_estimator": KL_ESTIMATORS,
        "correction": ["none", *CORRECTIONS],
    }
    assert {name: set(table) for name, table in tables.items()} == {name: set(CHOICES[name]) for name in tables}
    assert set(BATCH_BASELINES) < set(BASELINES)
    assert set(BATCH_SCALES) < set(SCALES)


def test_a_preset_sets_only_fields_and_makes_an_algorithm_that_names_it():
    known = {field.name for field in fields(Algorithm)}
    for preset, choices in PRESETS.items():
        assert set(choices) < known
        algorithm = from_preset(preset)
        assert {name: getattr(algorithm, name) for name in choices} == choices
        lines = describe(algorithm)
        assert len(lines) == 1
        assert all(f"--{name.replace('_', '-')} {value}" in lines[0] for name, value in choices.items())
    assert set(IDLE) < known


def test_an_option_given_beside_a_preset_wins_and_is_reported():
    algorithm = from_preset("dapo", clip_high=0.3, clip_low=0.2)
    assert (algorithm.clip_high, algorithm.dynamic_sampling) == (0.3, 10)
    assert describe(algorithm)[1:] == ["--clip-high 0.3 in place of 0.28 of preset dapo"]


def test_what_has_no_meaning_beside_a_given_option_goes_and_is_reported():
    without_kl = from_preset("deepseekmath", kl_place="none")
    assert without_kl.kl_coef == 0
    assert "--kl-coef 0.0 in place of 0.04 of preset deepseekmath" in describe(without_kl)
    assert from_preset("verl", policy_loss="gspo").dual_clip == 0
    assert from_preset("trl", policy_loss="dppo").correction == "none"
    moved = from_preset("rloo", kl_place="loss")
    assert (moved.kl_estimator, moved.kl_coef) == ("k3", 0.05)
    assert from_preset("rloo", kl_place="loss", kl_estimator="k2").kl_estimator == "k2"
    assert Algorithm.from_options({"kl_place": "reward", "kl_coef": 0.1}).kl_estimator == "k1"


def test_an_option_that_does_nothing_is_reported():
    lines = describe(from_preset("rloo", clip_low=0.1, scale_eps=1e-4))
    assert "--clip-low 0.1 has no effect with --policy-loss reinforce" in lines
    assert "--scale-eps 0.0001 has no effect with --scale none" in lines
    lines = describe(Algorithm(policy_loss="sapo", clip_low=0.1, vespo_k_neg=1.0, ratio_cap=3.0))
    assert "--clip-low 0.1 has no effect with --policy-loss sapo" in lines
    assert "--vespo-k-neg 1.0 has no effect with --policy-loss sapo" in lines
    assert "--ratio-cap 3.0 has no effect with --policy-loss sapo" in lines
    assert len(describe(Algorithm())) == 1


def test_the_resolved_choices_given_again_make_the_same_algorithm():
    for preset in PRESETS:
        algorithm = from_preset(preset, clip_high=0.25, kl_place="token-reward", kl_coef=0.2)
        again = Algorithm.from_options({field.name: getattr(algorithm, field.name) for field in fields(algorithm)})
        assert again == algorithm


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "tlr"}, r"--preset='tlr' must be one of .*; did you mean trl\?"),
        ({"clip_hihg": 0.3}, r"--clip-hihg is not an option of the algorithm; did you mean --clip-high\?"),
        ({"baseline": "group_mean"}, r"--baseline='group_mean' must be one of .*; did you mean group-mean\?"),
        ({"kl_place": "loss", "kl_coef": 0.1, "kl_estimator": "k1"}, "expected gradient of k1 is zero"),
        ({"kl_place": "loss"}, "--kl-place=loss needs a coefficient, but --kl-coef is 0"),
        ({"preset": "trl", "kl_coef": 0.1}, "--kl-coef=0.1 has no effect with --kl-place=none"),
        ({"kl_target": 6.0}, "--kl-target=6.0 has no effect with"),
        ({"kl_place": "reward", "kl_coef": 0.1, "kl_estimator": "k3+"}, "changes only the gradient"),
        ({"kl_unbiased": True}, "--kl-unbiased changes only the gradient"),
        (
            {"kl_place": "loss", "kl_coef": 0.1, "kl_estimator": "k3+", "kl_unbiased": True},
            "both correct the same gradient",
        ),
        ({"preset": "nemo", "baseline": "batch-mean"}, "--scale=leave-one-out-std is a statistic of a group"),
        ({"policy_loss": "gspo", "dual_clip": 3.0}, "--dual-clip=3.0 belongs to --policy-loss=clip"),
        ({"dual_clip": 1.1}, r"--dual-clip=1.1 must be above 1 \+ --clip-high=0.2"),
        ({"dual_clip": 0.5}, "--dual-clip=0.5 must be above 1"),
        ({"dynamic_sampling": 3, "baseline": "none"}, "--baseline=none learns from them"),
        ({"policy_loss": "vespo", "correction": "masked"}, "--correction=masked weights .* a second time"),
        ({"policy_loss": "dppo", "ratio_cap": 0.5}, "--ratio-cap=0.5 must be at least 1"),
        ({"policy_loss": "sapo", "sapo_temperature_neg": 0.0}, "--sapo-temperature-neg=0.0 must be above 0"),
        ({"baseline": "batch-mean", "scale": "group-mean"}, "--scale=group-mean is a statistic of a group"),
        ({"policy_loss": "clip-cov", "cov_low": 6.0}, "--cov-low=6.0 must be below --cov-high=5.0"),
        ({"policy_loss": "kl-cov", "cov_share": 0.0}, "--cov-share=0.0 must be above 0"),
        ({"top_entropy": 1.2}, "--top-entropy=1.2 must be from 0 to 1"),
        ({"entropy_target": 0.2, "entropy_coef": 2.0}, "--entropy-coef=2.0 is above --entropy-coef-max=1.0"),
        (
            {"reward_aggregation": "normalize-then-sum", "scale": "batch-std"},
            "--scale=batch-std does not normalize each reward in its group",
        ),
        (
            {"reward_aggregation": "normalize-then-sum", "kl_place": "reward", "kl_coef": 0.1, "kl_estimator": "k1"},
            "--kl-place=reward does not normalize each reward",
        ),
        ({"clip_low": 1.5}, "--clip-low=1.5 must be from 0 to 1"),
        ({"scale_eps": -1.0}, "--scale-eps=-1.0 must be at least 0"),
        ({"kl_coef": float("nan")}, "--kl-coef=nan must be finite"),
        ({"overlong_buffer": 4096.0}, "--overlong-buffer=4096.0 must be from 0 to 1"),
        ({"correction_low": 1.5}, "--correction-low=1.5 is above 1"),
        ({"correction_high": 0.5}, "--correction-high=0.5 must be at least 1"),
    ],
)
def test_contradictions_and_unknown_words_are_refused_with_the_remedy(given, message):
    with pytest.raises(ValueError, match=message):
        Algorithm.from_options(given)


def test_a_group_of_one_has_no_group_baseline():
    for preset in ("verl", "rloo", "nemo"):
        with pytest.raises(ValueError, match=r"--group-size=1 leaves no other sample for"):
            from_preset(preset).check_group_size("group_size", 1)
    with pytest.raises(ValueError, match=r"--group-size=2 leaves one other sample"):
        from_preset("nemo").check_group_size("group_size", 2)
    from_preset("reinforce++").check_group_size("group_size", 1)
    from_preset("rloo").check_group_size("group_size", 2)


def test_a_kl_as_a_loss_without_the_unbiased_weight_is_refused_for_k1_alone():
    with pytest.raises(ValueError, match="the expected gradient of k1 is zero"):
        Algorithm(kl_place="loss", kl_coef=0.1, kl_estimator="k1")
    for choices in ({"kl_estimator": "k1+"}, {"kl_estimator": "k1", "kl_unbiased": True}, {"kl_estimator": "k2"}):
        Algorithm(kl_place="loss", kl_coef=0.1, **choices)
