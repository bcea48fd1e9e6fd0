"""Writes the table of presets in docs/algorithms.md from `PRESETS`: `python -m tests.tools.write_algorithms_page`.

The rest of the page is written by hand; `test_algorithms_page.py` holds it against the choices.
"""

import re
from pathlib import Path

import torch

from hybrid_engine.rlhf.algorithms import compute_advantages
from hybrid_engine.rlhf.options.algorithm import PRESETS, UNCLIPPED_LOSSES, Algorithm

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
BEGIN, END = "<!-- presets -->\n", "<!-- end of presets -->\n"
REWARDS = [0.5, -1.0, 3.0, 0.0]
HEAD = ("preset", "baseline", "scale", "policy loss", "aggregation", "KL", "other options", "0.5, -1, 3, 0 become")


def scale(algorithm: Algorithm) -> str:
    """The scale with what it is computed with."""
    if not algorithm.scale.endswith("-std"):
        return algorithm.scale
    return f"{algorithm.scale}, {algorithm.scale_divisor}, +{algorithm.scale_eps:g}"


def policy_loss(algorithm: Algorithm) -> str:
    """The policy loss with its bounds."""
    if algorithm.policy_loss in UNCLIPPED_LOSSES:
        return algorithm.policy_loss
    dual = f", dual {algorithm.dual_clip:g}" if algorithm.dual_clip else ""
    return f"{algorithm.policy_loss} -{algorithm.clip_low:g}/+{algorithm.clip_high:g}{dual}"


def kl(algorithm: Algorithm) -> str:
    """Where the KL counts, by which estimate and with which weight."""
    if not algorithm.needs_reference:
        return "none"
    return f"{algorithm.kl_place}, {algorithm.kl_estimator}, {algorithm.kl_coef:g}"


def other(algorithm: Algorithm) -> str:
    """The options that only some presets set."""
    found = []
    if algorithm.dynamic_sampling:
        found.append(f"dynamic-sampling {algorithm.dynamic_sampling}")
    if algorithm.overlong_buffer:
        found.append(f"overlong-buffer {algorithm.overlong_buffer:g}, overlong-factor {algorithm.overlong_factor:g}")
    if algorithm.sampler_coef:
        found.append(f"sampler-coef {algorithm.sampler_coef:g}")
    if algorithm.correction != "none":
        found.append(f"correction {algorithm.correction} up to {algorithm.correction_high:g}")
    return "; ".join(found)


def advantages(algorithm: Algorithm) -> str:
    """What the preset makes of one group of rewards, without a KL."""
    zeros, mask = torch.zeros(4, 1, dtype=torch.float64), torch.ones(4, 1).bool()
    scores = torch.tensor(REWARDS, dtype=torch.float64)
    found = compute_advantages(algorithm, scores, 4, zeros, zeros, mask, 0.0).flatten().tolist()
    return ", ".join(f"{number:.3f}" for number in found)


def preset_table() -> str:
    """The table, a row for each preset."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for name in PRESETS:
        chosen = Algorithm.from_options({"preset": name})
        cells = (chosen.baseline, scale(chosen), policy_loss(chosen), chosen.aggregation, kl(chosen), other(chosen))
        rows.append((f"`{name}`", *cells, advantages(chosen)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    """Puts the table into the page."""
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + preset_table() + END, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
