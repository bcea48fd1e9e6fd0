"""Any shape of model trains on two processes as in a plain loop, in as many groups as it has layers."""

import pytest
import torch
import transformers
from torch import nn
from transformers.utils import logging

import hybrid_engine
from hybrid_engine.zero.sharding import full_tensor
from hybrid_engine.zero.wrapping import find_groups
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.long

SIZE, STEPS, BATCH = 36, 2, 4
ADAM = {"lr": 1e-2, "eps": 1e-6}
CONFIG = {"train_batch_size": BATCH, "gradient_clipping": 0, "optimizer": {"type": "AdamW", "params": ADAM}}


class Block(nn.Module):
    def __init__(self, width=SIZE):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(self.norm(x)).tanh()

    encode = forward


class OtherBlock(nn.Module):
    """Of another class and size than Block."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    """Calls `layers` in turn, between an embedding and a head that are tied."""

    def __init__(self, layers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, SIZE), nn.Linear(SIZE, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = layers

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids):
        return cross_entropy(self.head(self.run(self.embedding(input_ids))), input_ids)


class Containers(Stack):
    """Layers are lists, or dictionaries, of their parts."""

    def run(self, x):
        for layer in self.layers:
            norm, linear = layer.values() if isinstance(layer, nn.ModuleDict) else layer
            x = x + linear(norm(x)).tanh()
        return x


def cross_entropy(logits, input_ids):
    return nn.functional.cross_entropy(logits.flatten(0, 1) / SIZE, input_ids.roll(1, 1).flatten())


class Named(nn.Module):
    """All parts in a dictionary, as in nanoGPT; the head is tied."""

    def __init__(self):
        super().__init__()
        parts = {"wte": nn.Embedding(20, SIZE), "h": nn.ModuleList([Block(), Block()]), "ln": nn.LayerNorm(SIZE)}
        self.transformer = nn.ModuleDict(parts)
        self.head = nn.Linear(SIZE, 20, bias=False)
        self.head.weight = self.transformer.wte.weight

    def forward(self, input_ids):
        x = self.transformer.wte(input_ids)
        for block in self.transformer.h:
            x = block(x)
        return cross_entropy(self.head(self.transformer.ln(x)), input_ids)


class ByMethod(Stack):
    """Calls no layer but a method of each."""

    def __init__(self, registers):
        super().__init__(nn.ModuleList([Block(), Block()]))
        for param in self.layers.parameters() if registers else ():
            hybrid_engine.zero.register_external_parameter(self, param)

    def run(self, x):
        for layer in self.layers:
            x = layer.encode(x)
        return x


class Experts(nn.Module):
    """Every expert sees every token: a process on which an expert has none is another story."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(SIZE, 2)
        self.experts = nn.ModuleList([OtherBlock(), OtherBlock()])

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


def share(layers):
    """The second and the last use the first's linear."""
    for layer in (layers[1], layers[-1]):
        layer.inner.weight = layers[0].inner.weight
    return layers


def own_models():
    """Models and the number of parts that are gathered alone."""
    pairs = [nn.ModuleList([nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)]) for _ in range(3)]
    named = [nn.ModuleDict({"norm": nn.LayerNorm(SIZE), "inner": nn.Linear(SIZE, SIZE)}) for _ in range(3)]
    block = Block()
    return {
        "lists": (Containers(nn.ModuleList(pairs)), 3),
        "dictionaries": (Containers(nn.ModuleList(named)), 3),
        "classes": (Stack(nn.ModuleList([Block(), OtherBlock(), OtherBlock(), Block()])), 4),
        "experts": (Stack(nn.ModuleList([Block(), Experts(), Experts(), Block()])), 4),
        "sequential": (Stack(nn.Sequential(Block(), Block(), OtherBlock())), 3),
        "named": (Named(), 2),
        "one layer again and again": (Stack(nn.ModuleList([block] * 3)), 1),
        "by a method": (ByMethod(registers=False), 2),
        "by a method, registered": (ByMethod(registers=True), 0),
        "shared": (Stack(share(nn.ModuleList([Block(), Block(), OtherBlock(), Block()]))), 1),
    }


TEXT = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def t5():
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 20,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, dropout_rate=0.0))


def whisper():
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "vocab_size": 20}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        **layers, **widths, **ids, max_source_positions=12, max_target_positions=16, dropout=0.0
    )
    return transformers.WhisperForConditionalGeneration(config)


def jamba():
    """Mamba and attention, dense layers and layers of experts, one after another."""
    mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4}
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0}
    config = transformers.JambaConfig(**TEXT, **mamba, **periods, num_hidden_layers=4, num_experts=2)
    return transformers.JambaForCausalLM(config)


