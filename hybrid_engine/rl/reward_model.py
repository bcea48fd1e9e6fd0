"""Training a reward model on preference pairs.

B: pairs. Both losses return one number per pair, `[B]`, to be minimized.
"""

import torch
from torch.nn.functional import softplus


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
