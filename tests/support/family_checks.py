"""What any model on containers is held to, given only how it is built: helpers for tests, no tests.

`build` makes the same model at every call. Rows are compared with a model of their own that sees no padding, no
other row and no cache, so neither transformers' generation nor its batching is part of the oracle. It computes in
fp64 where it can: else both sides' rounding must fit into the tolerance, and on some processors it did not.
"""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

import hybrid_engine
from tests.support.models import PAD, padded_prompts

NUM_TOKENS = 8
GREEDY = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "pad_token_id": PAD, "eos_token_id": None}
LR = 1e-2
REFUSED_BY_PEFT = {
    **dict.fromkeys(("mamba2", "nemotron_h", "falcon_h1"), "out_proj"),
    **dict.fromkeys(("llama4_text", "phimoe"), "router"),  # linears that return more than a tensor
}
"""The linears that peft does not adapt, by type of model."""

Build = Callable[[], PreTrainedModel]


def build_engine(model: torch.nn.Module, **config: Any) -> Any:
    """An engine in eval mode."""
    optimizer = {"type": "AdamW", "params": {"lr": LR}}
    base = {"train_batch_size": 6, "gradient_clipping": 0, "optimizer": optimizer, "hybrid_engine": {"enabled": True}}
    return hybrid_engine.initialize(model=model, config=base | config)[0].eval()


@torch.no_grad()
def answer_alone(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens `[T]` and their log-probabilities after `prompt [P]`, everything computed anew for each."""
    sequence, logprobs = prompt[None], []
    for _ in range(NUM_TOKENS):
        scores = model(input_ids=sequence, use_cache=False).logits[0, -1].double().log_softmax(-1)
        logprobs.append(scores.max())
        sequence = torch.cat([sequence, scores.argmax()[None, None]], 1)
    return sequence[0, len(prompt) :], torch.stack(logprobs)


def rows_alone(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """`answer_alone` of each padded prompt: `[B, T]` twice."""
    input_ids, mask = padded_prompts()
    answers = [answer_alone(model, row[real.bool()]) for row, real in zip(input_ids, mask, strict=True)]
    tokens, logprobs = zip(*answers, strict=True)
    return torch.stack(tokens), torch.stack(logprobs)


def check_rollout(build: Build) -> None:
    """On containers each row of a padded batch has the tokens and log-probabilities of the row alone."""
    engine = build_engine(build())
    assert engine.generator.fallback_reason is None
    _check_rows(engine, build())


def check_lora(build: Build) -> None:
    """The same with an adapter on every linear, which changes the answer."""
    engine = build_engine(adapted(build()))
    assert engine.generator.fallback_reason is None
    own = adapted(build())
    _check_rows(engine, own)
    with own.disable_adapter():
        assert not torch.allclose(rows_alone(own)[1], rows_alone(adapted(build()))[1], atol=1e-4)


def _check_rows(engine: Any, own: torch.nn.Module) -> None:
    input_ids, mask = padded_prompts()
    output = engine.generate(input_ids=input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    if not any("Experts" in type(module).__name__ for module in own.modules()):  # theirs mixes in fp32
        own.double()
    tokens, logprobs = rows_alone(own)
    assert torch.equal(output.sequences[:, input_ids.shape[1] :], tokens)
    torch.testing.assert_close(output.logprobs, logprobs.float(), atol=1e-5, rtol=0)


def check_training_step(build: Build) -> None:
    """After a rollout and a step every parameter is where a plain loop takes it."""
    input_ids, mask = padded_prompts()
    batch = {"input_ids": input_ids, "attention_mask": mask, "labels": input_ids}
    engine, plain = build_engine(build()), build().train()
    engine.generate(input_ids, attention_mask=mask, **GREEDY)
    torch.manual_seed(0)  # dropout, where a family has it
    engine.train()
    engine.backward(engine(**batch).loss)
    engine.step()
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0, fused=True)
    plain(**batch).loss.backward()
    optimizer.step()
    before = build().state_dict()
    for name, tensor in engine.module.state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.module.state_dict().items())


def adapted(model: PreTrainedModel) -> PeftModel:
    """peft's LoRA on every linear that it accepts, with adapters that do something."""
    refused = REFUSED_BY_PEFT.get(model.config.model_type)
    excluded = None if refused is None else [refused]
    config = LoraConfig(r=3, target_modules="all-linear", exclude_modules=excluded, task_type="CAUSAL_LM")
    adapter = get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return adapter.eval()
