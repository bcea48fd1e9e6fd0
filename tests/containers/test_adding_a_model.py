"""The file that docs/adding-a-model.md shows is run as it stands, on a layer class that the package does not list."""

import re

import pytest
import torch
from transformers import Starcoder2Config, Starcoder2ForCausalLM
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2DecoderLayer

import hybrid_engine
from hybrid_engine.containers import POLICIES
from tests.support.models import PAD, padded_prompts
from tests.support.paths import DOCS, ROOT

TEXT = (DOCS / "adding-a-model.md").read_text()


class MyDecoderLayer(Starcoder2DecoderLayer):
    """A class that the package cannot know."""


def build():
    torch.manual_seed(0)
    config = Starcoder2Config(
        hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, sliding_window=5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Starcoder2ForCausalLM(config)
    for layer in model.model.layers:
        layer.__class__ = MyDecoderLayer
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def build_engine():
    engine, *_ = hybrid_engine.initialize(
        model=build(), config={"train_batch_size": 1, "hybrid_engine": {"enabled": True}}
    )
    return engine.eval()


@pytest.fixture
def policy():
    yield
    POLICIES.pop("MyDecoderLayer", None)


def test_a_family_of_known_pieces_takes_the_one_file_that_the_page_shows(policy):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(code.splitlines()) <= 40
    assert "MyDecoderLayer" in build_engine().generator.fallback_reason  # not listed
    exec(compile(code, "docs/adding-a-model.md", "exec"), {})
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": PAD}
    engine = build_engine()
    assert engine.generator.fallback_reason is None
    expected = build().generate(input_ids, attention_mask=mask, **greedy)
    assert engine.generate(input_ids, attention_mask=mask, **greedy).tolist() == expected.tolist()


def test_every_file_that_the_page_names_is_there():
    for path in re.findall(r"\]\(\.\./(\S+?)\)", TEXT):
        assert (ROOT / path).exists(), path
