"""Log-probabilities of whole sequences, prompts included, by a wrapped model. b rows, S columns, V logits."""

import torch

from hybrid_engine.generation.levels.wrapped_model import AbstractModelInferenceWrapper
from hybrid_engine.ops import token_logprobs

# Tokens whose logits are held at once, at least one row: with 150 000 logits each, 1.2 GB.
TOKENS_AT_ONCE = 2048


def score(wrapper: AbstractModelInferenceWrapper, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """`[b, S - 1]` fp32: entry t is of token t + 1 of `tokens [b, S]`, raw; 0 from a row's length on.

    Collective: all processes of the wrapper score all rows.
    """
    width = tokens.shape[1]
    scores = torch.zeros(len(tokens), width - 1, device=tokens.device)
    if width == 1:
        return scores
    rows_at_once = max(1, TOKENS_AT_ONCE // width)
    with wrapper.reading():
        for first in range(0, len(tokens), rows_at_once):
            rows = tokens[first : first + rows_at_once]
            wrapper.prep_model_for_inference(rows)
            logits = wrapper(wrapper.get_batch_for_context_window(0, width - 1))
            scores[first : first + rows_at_once] = token_logprobs(logits, rows[:, 1:])
        wrapper.release()
    places = torch.arange(1, width, device=tokens.device)
    return scores.masked_fill(places >= torch.tensor(lengths, device=tokens.device)[:, None], 0.0)
