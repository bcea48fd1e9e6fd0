"""KTO: learning from single answers that are each labelled desirable or undesirable.

The value of an answer is how much likelier it is under the policy than under the reference, compared with a reference
point: how much likelier any answer is under the policy, estimated on prompts with the answers of other prompts.

B: answers.
"""

import torch
import torch.distributed as dist


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
    signs, weights = _check(logprobs, logprobs_ref, is_desirable, reference_point, desirable_weight, undesirable_weight)
    return weights * torch.sigmoid(-signs * beta * (logprobs - logprobs_ref - reference_point))


def _check(
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
    signs, _ = _check(logprobs, logprobs_ref, is_desirable, reference_point, 1.0, 1.0)
    ratios = logprobs - logprobs_ref
    sides = (torch.sign(signs * (ratios - reference_point)) + 1) / 2
    return {
        "chosen_reward": (beta * torch.where(is_desirable, ratios, 0.0).sum(), is_desirable.sum()),
        "rejected_reward": (beta * torch.where(is_desirable, 0.0, ratios).sum(), (~is_desirable).sum()),
        "accuracy": (sides.sum(), is_desirable.new_full((), len(ratios), dtype=torch.int64)),
    }
