"""What the figures of a step are called in the dashboards of other frameworks: one table. Needs no torch.

Recipes, plots and reports know our names alone: names change where `metrics.jsonl` and trackers are written and where
`metrics.jsonl` is read. A figure has a counterpart where theirs measures the same quantity; others keep our name,
as does one whose new name is another figure's of the same line: `kl_per_token` of a run that has a `kl` too.

Sources: TRL's trainers of PPO, GRPO, DPO and KTO; verl's `trainer/ppo/metric_utils.py`, `utils/py_functional.py` and
its actor and critic workers; OpenRLHF's `trainer/ppo_trainer.py`, `trainer/ray/ppo_actor.py`, `trainer/dpo_trainer.py`.
"""

from collections.abc import Mapping
from typing import Any

FRAMEWORKS = ("trl", "verl", "openrlhf")
TABLE: dict[str, tuple[str | None, str | None, str | None]] = {
    # ours                     TRL                        verl                          OpenRLHF
    "score":                    ("reward",                 "critic/score/mean",          "reward"),
    "reward_with_kl":           ("objective/rlhf_reward",  "critic/rewards/mean",        "return"),
    "kl_per_token":             ("kl",                     "actor/reward_kl_penalty",    "kl"),
    "kl":                       (None,                     "actor/kl_loss",              None),
    "kl_per_sequence":          ("objective/kl",           None,                         None),
    "entropy":                  ("entropy",                "actor/entropy",              "entropy"),
    "length":                   ("completions/mean_length", "response_length/mean",      "response_length"),
    "cut_off_share":            ("completions/clipped_ratio", "response_length/clip_ratio", "truncated"),
    "policy_loss":              ("loss/policy_avg",        "actor/pg_loss",              "policy_loss"),
    "value_loss":               ("loss/value_avg",         "critic/vf_loss",             "critic_loss"),
    "approx_kl":                ("policy/approxkl_avg",    "actor/ppo_kl",               "ppo_kl"),
    "clip_fraction":            ("clip_ratio/region_mean", "actor/pg_clipfrac",          "ppo_clip_ratio"),
    "ratio":                    ("val/ratio",              None,                         None),
    "value_explained_variance": (None,                     "critic/vf_explained_var",    None),
    "groups_without_variance":  ("frac_reward_zero_std",   None,                         None),
    "correction_weight":        ("sampling/importance_sampling_ratio/mean", None,        None),
    "logprob_difference_mean":  ("sampling/sampling_logp_difference/mean", None,         None),
    "logprob_difference_max":   ("sampling/sampling_logp_difference/max", None,          None),
    "grad_norm":                ("grad_norm",              "actor/grad_norm",            None),
    "actor_grad_norm":          (None,                     None,                         "actor_grad_norm"),
    "critic_grad_norm":         (None,                     "critic/grad_norm",           "critic_grad_norm"),
    "loss":                     ("loss",                   "train/loss",                 "loss"),
    "learning_rate":            ("learning_rate",          "actor/lr",                   "lr"),
    "critic_learning_rate":     (None,                     "critic/lr",                  "critic_lr"),
    "chosen_reward":            ("rewards/chosen",         None,                         "chosen_reward"),
    "rejected_reward":          ("rewards/rejected",       None,                         "reject_reward"),
    "reward_margin":            ("rewards/margins",        None,                         None),
    "accuracy":                 ("rewards/accuracies",     None,                         "acc"),
    "e2e_seconds":              ("step_time",              "timing_s/step",              None),
    "generate_seconds":         (None,                     "timing_s/gen",               None),
}  # fmt: skip
TRACKER_PREFIX = {"trl": "train/", "openrlhf": "train/"}
"""What these frameworks put before each name on its way to a tracker."""


def names_of(framework: str | None) -> dict[str, str]:
    """From our names to those of `framework`, of `FRAMEWORKS`, where it has one; None has none."""
    if framework is None:
        return {}
    column = FRAMEWORKS.index(framework)
    return {ours: theirs for ours, row in TABLE.items() if (theirs := row[column]) is not None}


def rename(figures: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`figures` under the names that `names` maps theirs to; one whose new name is taken keeps the old one."""
    return {new if (new := names.get(name, name)) not in figures else name: value for name, value in figures.items()}


def to_framework(figures: Mapping[str, Any], framework: str | None) -> dict[str, Any]:
    """Figures with our names under those of `framework`."""
    return rename(figures, names_of(framework))


def from_framework(figures: Mapping[str, Any], framework: str | None) -> dict[str, Any]:
    """What `to_framework` was given."""
    return rename(figures, {theirs: ours for ours, theirs in names_of(framework).items()})
