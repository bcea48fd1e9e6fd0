"""The choices that GRPO leaves open, as one frozen dataclass: frameworks differ in what they call "GRPO".

The words are those of the command line. `PRESETS` has the choices of frameworks and papers;
`rlhf/algorithms.py` computes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hybrid_engine.config.checks import (
    check_above,
    check_at_least,
    check_between,
    check_count,
    find_nearest,
    flag,
    option,
)

CHOICES = {
    "reward_aggregation": ("sum-then-normalize", "normalize-then-sum"),
    "baseline": ("group-mean", "leave-one-out", "batch-mean", "group-then-batch-mean", "none"),
    "scale": (
        "group-std",
        "leave-one-out-std",
        "group-mean",
        "batch-std",
        "batch-whiten",
        "batch-whiten-biased",
        "none",
    ),
    "scale_divisor": ("n-1", "n"),
    "policy_loss": (
        "clip",
        "gspo",
        "cispo",
        "reinforce",
        "sequence-clip",
        "sapo",
        "gmpo",
        "dppo",
        "dppo-kl",
        "vespo",
        "clip-cov",
        "kl-cov",
    ),
    "aggregation": (
        "token-mean",
        "sequence-mean-token-mean",
        "sequence-mean-token-sum",
        "token-sum-by-length",
        "sequence-mean-token-sum-by-length",
    ),
    "kl_place": ("none", "reward", "token-reward", "loss"),
    "kl_estimator": ("k1", "k2", "k3", "k1+", "k3+"),
    "correction": (
        "none",
        "truncated",
        "masked",
        "sequence-truncated",
        "sequence-masked",
        "geometric-truncated",
        "geometric-masked",
    ),
}
"""The words that the fields of the same names may have."""
GROUP_BASELINES = ("group-mean", "leave-one-out", "group-then-batch-mean")
GROUP_SCALES = ("group-std", "leave-one-out-std", "group-mean")
SAMPLER_LOSSES = ("dppo", "dppo-kl", "vespo")
"""The policy losses whose ratio is that to the sampler, which corrects for its difference from the trainer."""
UNCLIPPED_LOSSES = ("reinforce", "sapo", "vespo", "kl-cov")
COVARIANCE_LOSSES = ("clip-cov", "kl-cov")
"""The policy losses that treat tokens of high covariance of log-probability and advantage differently."""
GROUP_NORMALISED: dict[str, Any] = {"baseline": "group-mean", "scale": "group-std", "scale_divisor": "n-1"}
PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3 and section 4.2 (KL 0.04). The paper gives neither the
    # clip range nor the epsilon added to the deviation: they are PPO's 0.2 and verl's 1e-6.
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
    # Prime Intellect's prime-rl, `src/prime_rl/trainer/rl/loss.py` (default_loss_fn: dppo_mask 0.2, kl_tau 1e-3, no cap
    # of the ratio) and `orchestrator/algo` ("grpo": reward minus the group's mean).
    "prime-rl": {
        "baseline": "group-mean",
        "scale": "none",
        "policy_loss": "dppo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "ratio_cap": 0.0,
        "sampler_coef": 1e-3,
        "aggregation": "token-mean",
        "kl_place": "none",
    },
    # SkyRL, `skyrl/train/config/config.py` (AlgorithmConfig: policy_loss_type "regular", eps_clip 0.2, loss_reduction
    # "token_mean", use_kl_loss with kl_loss_coef 0.001 and "k3") and `ppo_utils.py` (epsilon 1e-6).
    "skyrl": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
        "kl_place": "loss",
        "kl_estimator": "k3",
        "kl_coef": 0.001,
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
    # Zheng et al., "GSPO", arXiv 2507.18071, section 5.1: clip bounds of the geometric mean of ratios, no KL.
    "gspo": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence-mean-token-mean",
        "kl_place": "none",
    },
    # Liu et al., "LUSPO", arXiv 2602.05261: GSPO's loss of a sequence times its length; bounds of section 5.1.
    "luspo": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "gspo",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
        "aggregation": "sequence-mean-token-sum",
        "kl_place": "none",
    },
    # Gao et al., "SAPO", arXiv 2511.20347; temperatures as in TRL and verl.
    "sapo": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "sapo",
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "aggregation": "sequence-mean-token-mean",
        "kl_place": "none",
    },
    # Zhao et al., "GMPO", arXiv 2507.20673; bounds of the logarithm as in TRL, `gmpo_config.py`.
    "gmpo": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "gmpo",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "aggregation": "sequence-mean-token-mean",
        "kl_place": "none",
    },
    # Qi et al., "DPPO", arXiv 2602.04879, the binary total variation; bounds and cap as in TRL, `dppo_config.py`.
    "dppo": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "dppo",
        "clip_low": 0.15,
        "clip_high": 0.15,
        "ratio_cap": 20.0,
        "aggregation": "token-mean",
        "kl_place": "none",
    },
    # Shen et al., "VESPO", arXiv 2602.10693; exponents and token mean as in TRL, `grpo_config.py`.
    "vespo": GROUP_NORMALISED
    | {
        "scale_eps": 1e-6,
        "policy_loss": "vespo",
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "aggregation": "token-mean",
        "kl_place": "none",
    },
    # Tajwar et al., "MaxRL", arXiv 2602.02710: rewards 0 and 1, over the group's mean. Clip and aggregation are verl's.
    "maxrl": {
        "baseline": "group-mean",
        "scale": "group-mean",
        "policy_loss": "clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
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
"""Choices by preset, then by field of `Algorithm`."""
KL_AT: dict[str, dict[str, Any]] = {
    "none": {"kl_coef": 0.0, "kl_target": 0.0, "kl_unbiased": False},
    "reward": {"kl_estimator": "k1", "kl_unbiased": False},
    "token-reward": {"kl_estimator": "k1", "kl_unbiased": False},
    "loss": {"kl_estimator": "k3"},
}
"""Defaults of a KL by the place that the user moves it to."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Every choice between sampled groups with rewards and the loss of an optimizer step.

    `from_options` fills in what a preset chose; the constructor takes the choices as they are.
    """

    preset: str | None = option(
        None,
        f"Defaults for the algorithm options, as in {', '.join(PRESETS)} (docs/algorithms.md); explicit options "
        "override them",
    )
    reward_aggregation: str = option(
        "sum-then-normalize",
        "Combination of several rewards: sum-then-normalize (baseline and scale of their weighted sum) or "
        "normalize-then-sum (of each reward, then weighted sum, then normalization over the batch: GDPO, arXiv "
        "2601.05242)",
    )
    baseline: str = option(
        "group-mean",
        "Baseline subtracted from each reward: group-mean (GRPO, arXiv 2402.03300), leave-one-out (RLOO, arXiv "
        "2402.14740), batch-mean over all tokens (REINFORCE++, arXiv 2501.03262), group-then-batch-mean "
        "(REINFORCE++-baseline) or none",
    )
    scale: str = option(
        "group-std",
        "Divisor of the advantages: group-std (GRPO), leave-one-out-std (NeMo-RL), group-mean (MaxRL, arXiv "
        "2602.02710), batch-std of all rewards (TRL), batch-whiten or batch-whiten-biased over all tokens (verl, "
        "OpenRLHF) or none (Dr. GRPO, arXiv 2503.20783)",
    )
    scale_divisor: str = option("n-1", "Divisor in a group's variance: n-1 or n")
    scale_eps: float = option(
        1e-6,
        "Epsilon added to the standard deviation of group-std, leave-one-out-std and batch-std",
    )
    gamma: float = option(1.0, "Discount factor of token rewards (REINFORCE++)")
    policy_loss: str = option(
        "clip",
        "Policy loss: clip (PPO, arXiv 1707.06347), gspo (one ratio per sequence, arXiv 2507.18071), cispo (arXiv "
        "2506.13585), reinforce, sequence-clip (product of ratios, TRL's RLOO), sapo (a smooth gate, arXiv "
        "2511.20347), gmpo (geometric mean of clipped ratios, arXiv 2507.20673), dppo or dppo-kl (bound on the total "
        "variation or the KL to the sampler, arXiv 2602.04879), vespo (a smooth weight per sequence, arXiv "
        "2602.10693), clip-cov or kl-cov (against the fall of the entropy, arXiv 2505.22617)",
    )
    clip_low: float = option(
        0.2,
        "Lower clip range: the probability ratio is clipped at 1 - clip-low; 1 for no bound. gmpo clips its logarithm, "
        "dppo bounds the divergence",
    )
    clip_high: float = option(
        0.2,
        "Upper clip range: the probability ratio is clipped at 1 + clip-high; DAPO's clip-higher is 0.28 (arXiv "
        "2503.14476). gmpo clips its logarithm, dppo bounds the divergence",
    )
    dual_clip: float = option(
        0.0,
        "Dual clip: bound on the ratio of tokens with a negative advantage, above 1 (arXiv 1912.09729); 0 for none",
    )
    ratio_cap: float = option(20.0, "Maximum ratio with --policy-loss dppo and dppo-kl, at least 1; 0 for none")
    sapo_temperature_pos: float = option(1.0, "Temperature of sapo's gate for positive advantages, above 0")
    sapo_temperature_neg: float = option(1.05, "Temperature of sapo's gate for other advantages, above 0")
    vespo_k_pos: float = option(2.0, "Power of the ratio in vespo's weight, for advantages that are not negative")
    vespo_lambda_pos: float = option(3.0, "Decay with the ratio of vespo's weight, for the same advantages")
    vespo_k_neg: float = option(3.0, "Power of the ratio in vespo's weight, for negative advantages")
    vespo_lambda_neg: float = option(2.0, "Decay with the ratio of vespo's weight, for negative advantages")
    cov_share: float = option(2e-4, "Share of the tokens that clip-cov leaves out and kl-cov penalizes, above 0")
    cov_low: float = option(1.0, "Covariance above which clip-cov may leave a token out")
    cov_high: float = option(5.0, "Covariance below which clip-cov may leave a token out")
    cov_kl_coef: float = option(0.1, "Weight of kl-cov's penalty, per nat")
    top_entropy: float = option(
        1.0,
        "Share of the tokens, those of highest entropy, that the policy loss learns from (arXiv 2506.01939: 0.2)",
    )
    off_policy_threshold: float = option(
        0.0,
        "Leave out sequences with a negative advantage whose tokens became less likely than when they were sampled, by "
        "more nats on average (DeepSeek-V3.2, arXiv 2512.02556); 0 for none",
    )
    aggregation: str = option(
        "token-mean",
        "Reduction of token losses to the loss: token-mean (DAPO), sequence-mean-token-mean (GRPO), "
        "sequence-mean-token-sum, token-sum-by-length (older verl's constant) or sequence-mean-token-sum-by-length "
        "(Dr. GRPO's constant, as in TRL and verl)",
    )
    kl_place: str = option(
        "none",
        "Where the KL to the reference is applied: none, reward (subtracted per sequence, before the baseline), "
        "token-reward (subtracted per token, after the baseline) or loss",
    )
    kl_estimator: str = option(
        "k3",
        "KL estimator: k1, k2, k3 (http://joschu.net/blog/kl-approx.html), or k1+, k3+: the same values with the "
        "gradient of k2 (verl)",
    )
    kl_coef: float = option(0.0, "KL coefficient, per nat; the initial value if it is adaptive")
    kl_unbiased: bool = option(
        False,
        "Weight the KL in the loss by the policy's ratio, for an unbiased gradient (DeepSeek-V3.2)",
    )
    sampler_coef: float = option(
        0.0,
        "Weight of the squared difference of each token's log-probability from the sampler's (Kimi K2.5, arXiv "
        "2602.02276)",
    )
    kl_target: float = option(
        0.0,
        "Target KL per response, in nats, of an adaptive coefficient (arXiv 1909.08593); 0 keeps it fixed",
    )
    kl_horizon: float = option(
        10_000.0,
        "Responses over which a persistent error changes an adaptive coefficient by a fifth",
    )
    dynamic_sampling: int = option(
        0,
        "Maximum resampling rounds per step for groups without variance (DAPO); 0 keeps these groups",
    )
    overlong_buffer: float = option(
        0.0,
        "Final fraction of the maximum response length in which length is penalized (DAPO: 0.2); 0 for none",
    )
    overlong_factor: float = option(1.0, "Penalty of a response of maximum length")
    mask_cut_off: bool = option(False, "Exclude cut-off responses from the loss (DAPO's overlong filtering)")
    entropy_coef: float = option(0.0, "Entropy bonus coefficient, per nat; the initial value if it is adaptive")
    entropy_target: float = option(
        0.0,
        "Entropy, in nats per token, at or below which an adaptive bonus is applied and grows (Skywork-OR1, arXiv "
        "2505.22312); 0 keeps the coefficient fixed",
    )
    entropy_change: float = option(0.005, "Change of an adaptive entropy coefficient in a step")
    entropy_coef_max: float = option(1.0, "Largest adaptive entropy coefficient")
    correction: str = option(
        "none",
        "Importance weights for differences between sampler and trainer: none, truncated (TIS) or masked (IcePop) per "
        "token, sequence-truncated, sequence-masked (TRL), geometric-truncated or geometric-masked (OpenRLHF, NeMo-RL)",
    )
    correction_low: float = option(0.0, "Minimum importance weight")
    correction_high: float = option(2.0, "Maximum importance weight")
    correction_threshold: float = option(
        1e-3,
        "Mean log-probability difference, in nats per token, above which the correction is applied",
    )

    @classmethod
    def from_options(cls, given: Mapping[str, Any]) -> "Algorithm":
        """The algorithm for the options that the user gave, by field name; they may include a preset.

        Raises:
            ValueError: a preset, option or choice does not exist, or choices contradict each other.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                nearest = find_nearest(name, known)
                advice = f"did you mean {flag(nearest)}?" if nearest else f"use {', '.join(map(flag, known))}"
                raise ValueError(f"{flag(name)} is not an option of the algorithm; {advice}")
        return cls(**with_preset(given))

    def __post_init__(self) -> None:
        preset_choices(self.preset)
        for name, known in CHOICES.items():
            check_choice(name, getattr(self, name), known)
        check_numbers(self)
        check_kl(self)
        check_agreement(self)
        check_rewards(self)

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of a reference are read."""
        return self.kl_place != "none"

    @property
    def is_decoupled(self) -> bool:
        """Whether each reward is normalized by itself."""
        return self.reward_aggregation == "normalize-then-sum"

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the entropy counts in the loss, or may."""
        return bool(self.entropy_coef or self.entropy_target)

    def check_group_size(self, name: str, group_size: int) -> None:
        """Raises ValueError if groups of `group_size` samples (option `name`) are too small for baseline and scale."""
        if group_size < 2 and (self.baseline in GROUP_BASELINES or self.scale in GROUP_SCALES):
            raise ValueError(
                f"{flag(name)}={group_size} leaves no other sample for --baseline={self.baseline} with "
                f"--scale={self.scale} to compare with; use 2 or more, or --baseline batch-mean --scale batch-whiten"
            )
        if group_size < 3 and self.scale == "leave-one-out-std":
            raise ValueError(
                f"{flag(name)}={group_size} leaves one other sample, without a deviation for --scale={self.scale}; "
                "use 3 or more, or --scale group-std"
            )


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises ValueError unless the option `name` has one of the `known` words."""
    if value not in known:
        nearest = find_nearest(str(value), known)
        advice = f"did you mean {nearest}?" if nearest else f"use {', '.join(known)}"
        raise ValueError(f"{flag(name)}={value!r} must be one of {', '.join(known)}; {advice}")


def check_numbers(algorithm: Algorithm) -> None:
    """Raises ValueError for a number that is out of its range."""
    for field in fields(algorithm):
        if isinstance(field.default, float):
            check_at_least(field.name, getattr(algorithm, field.name), 0)
    check_count("dynamic_sampling", algorithm.dynamic_sampling, 0)
    for name in ("gamma", "clip_low"):
        check_between(name, getattr(algorithm, name), 0, 1)
    for name in ("kl_horizon", "sapo_temperature_pos", "sapo_temperature_neg"):
        check_above(name, getattr(algorithm, name), 0)
    if algorithm.ratio_cap:
        check_at_least("ratio_cap", algorithm.ratio_cap, 1)
    for name in ("overlong_buffer", "top_entropy", "cov_share"):
        check_between(name, getattr(algorithm, name), 0, 1)
    check_above("cov_share", algorithm.cov_share, 0)
    if algorithm.dual_clip:
        check_above("dual_clip", algorithm.dual_clip, 1)
    if algorithm.correction_low > 1:
        raise ValueError(
            f"--correction-low={algorithm.correction_low} is above 1, the weight of a token without a "
            "difference; lower it"
        )
    check_at_least("correction_high", algorithm.correction_high, 1)


def check_kl(algorithm: Algorithm) -> None:
    """Raises ValueError for a KL term that has no effect, or a different one than it seems to have."""
    place, estimator = algorithm.kl_place, algorithm.kl_estimator
    if place == "none" and (algorithm.kl_coef or algorithm.kl_target):
        name = "kl_coef" if algorithm.kl_coef else "kl_target"
        raise ValueError(
            f"{flag(name)}={getattr(algorithm, name)} has no effect with --kl-place=none; add --kl-place loss, reward "
            "or token-reward"
        )
    if place != "none" and not algorithm.kl_coef:
        raise ValueError(
            f"--kl-place={place} needs a coefficient, but --kl-coef is 0; give --kl-coef 0.01, or --kl-place none"
        )
    if place == "loss" and estimator == "k1" and not algorithm.kl_unbiased:
        raise ValueError(
            "--kl-estimator=k1 with --kl-place=loss only adds noise, because the expected gradient of k1 is zero; "
            "use k2, k3 or k3+, or --kl-place reward"
        )
    if place != "loss" and estimator.endswith("+"):
        raise ValueError(
            f"--kl-estimator={estimator} changes only the gradient, and --kl-place={place} has none; use "
            f"{estimator.removesuffix('+')}, or --kl-place loss"
        )
    if algorithm.kl_unbiased and place != "loss":
        raise ValueError(
            f"--kl-unbiased changes only the gradient, and --kl-place={place} has none; add --kl-place loss"
        )
    if algorithm.kl_unbiased and estimator.endswith("+"):
        raise ValueError(
            f"--kl-unbiased and --kl-estimator={estimator} both correct the same gradient; give one of them"
        )


def check_agreement(algorithm: Algorithm) -> None:
    """Raises ValueError for choices that contradict each other."""
    if algorithm.baseline == "batch-mean" and algorithm.scale in GROUP_SCALES:
        raise ValueError(
            f"--scale={algorithm.scale} is a statistic of a group, with which --baseline=batch-mean does not compare; "
            "use --scale batch-whiten, or --baseline group-mean"
        )
    if algorithm.dual_clip and algorithm.policy_loss != "clip":
        raise ValueError(
            f"--dual-clip={algorithm.dual_clip} belongs to --policy-loss=clip, not to {algorithm.policy_loss}; "
            "leave it out"
        )
    if algorithm.dual_clip and algorithm.dual_clip <= 1 + algorithm.clip_high:
        raise ValueError(
            f"--dual-clip={algorithm.dual_clip} must be above 1 + --clip-high={algorithm.clip_high}; raise it"
        )
    if algorithm.correction != "none" and algorithm.policy_loss in SAMPLER_LOSSES:
        raise ValueError(
            f"--correction={algorithm.correction} weights for the sampler's difference a second time: the ratio of "
            f"--policy-loss={algorithm.policy_loss} is that to the sampler; leave it out"
        )
    if algorithm.policy_loss == "clip-cov" and algorithm.cov_low >= algorithm.cov_high:
        raise ValueError(
            f"--cov-low={algorithm.cov_low} must be below --cov-high={algorithm.cov_high}, or no token is between "
            "them; lower it"
        )
    if algorithm.entropy_target and algorithm.entropy_coef > algorithm.entropy_coef_max:
        raise ValueError(
            f"--entropy-coef={algorithm.entropy_coef} is above --entropy-coef-max={algorithm.entropy_coef_max}, the "
            "largest value of an adaptive coefficient; lower it"
        )
    if algorithm.dynamic_sampling and algorithm.baseline not in GROUP_BASELINES:
        raise ValueError(
            f"--dynamic-sampling={algorithm.dynamic_sampling} resamples groups without variance, but "
            f"--baseline={algorithm.baseline} learns from them; leave one of the two out"
        )


def check_rewards(algorithm: Algorithm) -> None:
    """Raises ValueError for choices that need one sum of the rewards where each is normalized by itself."""
    if not algorithm.is_decoupled:
        return
    for name, known in (
        ("baseline", ("group-mean", "leave-one-out")),
        ("scale", ("group-std", "leave-one-out-std")),
        ("kl_place", ("none", "token-reward", "loss")),
    ):
        value = getattr(algorithm, name)
        if value not in known:
            raise ValueError(
                f"{flag(name)}={value} does not normalize each reward in its group, as --reward-aggregation="
                f"{algorithm.reward_aggregation} does (arXiv 2601.05242); use {' or '.join(known)}"
            )


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The choices that follow from the options that the user gave, by field name of `Algorithm`.

    They are the preset's if the options name one, and given options win. A choice of the preset that has no meaning
    next to a given one is dropped: the weight of a KL that is turned off, the estimator of one that is moved, the dual
    clip of another policy loss, the correction of a policy loss that has its own.

    Raises:
        ValueError: the preset does not exist.
    """
    chosen = preset_choices(given.get("preset"))
    moved = KL_AT.get(given.get("kl_place", ""), {}) if given.get("kl_place") != chosen.get("kl_place") else {}
    dropped: dict[str, Any] = {"dual_clip": 0.0} if given.get("policy_loss", "clip") != "clip" else {}
    if given.get("policy_loss") in SAMPLER_LOSSES:
        dropped["correction"] = "none"
    return {**chosen, **moved, **dropped, **given}


def preset_choices(preset: str | None) -> dict[str, Any]:
    """The choices of a preset; empty without one."""
    if preset is None:
        return {}
    if preset not in PRESETS:
        nearest = find_nearest(preset, PRESETS)
        advice = f"did you mean {nearest}?" if nearest else "choose one of them"
        raise ValueError(f"--preset={preset!r} must be one of {', '.join(PRESETS)}; {advice}")
    return PRESETS[preset]