def zamba():
    """Two Mamba layers with one attention block between them, which both use."""
    config = transformers.ZambaConfig(
        **TEXT,
        num_hidden_layers=4,
        n_mamba_heads=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        attention_head_dim=16,
        attention_hidden_size=32,
    )
    return transformers.ZambaForCausalLM(config)


def llava():
    text = transformers.LlamaConfig(**TEXT, num_hidden_layers=2)
    vision = transformers.CLIPVisionConfig(**VISION, image_size=8, patch_size=4, projection_dim=16)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=19, image_seq_length=4)
    )


def albert():
    """One layer for every depth."""
    sizes = {"embedding_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = transformers.AlbertConfig(
        vocab_size=20, **sizes, num_hidden_layers=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.AlbertForMaskedLM(config)


MODELS = {t5: 4, whisper: 4, jamba: 4, zamba: 4, llava: 4, albert: 1}
"""Models of transformers and the number of parts that are gathered alone."""


def build(name):
    """The model of this name, the number of its groups and a global batch of its inputs."""
    torch.manual_seed(0)
    tokens = torch.randint(3, 18, (BATCH, 6))
    if name in (models := own_models()):
        return *models[name], {"input_ids": tokens}
    make = next(make for make in MODELS if make.__name__ == name)
    inputs = {"input_ids": tokens, "labels": tokens}
    if name == "whisper":
        inputs = {"input_features": torch.randn(BATCH, 8, 24), "labels": tokens}
    if name == "llava":
        inputs["input_ids"] = torch.cat([torch.full((BATCH, 4), 19), tokens], 1)
        inputs |= {"labels": inputs["input_ids"], "pixel_values": torch.randn(BATCH, 3, 8, 8)}
    return make(), MODELS[make], inputs


def loss_of(model, inputs):
    output = model(**inputs)
    return getattr(output, "loss", output)


def train_plainly(name):
    model, _, inputs = build(name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: param.detach() for key, param in model.named_parameters()}


def train_engine(name, stage, rank, world_size):
    model, _, inputs = build(name)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = hybrid_engine.initialize(model=model, config=config)[0]
    engine.train(False)  # no dropout; the plain model is in the mode that it was built in
    mine = {key: value[rank::world_size].contiguous() for key, value in inputs.items()}
    losses = []
    for _ in range(STEPS):
        loss = loss_of(engine, mine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.sharding.settle()
    weights = {key: full_tensor(param).clone() for key, param in engine.module.named_parameters()}
    return losses, weights, len(engine.sharding.layers)


NAMES = [*own_models(), *(make.__name__ for make in MODELS)]


def stages(name):
    """Models of transformers only where layers are gathered: whole in one pass, and one after another."""
    if name not in own_models():
        return (2, 3)
    return range(3 if name == "by a method" else 4)


def two_processes(rank, world_size):
    logging.set_verbosity_error()
    results = {(name, stage): train_engine(name, stage, rank, world_size) for name in NAMES for stage in stages(name)}
    results["error"] = error_of(train_engine, "by a method", 3, rank, world_size)
    results["container"] = error_of(hybrid_engine.initialize, None, nn.ModuleList([Block()]), config=CONFIG)
    return results


def error_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(two_processes, 2)


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train_as_a_plain_loop_in_as_many_groups_as_expected(two_ranks, name):
    num_groups = build(name)[1]
    losses, weights = train_plainly(name)
    for stage in stages(name):
        first, second = (results[name, stage] for results in two_ranks)
        assert first[2] == second[2] == num_groups
        assert [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)] == pytest.approx(losses, rel=1e-5)
        for key, expected in weights.items():
            torch.testing.assert_close(first[1][key], expected, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
            assert torch.equal(first[1][key], second[1][key])


def test_at_stage_3_a_layer_that_is_not_called_itself_is_named_with_the_remedy(two_ranks):
    for results in two_ranks:
        assert results["error"].startswith("forward():")
        assert "call zero.register_external_parameter(module, parameter) before initialize()" in results["error"]
        assert "in layers.0.norm (LayerNorm); layers.0 (" in results["error"]


def test_a_model_that_cannot_be_called_is_refused(two_ranks):
    assert all("model: ModuleList has no forward()" in results["container"] for results in two_ranks)


def test_a_layer_that_is_gathered_in_parts_is_named_with_the_reason():
    exceptions = find_groups(build("shared")[0]).exceptions
    assert exceptions[0] == "layers.0 (Block), whose inner.weight is used elsewhere too" and len(exceptions) == 3
    assert find_groups(build("classes")[0]).exceptions == []


def test_small_lists_beside_the_layers_stay_with_the_rest():
    model = Stack(nn.ModuleList([Block(), Block()]))
    model.heads = nn.ModuleList([nn.Linear(SIZE, 2), nn.Linear(SIZE, 3)])
    assert find_groups(model).modules == list(model.layers)
