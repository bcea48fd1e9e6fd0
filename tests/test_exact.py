"""Exact mode: the log-probability of a token has the same bits in every batch, and in the trainer's forward."""

import pytest
import torch
from models import build_model, padded_prompts
from torch import nn

import hybrid_engine
from hybrid_engine.ops import token_logprobs

FAMILIES = ["llama", "qwen3-qk-norm", "gpt2", "opt", "gemma2", "mixtral"]


def build_engine(model, **generation):
    block = {"enabled": True, "print_latency": False, "exact": True, "max_out_tokens": 64, **generation}
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": block,
        "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16},
    }
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    return engine


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def rollout(engine, input_ids, mask, **options):
    """Sampled responses with their log-probabilities, by a fixed seed."""
    engine.eval()
    options = {"do_sample": True, "max_new_tokens": 9, "seed": 3, "return_dict_in_generate": True, **options}
    return engine.generate(input_ids, attention_mask=mask, **options)


def trainer_logprobs(engine, output, mask):
    """Of a rollout's responses, by the engine's forward in training mode, with gradients; 0 on padding."""
    width = mask.shape[1]
    is_response = torch.arange(output.logprobs.shape[1]) < output.lengths[:, None]
    full = torch.cat([mask, is_response.long()], 1)
    engine.train()
    logits = engine(input_ids=output.sequences, attention_mask=full).logits[:, width - 1 : -1]
    return torch.where(is_response, token_logprobs(logits, output.sequences[:, width:]), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_and_rollout_have_the_same_bits(family, dtype):
    engine = build_engine(without_dropout(build_model(family)).to(dtype))
    assert engine.logprob_difference.max == 0.0
    input_ids, mask = padded_prompts()
    output = rollout(engine, input_ids, mask)
    assert torch.equal(output.logprobs, trainer_logprobs(engine, output, mask))
