"""Losses of preference recipes: DPO and its variants for pairs of answers, KTO for labelled answers.

Most losses of pairs read a pair through one number, by how much more the policy prefers the chosen answer than the
reference does:

    h = r_chosen - r_rejected,  r = log pi(answer) - log pi_ref(answer)

Some read both log-ratios r on their own, and the losses in `REFERENCE_FREE` read log pi alone.

KTO learns from single answers that are each labelled desirable or undesirable. The value of an answer is how much
likelier it is under the policy than under the reference, compared with a reference point: how much likelier any answer
is under the policy, estimated on prompts with the answers of other prompts.

B: pairs, or answers. Every loss returns one number per pair or answer, `[B]`, to be minimized; the caller divides by
their number in the whole optimizer step, so that neither micro-batches nor processes change it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log, log1p
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import softplus

DISCOPOP_TEMPERATURE = 0.05
"""The tau of DiscoPOP's paper."""


class PairLogprobs(NamedTuple):
    """Log-probabilities of B pairs under policy and reference, each summed over the answer's tokens."""

    chosen: torch.Tensor
    """`[B]`, of the policy; carries a gradient."""
    rejected: torch.Tensor
    """`[B]`, of the policy; carries a gradient."""
    chosen_ref: torch.Tensor
    """`[B]`, of the reference."""
    rejected_ref: torch.Tensor
    """`[B]`, of the reference."""
    chosen_lengths: torch.Tensor
    """`[B]`, tokens of the chosen answers, at least 1."""
    rejected_lengths: torch.Tensor
    """`[B]`, tokens of the rejected answers, at least 1."""
    on_policy_weights: torch.Tensor | None = None
    """`[B]`, exp of the `alignment` of both answers, without a gradient; None: every pair counts alike."""


def log_ratio_margins(pairs: PairLogprobs) -> torch.Tensor:
    """`[B]`: h, in nats; 0 where policy and reference agree."""
    _check(pairs)
    return (pairs.chosen - pairs.chosen_ref) - (pairs.rejected - pairs.rejected_ref)


def sigmoid_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """DPO: -log sigmoid(beta * h); log 2 where policy and reference agree.

    Source: Rafailov et al., arXiv 2305.18290, equation 7.
    """
    return softplus(-beta * log_ratio_margins(pairs))


