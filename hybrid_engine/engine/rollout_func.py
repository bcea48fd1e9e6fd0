"""Between TRL's lists of tokens and tensors: what its `rollout_func` is given, and what it returns."""

from typing import Any

import torch


def tokenize(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """The token ids that `trainer` itself would make of `prompts`: texts, or conversations by its chat template."""
    if not prompts:
        raise ValueError("rollout_func: prompts=[] must have at least one; leave the call out where there is none")
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    return tokenizer.apply_chat_template(
        conversation=prompts,
        tools=getattr(trainer, "tools", None) or None,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )["input_ids"]


def prompt_tensors(prompt_ids: list[list[int]], trainer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, P]`, padded on the left, on the trainer's device."""
    width, pad = max(map(len, prompt_ids)), trainer.processing_class.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompt_ids])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompt_ids])
    device = trainer.accelerator.device
    return ids.to(device), mask.to(device)


def completions(output: Any, prompt_width: int) -> dict[str, list[list[Any]]]:
    """`completion_ids` and `logprobs` of each row of `output`, without padding."""
    tokens, logprobs = output.sequences[:, prompt_width:].tolist(), output.logprobs.tolist()
    lengths = output.lengths.tolist()
    return {
        "completion_ids": [row[:length] for row, length in zip(tokens, lengths, strict=True)],
        "logprobs": [row[:length] for row, length in zip(logprobs, lengths, strict=True)],
    }
