"""Losses of preference recipes: DPO and its variants for pairs of answers, KTO for labelled answers.

All losses of pairs but IPO's length-normalized form read a pair through one number, by how much more the policy prefers
the chosen answer than the reference does:

    h = (log pi(chosen) - log pi_ref(chosen)) - (log pi(rejected) - log pi_ref(rejected))

KTO learns from single answers that are each labelled desirable or undesirable. The value of an answer is how much
likelier it is under the policy than under the reference, compared with a reference point: how much likelier any answer
is under the policy, estimated on prompts with the answers of other prompts.

B: pairs, or answers. Every loss returns one number per pair or answer, `[B]`, to be minimized; the caller divides by
their number in the whole optimizer step, so that neither micro-batches nor processes change it.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import softplus


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


PairLoss = Callable[[PairLogprobs], torch.Tensor]
"""`[B]`, the loss of each pair."""


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
    _check(pairs)
    chosen = (pairs.chosen - pairs.chosen_ref) / pairs.chosen_lengths
    rejected = (pairs.rejected - pairs.rejected_ref) / pairs.rejected_lengths
    return (chosen - rejected - 1 / (2 * beta)).square()


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
}
"""The losses of `(pairs, beta)` by name."""


SMOOTHED_LOSSES: dict[str, Callable[[PairLogprobs, float, float], torch.Tensor]] = {
    "conservative": conservative_loss,
    "robust": robust_loss,
}
"""The losses of `(pairs, beta, label_smoothing)` by name."""


def build_loss(name: str, beta: float, label_smoothing: float = 0.0, sft_weight: float = 0.0) -> PairLoss:
    """The loss `name`, plus `sft_weight` times `sft_loss` unless that is 0.

    Args:
        name: one of `LOSSES`, or of `SMOOTHED_LOSSES`; only these read `label_smoothing`.
        beta: how strongly the policy is held to the reference, above 0; for IPO in 1 / nats.
        label_smoothing: the fraction of labels that is assumed to be wrong, from 0 to below one half.
        sft_weight: at least 0.
    """
    assert beta > 0 and 0 <= label_smoothing < 0.5 and sft_weight >= 0, f"{beta=} {label_smoothing=} {sft_weight=}"

    def loss(pairs: PairLogprobs) -> torch.Tensor:
        if name in SMOOTHED_LOSSES:
            return SMOOTHED_LOSSES[name](pairs, beta, label_smoothing)
        return LOSSES[name](pairs, beta)

    return (lambda pairs: loss(pairs) + sft_weight * sft_loss(pairs)) if sft_weight else loss


@torch.no_grad()
def pair_metrics(pairs: PairLogprobs, beta: float) -> dict[str, torch.Tensor]:
    """DPO's implicit reward, beta * (log pi - log pi_ref), and its accuracy, for each pair.

    Returns:
        `[B]` each: `chosen_reward`, `rejected_reward`, their difference `reward_margin`, and `accuracy`: 1 where the
        chosen answer has the higher reward, 0 where the rejected one has it, and one half for a tie. Where policy and
        reference agree it is one half, as for a coin, and carries no information.
    """
    _check(pairs)
    chosen = beta * (pairs.chosen - pairs.chosen_ref)
    rejected = beta * (pairs.rejected - pairs.rejected_ref)
    margin = chosen - rejected
    return {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "reward_margin": margin,
        "accuracy": (margin.sign() + 1) / 2,
    }


def _check(pairs: PairLogprobs) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in pairs._asdict().items()}
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