def conservative_loss(pairs: PairLogprobs, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO under labels of which a fraction `label_smoothing` is assumed to be wrong: the expected sigmoid loss.

        -(1 - e) * log sigmoid(beta * h) - e * log sigmoid(-beta * h)

    Source: Mitchell, "A note on DPO with noisy preferences & relationship to IPO" (2023).
    """
    logits = beta * log_ratio_margins(pairs)
    return (1 - label_smoothing) * softplus(-logits) + label_smoothing * softplus(logits)


def robust_loss(pairs: PairLogprobs, beta: float, label_smoothing: float) -> torch.Tensor:
    """DPO whose expectation over labels flipped with probability `label_smoothing` is that under clean labels.

        (-(1 - e) * log sigmoid(beta * h) + e * log sigmoid(-beta * h)) / (1 - 2 * e),  e below one half

    Source: Chowdhury et al., arXiv 2403.00409, section 3.
    """
    assert label_smoothing < 0.5, f"{label_smoothing=}"
    logits = beta * log_ratio_margins(pairs)
    kept, flipped = (1 - label_smoothing) * softplus(-logits), label_smoothing * softplus(logits)
    return (kept - flipped) / (1 - 2 * label_smoothing)


def hinge_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """SLiC's hinge on DPO's logits: max(0, 1 - beta * h).

    Source: Zhao et al., arXiv 2305.10425; on logits relative to a reference as in Liu et al.,
    arXiv 2309.06657.
    """
    return torch.relu(1 - beta * log_ratio_margins(pairs))


def ipo_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """IPO on summed log-probabilities, as the paper has it: (h - 1 / (2 * beta))^2, in square nats.

    Source: Azar et al., arXiv 2310.12036, equation 17, whose tau is `beta`.
    """
    return (log_ratio_margins(pairs) - 1 / (2 * beta)).square()


def ipo_length_normalised_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """IPO on log-probabilities per token, so that a long answer's target is as far away as a short one's.

    Source: TRL, `dpo_trainer.py`, `loss_type="ipo"`; OpenRLHF sums.
    """
    chosen, rejected = _log_ratios_per_token(pairs)
    return (chosen - rejected - 1 / (2 * beta)).square()


def sigmoid_length_normalised_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """DPO on log-probabilities per token: -log sigmoid(beta * (r_chosen / |chosen| - r_rejected / |rejected|)).

    Source: Lambert et al., "Tulu 3", arXiv 2411.15124, length-normalized DPO; TRL, `loss_type="sigmoid_norm"`.
    """
    chosen, rejected = _log_ratios_per_token(pairs)
    return softplus(-beta * (chosen - rejected))


def exo_loss(pairs: PairLogprobs, beta: float, label_smoothing: float) -> torch.Tensor:
    """EXO's reverse KL of the policy's preference from labels of which a fraction e is assumed to be wrong.

        q * log(q / (1 - e)) + (1 - q) * log((1 - q) / e),  q = sigmoid(beta * h),  e above 0

    Source: Ji et al., arXiv 2402.00856, equation 16.
    """
    assert label_smoothing > 0, f"{label_smoothing=}"
    logits = beta * log_ratio_margins(pairs)
    chosen = torch.sigmoid(logits) * (-softplus(-logits) - log1p(-label_smoothing))
    return chosen + torch.sigmoid(-logits) * (-softplus(logits) - log(label_smoothing))


def nca_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """NCA for a pair: -log s(beta r_chosen) - (log s(-beta r_chosen) + log s(-beta r_rejected)) / 2, s the sigmoid.

    It raises the chosen answer's likelihood itself, which DPO may lower.

    Source: Chen et al., arXiv 2402.05369, for pairs; TRL, `loss_type="nca_pair"`.
    """
    chosen, rejected = _implicit_rewards(pairs, beta)
    return softplus(-chosen) + (softplus(chosen) + softplus(rejected)) / 2


def bco_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """A binary classifier of the answers: -log sigmoid(beta * r_chosen) - log sigmoid(-beta * r_rejected).

    Source: Jung et al., arXiv 2404.04656, without the shift of the rewards; TRL, `loss_type="bco_pair"`.
    """
    chosen, rejected = _implicit_rewards(pairs, beta)
    return softplus(-chosen) + softplus(rejected)


def sppo_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """SPPO where the chosen answer always wins: (r_chosen - 1 / (2 beta))^2 + (r_rejected + 1 / (2 beta))^2.

    Source: Wu et al., arXiv 2405.00675, equation 4.7, with probabilities of 1 and 0.
    """
    chosen, rejected = _log_ratios(pairs)
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """APO for chosen answers better than the policy's: 1 - sigmoid(beta * r_chosen) + sigmoid(beta * r_rejected).

    Source: D'Oosterlinck et al., arXiv 2408.06266, equation 7.
    """
    chosen, rejected = _implicit_rewards(pairs, beta)
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """APO for chosen answers worse than the policy's: sigmoid(beta * r_chosen) + 1 - sigmoid(beta * h).

    Both answers become less likely, the rejected one more so.

    Source: D'Oosterlinck et al., arXiv 2408.06266, equation 8.
    """
    chosen, rejected = _implicit_rewards(pairs, beta)
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def discopop_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """DiscoPOP's log-ratio modulated loss, with x = beta * h and m = sigmoid(x / 0.05).

        (1 - m) * -log sigmoid(x) + m * exp(-x)

    Source: Lu et al., arXiv 2406.08414, equation 5.
    """
    logits = beta * log_ratio_margins(pairs)
    modulation = torch.sigmoid(logits / DISCOPOP_TEMPERATURE)
    return (1 - modulation) * softplus(-logits) + modulation * torch.exp(-logits)


def simpo_loss(pairs: PairLogprobs, beta: float, target_margin: float) -> torch.Tensor:
    """SimPO: -log sigmoid(beta * (log pi(chosen) / |chosen| - log pi(rejected) / |rejected|) - target_margin).

    With a weight of `sft_loss` above 0 it is CPO-SimPO.

    Source: Meng et al., arXiv 2405.14734, equation 6, whose gamma is `target_margin`.
    """
    chosen, rejected = _logprobs_per_token(pairs)
    return softplus(target_margin - beta * (chosen - rejected))


def orpo_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """ORPO's odds-ratio term, which its paper adds to `sft_loss` with the weight `beta`.

        -beta * log sigmoid(log(odds(chosen) / odds(rejected))),  odds = p / (1 - p)

    p is the geometric mean of the probabilities of an answer's tokens.

    Source: Hong et al., arXiv 2403.07691, equations 4 and 7, whose lambda is `beta`.
    """
    chosen, rejected = _logprobs_per_token(pairs)
    return beta * softplus(_log_odds(rejected) - _log_odds(chosen))


def cpo_loss(pairs: PairLogprobs, beta: float) -> torch.Tensor:
    """CPO's preference term: -log sigmoid(beta * (log pi(chosen) - log pi(rejected))); its paper adds `sft_loss`.

    Source: Xu et al., arXiv 2401.08417, equation 3.
    """
    _check(pairs)
    return softplus(-beta * (pairs.chosen - pairs.rejected))


def _log_ratios(pairs: PairLogprobs) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B]` each: r of the chosen and of the rejected answers, in nats."""
    _check(pairs)
    return pairs.chosen - pairs.chosen_ref, pairs.rejected - pairs.rejected_ref


def _implicit_rewards(pairs: PairLogprobs, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = _log_ratios(pairs)
    return beta * chosen, beta * rejected


def _log_ratios_per_token(pairs: PairLogprobs) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = _log_ratios(pairs)
    return chosen / pairs.chosen_lengths, rejected / pairs.rejected_lengths


def _logprobs_per_token(pairs: PairLogprobs) -> tuple[torch.Tensor, torch.Tensor]:
    _check(pairs)
    return pairs.chosen / pairs.chosen_lengths, pairs.rejected / pairs.rejected_lengths


def _log_odds(logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)); a p of 1, whose odds are infinite, counts as the largest number below 1."""
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return logprobs - torch.log(-torch.expm1(logprobs))


def sft_loss(pairs: PairLogprobs) -> torch.Tensor:
    """The term that keeps the chosen answer likely: its negative log-likelihood per token, in nats.

    Added to any of the losses with a weight. Each pair weighs the same, whatever the length of its answer.

    Source: Pang et al., arXiv 2404.19733, with the length of the answer alone as the divisor.
    """
    _check(pairs)
    return -pairs.chosen / pairs.chosen_lengths


def best_and_worst(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pair of answers to each prompt: the first with the highest score and the first with the lowest.

    Args:
        scores: `[B, G]`, of G answers to each of B prompts; nan for an answer without a score, which is not in a pair.

    Returns:
        `[B]` int64 each, the columns of the chosen and of the rejected answer, and `[B]` bool, False if all scores of a
        prompt are equal, or there are fewer than two, so that there is no pair.
    """
    assert scores.ndim == 2 and scores.shape[1] >= 2, f"{scores.shape=}"
    best, worst = scores.nan_to_num(nan=-inf).max(dim=1), scores.nan_to_num(nan=inf).min(dim=1)
    return best.indices, worst.indices, best.values > worst.values


LOSSES: dict[str, Callable[[PairLogprobs, float], torch.Tensor]] = {
    "sigmoid": sigmoid_loss,
    "hinge": hinge_loss,
    "ipo": ipo_loss,
    "ipo-length-normalised": ipo_length_normalised_loss,
    "sigmoid-length-normalised": sigmoid_length_normalised_loss,
    "apo-zero": apo_zero_loss,
    "apo-down": apo_down_loss,
    "nca": nca_loss,
    "bco": bco_loss,
    "sppo": sppo_loss,
    "discopop": discopop_loss,
    "cpo": cpo_loss,
    "orpo": orpo_loss,
}
"""The losses of `(pairs, beta)` by name."""


SMOOTHED_LOSSES: dict[str, Callable[[PairLogprobs, float, float], torch.Tensor]] = {
    "conservative": conservative_loss,
    "robust": robust_loss,
    "exo": exo_loss,
}
"""The losses of `(pairs, beta, label_smoothing)` by name."""
MARGIN_LOSSES: dict[str, Callable[[PairLogprobs, float, float], torch.Tensor]] = {"simpo": simpo_loss}
"""The losses of `(pairs, beta, target_margin)` by name."""
EVERY_LOSS = (*LOSSES, *SMOOTHED_LOSSES, *MARGIN_LOSSES)
REFERENCE_FREE = frozenset({"simpo", "orpo", "cpo"})
"""The losses that read no log-probability of a reference."""
REWARDS_PER_TOKEN = frozenset({"simpo", "orpo"})
"""The losses whose implicit reward is a mean over the answer's tokens, not a sum."""
SFT_LOSSES = frozenset({"orpo", "cpo"})
"""The losses whose papers add `sft_loss` with the weight 1."""
BETAS = {"simpo": 2.0, "sigmoid-length-normalised": 5.0}
"""Strengths that the papers use: a mean over tokens is smaller than a sum. The other losses take `BETA`."""
BETA = 0.1
TARGET_MARGIN = 0.5
"""SimPO's margin, in the units of beta times nats per token; TRL's default."""


@dataclass(frozen=True, kw_only=True)
class PairLoss:
    """A loss of pairs with its options; built by `build_loss`."""

    compute: Callable[[PairLogprobs], torch.Tensor]
    """`[B]`, the preference term."""
    beta: float
    sft_weight: float = 0.0
    is_per_token: bool = False
    """Whether the implicit rewards are means over tokens."""
    is_weighted: bool = False
    """Whether pairs come with `on_policy_weights`."""

    def __call__(self, pairs: PairLogprobs) -> torch.Tensor:
        """`[B]`, the loss of each pair; WPO's weights apply to the preference term alone."""
        losses = self.compute(pairs)
        if pairs.on_policy_weights is not None:
            losses = losses * pairs.on_policy_weights
        return losses + self.sft_weight * sft_loss(pairs) if self.sft_weight else losses

    def metrics(self, pairs: PairLogprobs) -> dict[str, torch.Tensor]:
        """`pair_metrics` by this loss's implicit reward."""
        return pair_metrics(pairs, self.beta, is_per_token=self.is_per_token)


def build_loss(
    name: str,
    beta: float,
    label_smoothing: float = 0.0,
    sft_weight: float = 0.0,
    target_margin: float = TARGET_MARGIN,
    *,
    is_weighted: bool = False,
) -> PairLoss:
    """The loss `name`, plus `sft_weight` times `sft_loss` unless that is 0.

    Args:
        name: one of `EVERY_LOSS`.
        beta: how strongly the policy is held to the reference, above 0; for IPO in 1 / nats; without a reference how
            steep the loss is, and for ORPO the weight of its term.
        label_smoothing: the fraction of labels that is assumed to be wrong, from 0 to below one half; only
            `SMOOTHED_LOSSES` read it.
        sft_weight: at least 0.
        target_margin: at least 0; only `MARGIN_LOSSES` read it.
        is_weighted: whether pairs come with `on_policy_weights`.
    """
    assert beta > 0 and 0 <= label_smoothing < 0.5 and sft_weight >= 0, f"{beta=} {label_smoothing=} {sft_weight=}"

    def compute(pairs: PairLogprobs) -> torch.Tensor:
        if name in SMOOTHED_LOSSES:
            return SMOOTHED_LOSSES[name](pairs, beta, label_smoothing)
        if name in MARGIN_LOSSES:
            return MARGIN_LOSSES[name](pairs, beta, target_margin)
        return LOSSES[name](pairs, beta)

    return PairLoss(
        compute=compute,
        beta=beta,
        sft_weight=sft_weight,
        is_per_token=name in REWARDS_PER_TOKEN,
        is_weighted=is_weighted,
    )


@torch.no_grad()
def alignment(logprobs: torch.Tensor, sharper: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """How nearly the policy would have written each answer itself: the log of WPO's weight, around 0 if it did.

        alignment = mean_t (log pi(y_t) - log sum_v pi(v)^2)

    The second term needs no distribution: a temperature of one half squares the probabilities, pi_half(y) = pi(y)^2 /
    sum_v pi(v)^2, so the difference is log pi_half(y) - log pi(y).

    Args:
        logprobs: `[B, T]`, of the answers' tokens.
        sharper: `[B, T]`, the same at half the temperature.
        mask: `[B, T]` bool, True on learned tokens, at least one in a row.

    Returns:
        `[B]`, without a gradient.

    Source: Zhou et al., arXiv 2406.11827, with sampled alignment; TRL, `use_weighting`.
    """
    assert logprobs.shape == sharper.shape == mask.shape, f"{logprobs.shape=} {sharper.shape=} {mask.shape=}"
    return torch.where(mask, sharper - logprobs, 0.0).sum(dim=1) / mask.sum(dim=1)


@torch.no_grad()
def pair_metrics(pairs: PairLogprobs, beta: float, *, is_per_token: bool = False) -> dict[str, torch.Tensor]:
    """DPO's implicit reward, beta * (log pi - log pi_ref), and its accuracy, for each pair.

    Args:
        pairs: of B pairs; without a reference its log-probabilities are 0.
        beta: factor of the rewards.
        is_per_token: whether a reward is divided by its answer's length, as in SimPO.

    Returns:
        `[B]` each: `chosen_reward`, `rejected_reward`, their difference `reward_margin`, and `accuracy`: 1 where the
        chosen answer has the higher reward, 0 where the rejected one has it, and one half for a tie. Where policy and
        reference agree it is one half, as for a coin, and carries no information.
    """
    ratios = _log_ratios_per_token(pairs) if is_per_token else _log_ratios(pairs)
    chosen, rejected = (beta * ratio for ratio in ratios)
    margin = chosen - rejected
    return {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": margin,
        "accuracy": (margin.sign() + 1) / 2,
    }


def _check(pairs: PairLogprobs) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in pairs._asdict().items() if tensor is not None}
    assert len(set(shapes.values())) == 1 and pairs.chosen.ndim == 1, f"{shapes=}"


def bradley_terry_loss(
    chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """The negative log-likelihood that the chosen answer wins: -log sigmoid(chosen - rejected - margin).

    Args:
        chosen: `[B]`, scores of the chosen answers.
        rejected: `[B]`, scores of the rejected ones.
        margins: `[B]` or a number: how far apart the scores should be, larger where the preference was stronger.

    Source: Ouyang et al., arXiv 2203.02155, equation 1; margins: Touvron et al., arXiv 2307.09288, equation 2.
    """
    assert chosen.ndim == 1 and chosen.shape == rejected.shape, f"{chosen.shape=} {rejected.shape=}"
    assert not isinstance(margins, torch.Tensor) or margins.shape == chosen.shape, f"{margins.shape=}"
    return softplus(-(chosen - rejected - margins))


def centring_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The term that keeps scores around 0, which pairs do not determine: (chosen + rejected)^2. Add it with a weight.

    Args:
        chosen: `[B]`, scores of the chosen answers.
        rejected: `[B]`, scores of the rejected ones.

    Source: Eisenstein et al., arXiv 2312.09244; TRL's `center_rewards_coefficient`.
    """
    assert chosen.ndim == 1 and chosen.shape == rejected.shape, f"{chosen.shape=} {rejected.shape=}"
    return (chosen + rejected).square()


@torch.no_grad()
def kto_reference_point(log_ratios: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The estimate of KL(policy || reference) that the losses of an optimizer step are measured against, in nats.

        max(0, mean of log pi(y' | x) - log pi_ref(y' | x)),  y' an answer to another prompt than x

    Args:
        log_ratios: `[n]`, of this process's mismatched answers of the whole optimizer step, summed over their tokens.
        group: the mean is taken over the answers of all these processes, each of which must make the call.

    Returns:
        A scalar without a gradient.

    Source: Ethayarajh et al., arXiv 2402.01306, section 4.
    """
    assert log_ratios.ndim == 1, f"{log_ratios.shape=}"
    exact = log_ratios.double()
    total = torch.stack([exact.sum(), exact.new_tensor(len(exact))])
    if group is not None:
        dist.all_reduce(total, group=group)
    return (total[0] / total[1]).clamp(min=0).to(log_ratios.dtype)


def kto_loss(
    logprobs: torch.Tensor,
    logprobs_ref: torch.Tensor,
    is_desirable: torch.Tensor,
    reference_point: torch.Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """The loss of each answer: its weight, minus its value times that weight.

        desirable_weight * (1 - sigmoid(beta * (r - z)))      of a desirable answer
        undesirable_weight * (1 - sigmoid(beta * (z - r)))    of an undesirable one

    with r = logprobs - logprobs_ref and z the reference point. Half the weight where policy and reference agree.

    Args:
        logprobs: `[B]`, of the policy, summed over each answer's tokens; the only one that carries a gradient.
        logprobs_ref: `[B]`, of the reference.
        is_desirable: `[B]` bool.
        reference_point: a scalar, from `kto_reference_point`.
        beta: how strongly the policy is held to the reference, above 0.
        desirable_weight, undesirable_weight: above 0; against classes of unequal size.

    Returns:
        `[B]`, to be minimized.

    Source: Ethayarajh et al., arXiv 2402.01306, section 4.
    """
    signs, weights = _check_labelled(
        logprobs, logprobs_ref, is_desirable, reference_point, desirable_weight, undesirable_weight
    )
    return weights * torch.sigmoid(-signs * beta * (logprobs - logprobs_ref - reference_point))


def _check_labelled(
    logprobs: torch.Tensor,
    logprobs_ref: torch.Tensor,
    is_desirable: torch.Tensor,
    reference_point: torch.Tensor,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B]` each: 1 or -1, and the weight."""
    shapes = [tuple(tensor.shape) for tensor in (logprobs, logprobs_ref, is_desirable)]
    assert len(set(shapes)) == 1 and logprobs.ndim == 1, f"{shapes=}"
    assert is_desirable.dtype == torch.bool and reference_point.ndim == 0, (
        f"{is_desirable.dtype=} {reference_point.shape=}"
    )
    signs = torch.where(is_desirable, 1.0, -1.0).to(logprobs)
    return signs, torch.where(is_desirable, desirable_weight, undesirable_weight).to(logprobs)


@torch.no_grad()
def kto_metrics(
    logprobs: torch.Tensor,
    logprobs_ref: torch.Tensor,
    is_desirable: torch.Tensor,
    reference_point: torch.Tensor,
    beta: float,
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The implicit rewards, beta * (logprobs - logprobs_ref), of each kind of answer.

    Args:
        logprobs, logprobs_ref, is_desirable, reference_point, beta: as in `kto_loss`.

    Returns:
        (sum, count) each, scalars, so that micro-batches and processes without an answer of one kind can be added:
        `chosen_reward`, of the desirable answers, and `rejected_reward`; and `accuracy`, over all answers, which is 1
        for an answer on its side of the reference point, 0 on the other side and one half on the point itself, such as
        where policy and reference agree.
    """
    signs, _ = _check_labelled(logprobs, logprobs_ref, is_desirable, reference_point, 1.0, 1.0)
    ratios = logprobs - logprobs_ref
    sides = (torch.sign(signs * (ratios - reference_point)) + 1) / 2
    return {
        "chosen_reward": (beta * torch.where(is_desirable, ratios, 0.0).sum(), is_desirable.sum()),
        "rejected_reward": (beta * torch.where(is_desirable, 0.0, ratios).sum(), (~is_desirable).sum()),
        "accuracy": (sides.sum(), is_desirable.new_full((), len(ratios), dtype=torch.int64)),
    }
