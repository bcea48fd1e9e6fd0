"""`init_inference` returns a module that takes a model's place: in transformers' pipelines, and for torch."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, pipeline

from hybrid_engine import init_inference
from tests.inference.test_encoder import HEADS, build, rows
from tests.support.models import VOCAB, build_model, padded_prompts

PROMPTS = ["w5 w7 w11 w13", "w20 w21", "w30 w31 w32 w33 w34 w35 w36"]
FLOATS = (float, np.floating)  # scores of tokens are NumPy's
SPECIALS = ("pad", "bos", "eos", "mask")


def tokenizer():
    vocabulary = dict.fromkeys([*(f"<{name}>" for name in SPECIALS), *(f"w{i}" for i in range(4, VOCAB))])
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<eos>"))
    words.pre_tokenizer = Whitespace()
    names = {f"{name}_token": f"<{name}>" for name in SPECIALS}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **names)


def pipe_of(task, model, **options):
    return pipeline(task, model=model, tokenizer=tokenizer(), device="cpu", **options)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 6, "do_sample": False},
        {"generation_config": GenerationConfig(max_new_tokens=5, do_sample=False, repetition_penalty=1.2)},
        {"max_new_tokens": 4, "num_beams": 2, "do_sample": False, "batch_size": 2},
        {"max_new_tokens": 6, "do_sample": False, "return_full_text": False, "batch_size": 3},
    ],
    ids=["greedy", "config", "beams", "batches"],
)
def test_a_text_generation_pipeline_gives_the_same_text(family, options):
    expected = pipe_of("text-generation", build_model(family))(PROMPTS, **options)
    pipe = pipe_of("text-generation", build_model(family))
    pipe.model = init_inference(pipe.model, max_out_tokens=64)
    assert pipe(PROMPTS, **options) == expected
    assert pipe_of("text-generation", pipe.model)(PROMPTS, **options) == expected  # built around the engine
    assert "all 2" in pipe.model.report()


def test_a_pipeline_starts_from_nothing_where_transformers_does():
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = pipe_of("text-generation", build_model())("", **options)
    pipe = pipe_of("text-generation", build_model())
    pipe.model = init_inference(pipe.model, max_out_tokens=64)
    assert pipe("", **options) == expected


@pytest.mark.parametrize(
    "task, head, texts",
    [
        ("text-classification", "bert-classifies", PROMPTS),
        ("text-classification", "distilbert-classifies", PROMPTS),
        ("fill-mask", "bert-fills-masks", ["w5 <mask> w11", "w9 w8 <mask> w4"]),
        ("token-classification", "roberta-tags", PROMPTS),
    ],
)
def test_pipelines_of_encoders_give_the_same_answers_on_containers(task, head, texts):
    expected = pipe_of(task, build(HEADS[head]))(texts)
    pipe = pipe_of(task, build(HEADS[head]))
    pipe.model = init_inference(pipe.model)
    assert pipe.model.report().startswith("containers: all 2")
    compare(pipe(texts), expected)
    compare(pipe_of(task, pipe.model)(texts), expected)


def compare(answers, expected):
    """Equal but for rounding."""
    assert type(answers) is type(expected)
    if isinstance(expected, list):
        assert len(answers) == len(expected)
        for answer, other in zip(answers, expected, strict=True):
            compare(answer, other)
    elif isinstance(expected, dict):
        assert answers.keys() == expected.keys()
        for key in expected:
            compare(answers[key], expected[key])
    else:
        assert answers == pytest.approx(expected, abs=1e-4) if isinstance(expected, FLOATS) else answers == expected


def test_it_is_a_module_with_what_the_model_has():
    model = build_model()
    engine = init_inference(model, dtype="bf16", max_out_tokens=64)
    assert (
        isinstance(engine, nn.Module) and engine.module is model and dict(engine.named_children()) == {"module": model}
    )
    assert [id(p) for p in engine.parameters()] == [id(p) for p in model.parameters()]
    assert list(engine.state_dict()) == [f"module.{name}" for name in model.state_dict()]
    assert engine.config is model.config and engine.generation_config is model.generation_config
    assert (engine.dtype, engine.device) == (torch.bfloat16, torch.device("cpu"))
    assert engine.can_generate() and engine.base_model_prefix == "model" and not engine.training
    assert engine.get_input_embeddings() is model.get_input_embeddings()
    engine.generation_config = GenerationConfig(max_new_tokens=3)
    assert model.generation_config.max_new_tokens == 3
    assert engine.generate(padded_prompts()[0]).shape[1] == 9 + 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = engine.no_such_thing


def test_it_generates_in_eval_mode_only_as_the_model_trains():
    engine = init_inference(build_model(), max_out_tokens=64)
    assert engine.train() is engine and engine.module.training
    with pytest.raises(ValueError, match="training mode"):
        engine.generate(padded_prompts()[0], max_new_tokens=2)
    assert engine.eval() is engine
    engine.generate(padded_prompts()[0], max_new_tokens=2)


def test_an_encoder_in_training_mode_has_its_dropout():
    engine = init_inference(build(HEADS["bert-classifies"]))
    input_ids, mask = rows("right")
    calm = engine(input_ids, attention_mask=mask).logits
    engine.train()
    torch.manual_seed(0)
    answers = engine(input_ids, attention_mask=mask).logits
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(answers, engine.module(input_ids, attention_mask=mask).logits)
    assert not torch.equal(answers, calm)


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu")])
def test_a_moved_engine_answers_as_the_moved_model(move):
    input_ids, mask = padded_prompts()
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    engine = init_inference(build_model(), max_out_tokens=64)
    engine.generate(input_ids, **options)
    model = move(build_model())
    assert move(engine) is engine and engine.dtype == model.dtype
    assert torch.equal(engine.generate(input_ids, **options), model.generate(input_ids, **options))
    assert "all 2" in engine.report()
    encoder, bert = move(init_inference(build(HEADS["bert-classifies"]))), move(build(HEADS["bert-classifies"]))
    input_ids, mask = rows("right")
    with torch.no_grad():
        expected = bert(input_ids, attention_mask=mask).logits
    tolerance = 0.1 if model.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(encoder(input_ids, attention_mask=mask).logits, expected, atol=tolerance, rtol=0.02)
