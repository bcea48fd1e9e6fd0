"""What a model says of whole answers: their log-probabilities, summed over the tokens that are learned.

B: answers of a forward pass.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import nn

from hybrid_engine.distributed.processes import default_device, gather_objects
from hybrid_engine.rlhf.data.encoding import Encoded
from hybrid_engine.rlhf.data.passes import in_passes, turns
from hybrid_engine.rlhf.data.sequences import build_sequences, response_logprobs


class Reading(NamedTuple):
    """How answers are read."""

    pad_token: int
    temperature: float = 1.0
    """The logits are divided by it; that of sampling, for answers that were sampled."""


def answer_logprobs(model: Any, answers: Sequence[Encoded], reading: Reading) -> torch.Tensor:
    """`[B]` fp32: log pi(answer | prompt) in nats of the tokens that are learned; collective where it is sharded."""
    prompts, responses = [answer.prompt_ids for answer in answers], [answer.response_ids for answer in answers]
    learned = [answer.loss_mask for answer in answers]
    sequences = build_sequences(prompts, responses, reading.pad_token, default_device(), learned)
    return response_logprobs(model, sequences, reading.temperature).sum(dim=1)


@torch.no_grad()
def all_logprobs(model: Any, answers: Sequence[Encoded], reading: Reading) -> list[float]:
    """log pi(answer | prompt) in nats of all `answers`, which every process passes alike; collective.

    The processes share the passes, and each makes as many: sharded weights are gathered together. The result does not
    depend on their number, to the bit where the model is not sharded.
    """
    lengths = [len(answer) for answer in answers]

    def of_part(turn: tuple[list[int], bool]) -> dict[int, float]:
        part, _ = turn
        logprobs = answer_logprobs(model, [answers[index] for index in part], reading)
        return dict(zip(part, logprobs.tolist(), strict=True))

    mine = in_passes(model, lambda rows: turns(split_by_length(lengths, rows)), of_part)
    found = dict(pair for parts in gather_objects(mine) for part in parts for pair in part.items())
    return [found[index] for index in range(len(answers))]


def split_by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The indices of `lengths` in parts of `size`, alike in length within a part: less is padded."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[first : first + size] for first in range(0, len(order), size)]


def without_adapter(model: nn.Module) -> AbstractContextManager[None]:
    """Within it, a peft model computes what its base does; any other model what it always does."""
    return model.disable_adapter() if isinstance(model, PeftModel) else nullcontext()
