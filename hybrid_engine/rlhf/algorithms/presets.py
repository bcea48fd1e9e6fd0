"""What papers and frameworks chose, by name: the same rewards give other numbers in each of them.

A preset says only what its source says; all other choices are `Algorithm`'s defaults. Defaults of a framework are
those of its GRPO at the versions that `docs/algorithms.md` names.
"""

from collections.abc import Mapping
from typing import Any

from hybrid_engine.config.reading import find_nearest

GROUP_NORMALISED: dict[str, Any] = {"baseline": "group-mean", "scale": "group-std", "scale_divisor": "n-1"}

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3 and section 4.2 (KL 0.04). The paper gives neither the
    # clip range nor what is added to the deviation: PPO's 0.2 and verl's 1e-6.
    "deepseekmath": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence-mean-token-mean",
        "kl_place": "loss",
        "kl_estimator": "k3",
        "kl_coef": 0.04,
    },
    # TRL, `trl/trainer/grpo_config.py`: loss_type "dapo", scale_rewards "group", beta 0, epsilon 0.2,
    # vllm_importance_sampling_mode "sequence_mask" up to 3.0.
    "trl": GROUP_NORMALISED
    | {
        "scale_eps": 1e-4,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        "kl_place": "none",
        "correction": "sequence-masked",
        "correction_high": 3.0,
    },
    # verl, `core_algos.py`, compute_grpo_outcome_advantage and `_generated_ppo_trainer.yaml`: clip_ratio 0.2,
    # clip_ratio_c 3, loss_agg_mode "token-mean", use_kl_loss and use_kl_in_reward off.
    "verl": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "aggregation": "token-mean",
        "kl_place": "none",
    },
    # OpenRLHF, `experience_maker.py` with the advantage estimator "group_norm": 1e-9, k1 with 0.01 in the rewards of
    # the tokens, token mean over the optimizer step.
    "openrlhf": GROUP_NORMALISED
    | {
        "scale_eps": 1e-9,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        "kl_place": "token-reward",
        "kl_estimator": "k1",
        "kl_coef": 0.01,
    },
    # NVIDIA NeMo-RL, `examples/configs/grpo_math_1B.yaml` (use_leave_one_out_baseline, normalize_rewards, KL 0.01,
    # token_level_loss) and `nemo_rl/algorithms/utils.py`.
    "nemo": {
        "baseline": "leave-one-out",
        "scale": "leave-one-out-std",
        "scale_divisor": "n-1",
        "scale_eps": 1e-6,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        "kl_place": "loss",
        "kl_estimator": "k3",
        "kl_coef": 0.01,
    },
    # slime, `slime/ray/rollout.py` and `slime/utils/arguments.py`: eps_clip 0.2, mean of each sample, KL 0.
    "slime": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence-mean-token-mean",
        "kl_place": "none",
    },
    # Yu et al., "DAPO", arXiv 2503.14476, section 3: clip-higher 0.28, dynamic sampling, token-level loss, soft
    # overlong punishment in the last 4096 of 20480 tokens, no KL. verl's recipe draws up to 10 times.
    "dapo": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token-mean",
        "kl_place": "none",
        "dynamic_sampling": 10,
        "overlong_buffer": 0.2,
        "overlong_factor": 1.0,
    },
    # Liu et al., "Understanding R1-Zero-Like Training", arXiv 2503.20783; no KL.
    "dr-grpo": {
        "baseline": "group-mean",
        "scale": "none",
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence-mean-token-sum-by-length",
        "kl_place": "none",
    },
    # Ahmadian et al., "Back to Basics", arXiv 2402.14740: REINFORCE on whole sequences, their KL in the reward;
    # its weight is TRL's, `trl/trainer/rloo_config.py`, beta 0.05.
    "rloo": {
        "baseline": "leave-one-out",
        "scale": "none",
        "policy_loss": "reinforce",
        "aggregation": "sequence-mean-token-sum",
        "kl_place": "reward",
        "kl_estimator": "k1",
        "kl_coef": 0.05,
    },
    # Hu et al., "REINFORCE++", arXiv 2501.03262, as in OpenRLHF's advantage estimator "reinforce": k1 in the rewards
    # of the tokens, returns whitened over the batch (variance with divisor n, not below 1e-8).
    "reinforce++": {
        "baseline": "batch-mean",
        "scale": "batch-whiten-biased",
        "gamma": 1.0,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        "kl_place": "token-reward",
        "kl_estimator": "k1",
        "kl_coef": 0.01,
    },
}
"""Choices by preset, then by the field of `Algorithm`."""


KL_AT: dict[str, dict[str, Any]] = {
    "none": {"kl_coef": 0.0, "kl_target": 0.0, "kl_unbiased": False},
    "reward": {"kl_estimator": "k1", "kl_unbiased": False},
    "token-reward": {"kl_estimator": "k1", "kl_unbiased": False},
    "loss": {"kl_estimator": "k3"},
}
"""What a KL has at each place that it is moved to, unless the user says otherwise."""


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The choices that follow from the options that the user gave, by the names of `Algorithm`'s fields.

    They are the preset's where `given` has one, and the given ones win. A choice of the preset that has no meaning
    beside a given one goes: the weight of a KL that is turned off, the estimator of one that is moved, the dual clip
    of another policy loss.

    Raises:
        ValueError: there is no such preset.
    """
    chosen = preset_choices(given.get("preset"))
    moved = KL_AT.get(given.get("kl_place", ""), {}) if given.get("kl_place") != chosen.get("kl_place") else {}
    dropped = {"dual_clip": 0.0} if given.get("policy_loss", "clip") != "clip" else {}
    return {**chosen, **moved, **dropped, **given}


def preset_choices(preset: str | None) -> dict[str, Any]:
    """The choices of a preset; none without one."""
    if preset is None:
        return {}
    if preset not in PRESETS:
        nearest = find_nearest(preset, PRESETS)
        advice = f"did you mean {nearest}?" if nearest else "choose one of them"
        raise ValueError(f"--preset={preset!r} must be one of {', '.join(PRESETS)}; {advice}")
    return PRESETS[preset]
