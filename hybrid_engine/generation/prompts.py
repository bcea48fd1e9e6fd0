"""From padded prompts to lists of token ids: every check that needs no model, before any work."""

import torch


def check_prompts(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    vocab_size: int,
    pad_token_id: int | None,
    may_be_empty: bool = False,
) -> torch.Tensor:
    """The mask `[B, P]` bool, True for tokens; where none is given, what stands left of the first other token
    than `pad_token_id` is padding, and nothing is when that is None.

    Raises ValueError for an empty batch, unless it `may_be_empty`, or an empty prompt, ids outside the vocabulary, a
    mask of another shape, a row without a token, and padding anywhere but on the left.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise ValueError(
            f"input_ids is a {type(input_ids).__name__}; it must be an int64 tensor [batch, prompt length]; pass the "
            "tokenizer's output with return_tensors='pt'"
        )
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids is {input_ids.dtype} {list(input_ids.shape)}; it must be int64 [batch, prompt length]; "
            "pass the tokenizer's output with return_tensors='pt'"
        )
    if 0 in input_ids.shape and not (may_be_empty and len(input_ids) == 0):
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; pass at least one prompt of one token or more")
    mask = _mask(input_ids, attention_mask, pad_token_id)
    check_left_padded("attention_mask", mask)
    outside = ((input_ids < 0) | (input_ids >= vocab_size)) & mask
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {column}]={int(input_ids[row, column])} is outside the vocabulary 0..{vocab_size - 1}; "
            "use the tokenizer of this model"
        )
    return mask


def check_left_padded(name: str, mask: torch.Tensor) -> None:
    """Raises ValueError unless each row of `mask [B, P]`, True for tokens, is padding and then at least one token."""
    if mask.shape[1] > 0 and mask.all():
        return
    empty = (~mask.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"{name} has no token in rows {empty[:10]}; every prompt needs at least one token")
    padded_right = (mask[:, :-1] & ~mask[:, 1:]).any(1).nonzero().flatten().tolist()
    if padded_right:
        raise ValueError(
            f"{name} has padding after a token in rows {padded_right[:10]}; prompts must be padded on the left: set "
            "tokenizer.padding_side='left'"
        )


def _mask(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None) -> torch.Tensor:
    if attention_mask is None:
        if pad_token_id is None or not (input_ids == pad_token_id).any():
            return torch.ones_like(input_ids, dtype=torch.bool)
        # Leading pads only: a pad id later in the prompt is a token like any other.
        mask = (input_ids != pad_token_id).cumsum(1) > 0
        return mask & ~_trailing(input_ids == pad_token_id, mask)
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}; it must be a tensor of input_ids' shape"
        )
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must be that of input_ids, "
            f"{list(input_ids.shape)}; pass both as the tokenizer returns them"
        )
    mask = attention_mask.to(torch.bool)
    wrong = attention_mask != mask
    if wrong.any():
        raise ValueError(
            f"attention_mask holds {attention_mask[wrong][0].item()}; it must be 1 for tokens and 0 for padding; pass "
            "it as the tokenizer returns it"
        )
    return mask


def _trailing(is_pad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Pads with nothing but pads to their right, in rows that have a token: padding on the right, to be refused."""
    return is_pad.flip(1).cumprod(1).flip(1).bool() & mask


def prompt_token_ids(input_ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Each row's token ids without its padding."""
    return [row[kept].tolist() for row, kept in zip(input_ids.cpu().unbind(), mask.cpu().unbind(), strict=True)]
