"""The sequence classifier that a reward model is: built on a model's body, read at the last token, saved normalised."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from hybrid_engine.generation.end_tokens import answer_ends
from hybrid_engine.rlhf.data.packing import Layout, layout_of, pack
from hybrid_engine.rlhf.data.passes import in_passes, split
from hybrid_engine.rlhf.data.sequences import build_sequences
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.runs.stages import load_model, load_tokenizer, save_stage, score_head

ROWS_PER_PASS = 64
"""Rows of a forward pass without gradients."""


def load_scoring_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model whose classifier reads its score at the last token that is not padding.

    Where it would pad with a token that ends answers, the token that begins texts is the padding: it ends none.

    Raises:
        ValueError: it does not load, or has no other token to pad with.
    """
    tokenizer = load_tokenizer(source)
    ends = answer_ends(tokenizer)
    if tokenizer.pad_token_id not in ends:
        return tokenizer
    if tokenizer.bos_token_id in (None, *ends):
        raise ValueError(
            f"--model={source!r} pads with {tokenizer.pad_token!r}, which ends answers; the score is read at the last "
            "token that is not padding, so pad must differ: set another pad_token in its tokenizer"
        )
    end, tokenizer.pad_token = tokenizer.pad_token, tokenizer.bos_token
    say(f"--model={source!r} pads with {end!r}, which ends answers: {tokenizer.pad_token!r} will be padding")
    return tokenizer


def build_classifier(source: str, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """A sequence classifier with one label on the body of `source`, without dropout; its head N(0, 1/(d+1)).

    The head's initialisation is that of Stiennon et al., arXiv 2009.01325 (after Huang et al., "N implementation
    details", item 3).
    """
    model = load_model(AutoModelForSequenceClassification, source, has_new_head=True, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    head = score_head(model, "model", source)
    torch.nn.init.normal_(head.weight, std=(head.in_features + 1) ** -0.5)
    return model


def score_tokens(engine: Any, tokens: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """`[B]` fp32: the scores of prompts with finished answers, read at the last token of each."""
    if layout_of(engine) is not Layout.PADDED:
        return _score_packed(engine, tokens)
    batch = tokenizer.pad({"input_ids": tokens}, padding_side="right", return_tensors="pt").to(engine.device)
    return engine(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1).float()


def _score_packed(engine: Any, tokens: Sequence[list[int]]) -> torch.Tensor:
    """The scores of packed sequences, of which the classifier itself would read one a row."""
    batch = build_sequences([row[:1] for row in tokens], [row[1:] for row in tokens], 0, engine.device)
    packed = pack(batch.on_host.input_ids, batch.on_host.attention_mask, layout_of(engine)).to(engine.device)
    module = engine.module
    base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    scores: list[torch.Tensor] = []
    hooks = [
        base.score.register_forward_hook(lambda head, given, output: scores.append(output)),
        # What a model returns is what sharding follows into the backward pass.
        module.register_forward_hook(lambda model, given, output: {"scores": scores[-1]}, prepend=True),
    ]
    try:
        found = engine(**packed.inputs, use_cache=False)["scores"]
    finally:
        for hook in hooks:
            hook.remove()
    last = packed.places.gather(1, batch.attention_mask.sum(dim=1, keepdim=True) - 1)  # every sequence begins at 0
    return found.float().flatten()[last.squeeze(1)]


@torch.no_grad()
def save_normalised(engine: Any, references: list[list[int]], tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves the classifier, with mean and standard deviation of the references' scores in its config; collective.

    Args:
        engine: a ZeroEngine of the classifier.
        references: good answers behind their prompts, as tokens: what a score is measured against.
        tokenizer: saved beside it.
        folder: its place, complete or absent.
    """
    engine.eval()
    score = partial(score_tokens, engine, tokenizer=tokenizer)
    parts = in_passes(engine, partial(split, references), score, ROWS_PER_PASS)
    scores = torch.cat(parts)
    config = engine.module.config
    spread = scores.std().item() if len(scores) > 1 else 0.0
    config.score_mean, config.score_std = scores.mean().item(), spread or 1.0  # without spread nothing is scaled
    save_stage(engine, tokenizer, folder)
