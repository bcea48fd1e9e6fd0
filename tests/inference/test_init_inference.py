"""`init_inference`: the model's own answers, alone and shared by two processes; options and their errors."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.granite.modeling_granite import GraniteDecoderLayer

import hybrid_engine
from hybrid_engine.inference import build as inference_build
from hybrid_engine.inference.config import read_config
from tests.generation.test_tensor_parallel import _SIZES, GREEDY, SAMPLED, build_family
from tests.support.distributed import run_distributed
from tests.support.models import PAD, VOCAB, build_model, padded_prompts
from tests.support.raised import message

pytestmark = pytest.mark.long

refusal = partial(message, kind=ValueError)

CHECKPOINTS = ["llama", "tied", "gpt-neox", "gemma2", "qwen2-moe"]
FAMILIES = ["llama", "one key/value head for two ranks", "tied", "gpt2", "gpt-neox", "gemma2", "qwen2-moe"]

WITHOUT_PARAMETERS = ["deepseek-v3", "gemma4", "gemma3n", "nanochat"]
"""Families with a buffer that the containers read, and with norms that have no weight."""


class UnlistedLayer(GraniteDecoderLayer):
    """A class that the package cannot know."""


def build_unlisted(**sizes):
    """A model without a policy."""
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**(_SIZES | sizes), attention_bias=True, mlp_bias=True))
    for layer in model.model.layers:
        layer.__class__ = UnlistedLayer
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(torch.randn_like(parameter) * 0.05)
    model.generation_config.pad_token_id = PAD
    return model.eval()


def build_bert():
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, vocab_size=VOCAB
    )
    return BertModel(config).eval()


def share_families(rank):
    results = {}
    input_ids, mask = padded_prompts()
    for family in FAMILIES:
        model = build_family(family)
        logits = model(input_ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        engine = hybrid_engine.init_inference(model, tensor_parallel={"tp_size": 2}, max_out_tokens=64)
        held = engine.generator.model.layers[0].mixer.output.parallel.read.__self__.num_bytes
        difference = (engine(input_ids, attention_mask=mask).logits - logits)[mask.bool()].abs().max().item()
        greedy = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        torch.manual_seed(rank)  # what rank 0 draws counts
        drawn = engine.generate(input_ids, attention_mask=mask, **{**SAMPLED, "seed": None})
        sampled = engine.generate(input_ids, attention_mask=mask, **SAMPLED)
        left = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
        everywhere = sum(p.nbytes for name, p in model.named_parameters() if "wpe" in name)
        whole = sum(p.nbytes for p in model.parameters()) - everywhere
        results[family] = greedy, sampled, drawn, difference, (held - everywhere) / whole, left, engine.report()
    return results, refusal(lambda: engine.generate(input_ids, attention_mask=mask, num_beams=2, **GREEDY))


def share_others(rank):
    """LoRA, an encoder, and models without a policy."""
    from tests.containers.test_lora import adapt

    input_ids, mask = padded_prompts()
    share = {"tensor_parallel": {"tp_size": 2}}
    adapted = hybrid_engine.init_inference(adapt(build_family("llama"), "all-linear"), **share)
    encoder = hybrid_engine.init_inference(build_bert(), **share)
    results = {
        "lora": adapted.generate(input_ids, attention_mask=mask, **GREEDY),
        "bert": encoder(input_ids, attention_mask=mask).last_hidden_state[mask.bool()],
    }
    for family in WITHOUT_PARAMETERS[:2]:
        engine = hybrid_engine.init_inference(build_model(family), **share)
        results[family] = engine.generate(input_ids, attention_mask=mask, **GREEDY)
    policy = {"UnlistedLayer": ("self_attn.o_proj", "mlp.down_proj")}
    for name, options in (("found", {}), ("named", {"injection_policy": policy})):
        engine = hybrid_engine.init_inference(build_unlisted(), **share, **options)
        beams = engine.generate(input_ids, attention_mask=mask, num_beams=2, **GREEDY)
        torch.manual_seed(rank)
        drawn = engine.generate(input_ids, attention_mask=mask, **{**GREEDY, "do_sample": True})
        greedy = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        width = engine.module.model.layers[0].self_attn.q_proj.weight.shape
        results[name] = greedy, beams, drawn, tuple(width), engine.report()
    return results


def load(folder):
    """Checkpoints straight into the parts: greedy tokens, bytes read as a share of the model, what stays unloaded."""
    from hybrid_engine.inference.checkpoint import CheckpointReader

    input_ids, mask = padded_prompts()
    results, read = {}, CheckpointReader.read
    for family in [*CHECKPOINTS, *WITHOUT_PARAMETERS, "unlisted"]:
        model = on_meta(family)
        num_bytes = []

        def counted(self, *args, num_bytes=num_bytes):
            num_bytes.append(read(self, *args))
            return num_bytes[-1]

        CheckpointReader.read = counted
        try:
            engine = hybrid_engine.init_inference(model, mp_size=2, checkpoint=f"{folder}/{family}")
        finally:
            CheckpointReader.read = read
        whole = sum(p.nbytes for p in build(family).parameters())
        greedy = engine.generate(input_ids, attention_mask=mask, **GREEDY)
        results[family] = greedy, sum(part.nbytes for part in num_bytes) / whole
    return results


def build(family):
    if family in WITHOUT_PARAMETERS:
        return build_model(family)
    return build_unlisted() if family == "unlisted" else build_family(family)


def on_meta(family):
    with torch.device("meta"):
        return type(build(family))(build(family).config).eval()


def save(folder):
    for family in [*CHECKPOINTS, *WITHOUT_PARAMETERS, "unlisted"]:
        build(family).save_pretrained(f"{folder}/{family}", max_shard_size="60KB")


def refuse(rank):
    def share(size, **sizes):
        model = LlamaForCausalLM(LlamaConfig(**(_SIZES | sizes)))
        hybrid_engine.init_inference(model, tensor_parallel={"tp_size": size})

    policy = {"UnlistedLayer": "self_attn.nothing"}
    engine = hybrid_engine.init_inference(build_family("llama"), mp_size=2)
    encoder = hybrid_engine.init_inference(build_bert(), mp_size=2)
    return [
        refusal(lambda: share(3)),
        refusal(lambda: share(2, num_attention_heads=3, num_key_value_heads=3)),
        refusal(lambda: share(2, intermediate_size=81)),
        refusal(lambda: hybrid_engine.init_inference(build_unlisted(), mp_size=2, injection_policy=policy)),
        refusal(lambda: hybrid_engine.init_inference(build_unlisted(num_key_value_heads=1), mp_size=2)),
        refusal(lambda: engine.generate(torch.full((1, 3), 5 + rank), **GREEDY)),
        refusal(lambda: engine.to(engine.device).to(engine.dtype).half()),
        refusal(lambda: encoder.train()(*padded_prompts())),
    ]


def everything(rank, world_size, folder):
    return share_families(rank), share_others(rank), refuse(rank), load(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def shared(folder):
    return run_distributed(everything, 2, folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_by_two_processes_a_model_answers_as_before(shared, family):
    input_ids, mask = padded_prompts()
    expected = build_family(family).generate(input_ids, attention_mask=mask, **GREEDY)
    for part in shared:
        greedy, _, drawn, difference, *_ = part[0][0][family]
        assert torch.equal(greedy, expected)
        assert difference < 1e-4
        assert torch.equal(drawn, shared[0][0][0][family][2])


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_do_not_depend_on_how_many_processes_share_a_model(shared, family):
    input_ids, mask = padded_prompts()
    alone = hybrid_engine.init_inference(build_family(family)).generate(input_ids, attention_mask=mask, **SAMPLED)
    assert all(torch.equal(part[0][0][family][1], alone) for part in shared)


def test_no_process_keeps_the_whole(shared):
    for part in shared:
        for *_, held, left, report in part[0][0].values():
            assert held < 0.56 and left == 0
            assert "of 2, its part of the weights held" in report
        assert "num_beams is not served natively" in part[0][1] and "tensor_parallel.tp_size=1" in part[0][1]


def test_lora_and_encoders_are_shared_too(shared):
    from tests.containers.test_lora import adapt

    input_ids, mask = padded_prompts()
    adapted = adapt(build_family("llama"), "all-linear").generate(input_ids=input_ids, attention_mask=mask, **GREEDY)
    with torch.no_grad():
        hidden = build_bert()(input_ids, attention_mask=mask).last_hidden_state[mask.bool()]
    for part in shared:
        assert torch.equal(part[1]["lora"], adapted)
        torch.testing.assert_close(part[1]["bert"], hidden, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", WITHOUT_PARAMETERS[:2])
def test_what_is_no_parameter_is_shared_too(shared, family):
    input_ids, mask = padded_prompts()
    expected = build_model(family).generate(input_ids, attention_mask=mask, **GREEDY)
    for part in shared:
        assert torch.equal(part[1][family], expected)


@pytest.mark.parametrize("how", ["found", "named"])
def test_linears_of_a_model_without_a_policy_are_shared(shared, how):
    input_ids, mask = padded_prompts()
    model = build_unlisted()
    for part in shared:
        greedy, beams, drawn, shape, report = part[1][how]
        assert torch.equal(greedy, model.generate(input_ids, attention_mask=mask, **GREEDY))
        assert torch.equal(beams, model.generate(input_ids, attention_mask=mask, num_beams=2, **GREEDY))
        assert torch.equal(drawn, shared[0][1][how][2])
        assert shape == (24, 48)
        assert "no policy for" in report and "14 linears" in report


def test_what_cannot_be_shared_is_refused(shared):
    for part in shared:
        processes, heads, width, name, keys, prompts, moved, mode = part[2]
        assert "tensor_parallel.tp_size=3 must divide the number of processes 2" in processes
        assert "tensor_parallel.tp_size=2 must divide num_attention_heads=3" in heads and "use one of 1, 3" in heads
        assert "MLP size 81" in width and "use one of 1" in width
        assert "has no linear 'self_attn.nothing'; it has mlp.down_proj" in name
        assert "num_key_value_heads=1" in keys and "use one of 1" in keys
        assert "different prompts from its first rank" in prompts
        assert "torch.float16 on cpu is not torch.float32 on cpu" in moved and "pass dtype" in moved
        assert "training mode" in mode and "only its part of the layers" in mode


def test_alone_it_gives_the_models_own_answers_and_falls_back_in_the_open(caplog):
    input_ids, mask = padded_prompts()
    model = build_model()
    expected = model.generate(input_ids, attention_mask=mask, **GREEDY)
    beams = model.generate(input_ids, attention_mask=mask, num_beams=2, **GREEDY)
    logits = model(input_ids, attention_mask=mask).logits
    engine = hybrid_engine.init_inference(model, {"tensor_parallel": {"tp_size": 1}}, max_out_tokens=64)
    assert engine.module is model
    assert torch.equal(engine(input_ids, attention_mask=mask).logits, logits)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **GREEDY), expected)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, num_beams=2, **GREEDY), beams)
    assert "num_beams is not served natively" in caplog.text
    assert "all 2 LlamaDecoderLayer layers" in engine.report()
    assert engine.generator.workspace.allocated_bytes > 0
    engine.destroy()
    assert engine.generator.workspace.allocated_bytes == 0
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **GREEDY), expected)
    with pytest.raises(ValueError, match="max_out_tokens=64"):
        engine.generate(input_ids, attention_mask=mask, max_new_tokens=64)


@pytest.mark.parametrize("family", ["gemma4-keys-are-values", "deepseek-v3"])
def test_layers_with_heads_of_their_own_give_the_models_own_answers(family):
    input_ids, mask = padded_prompts()
    model = build_model(family)
    expected = model.generate(input_ids, attention_mask=mask, **GREEDY)
    engine = hybrid_engine.init_inference(model)
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **GREEDY), expected)
    assert engine.reason is None


def test_weights_that_do_not_fit_are_refused_before_they_move(monkeypatch):
    with torch.device("meta"):
        model = torch.nn.Linear(1024, 1024, bias=False)
    monkeypatch.setattr(inference_build, "usable_memory_bytes", lambda device: 2**20)
    message = (
        r"pass a dtype of fewer bits, or share the model among 4 processes or more \(tensor_parallel.tp_size, now 1\)"
    )
    with pytest.raises(ValueError, match=message):
        inference_build.check_memory(
            model, inference_build.WeightSources(), inference_build.ModelGroup(), torch.device("cpu")
        )


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", torch.bfloat16])
def test_the_dtype_is_converted_but_not_that_of_rotary_frequencies(name):
    engine = hybrid_engine.init_inference(build_model(), dtype=name)
    assert engine.generator.model.dtype == torch.bfloat16
    assert engine.module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert "torch.bfloat16" in engine.report()


def test_an_encoder_runs_on_containers_and_does_not_generate():
    input_ids, mask = padded_prompts()
    model = build_bert()
    with torch.no_grad():
        expected = model(input_ids, attention_mask=mask).last_hidden_state[mask.bool()]
    engine = hybrid_engine.init_inference(model)
    hidden = engine(input_ids, attention_mask=mask).last_hidden_state[mask.bool()]
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=0)
    assert "all 2 BertLayer layers" in engine.report()
    with pytest.raises(ValueError, match="BertModel does not generate"):
        engine.generate(input_ids)


def test_a_module_that_is_no_language_model_runs_as_it_is():
    module = torch.nn.Linear(3, 2)
    engine = hybrid_engine.init_inference(module)
    assert torch.equal(engine(torch.ones(1, 3)), module(torch.ones(1, 3)))
    assert "Linear has no config" in engine.report()


@pytest.mark.parametrize(
    "build, options, line",
    [
        (build_model, {"replace_with_kernel_inject": False}, "LlamaDecoderLayer runs on containers"),
        (build_unlisted, {"kernel_inject": True}, "the model's own layers run: no policy for UnlistedLayer"),
        (build_model, {"injection_policy": {"LlamaDecoderLayer": ("o",)}}, "LlamaDecoderLayer has a policy"),
        (build_model, {"tm": False}, "LlamaDecoderLayer is causal"),
    ],
)
def test_a_flag_that_contradicts_the_model_is_answered_with_one_line(build, options, line, caplog):
    with caplog.at_level(logging.WARNING, "hybrid_engine"):
        hybrid_engine.init_inference(build(), **options)
    (record,) = caplog.records
    assert line in record.getMessage() and "\n" not in record.getMessage()


@pytest.mark.parametrize(
    "config, kwargs, words",
    [
        ({"max_out_tokens": 8}, {"max_out_tokens": 9}, "max_out_tokens is 8 in the config and 9 as a keyword"),
        ({"max_tokens": 8}, {"max_out_tokens": 9}, "max_out_tokens is 8 in the config and 9 as a keyword"),
        ({"max_tokens": 8, "max_out_tokens": 9}, {}, "the same option"),
        ({"mp_size": 2, "tensor_parallel": {"tp_size": 4}}, {}, "tensor_parallel.tp_size"),
        ({}, {"max_out_token": 8}, "max_out_token is not an option of init_inference; did you mean max_out_tokens?"),
        ({"tp": {"tp_size": 2}}, {"tensor_parallel": {"tp_size": 4}}, "tensor_parallel.tp_size is given as 2 and as 4"),
        ({"tensor_parallel": {"tpsize": 2}}, {}, "did you mean tensor_parallel.tp_size?"),
        ({"tp": 2}, {}, "must be a block"),
        ({"dtype": "int8"}, {}, "dtype='int8' is not supported; use one of fp32, bf16, fp16"),
        ({"quant": {"enabled": True}}, {}, "quant="),
        ({"moe": {"ep_size": 2}}, {}, "moe.ep_size=2"),
        ({"max_out_tokens": 0}, {}, "max_out_tokens=0"),
        ({"keep_module_on_host": True}, {}, "keep_module_on_host"),
    ],
)
def test_a_bad_option_is_named(config, kwargs, words):
    with pytest.raises(ValueError) as error:
        hybrid_engine.init_inference(build_model(), config, **kwargs)
    assert words in str(error.value)


@pytest.mark.quick
def test_every_key_of_deepspeed_is_known():
    """deepspeed/inference/config.py, by name and by alias."""
    config = read_config(
        {
            "kernel_inject": True, "dtype": "half", "tp": {"enabled": True, "tp_size": 1, "tp_grain_size": 64},
            "enable_cuda_graph": False, "use_triton": False, "triton_autotune": False, "zero": {}, "tm": True,
            "moe": False, "keep_module_on_host": False, "quant": {"enabled": False}, "checkpoint": None, "base_dir": "",
            "set_empty_params": False, "save_mp_checkpoint_path": None, "ckpt_config": {}, "return_tuple": True,
            "training_mp_size": 1, "replace_method": "auto", "injection_dict": None, "injection_policy_tuple": None,
            "args": None, "max_tokens": 8, "min_tokens": 1, "transposed_mode": False, "mpu": None, "ep_size": 1,
            "ep_group": None, "ep_mp_group": None, "moe_experts": [1], "moe_type": "standard",
        },
        {"mp_size": 1},
    )  # fmt: skip
    assert (config.dtype, config.max_out_tokens, config.tensor_parallel.size) == (torch.float16, 8, 1)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match=r"max_out_tokens=5000 must not exceed .* max_position_embeddings=2048"):
        hybrid_engine.init_inference(build_model(), max_out_tokens=5000)


def test_a_dtype_that_the_device_lacks_is_refused(monkeypatch):
    real = torch.nn.functional.linear

    def linear(input, *others):
        if input.dtype is torch.float16:
            raise RuntimeError("not implemented for 'Half'")
        return real(input, *others)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    with pytest.raises(ValueError, match=r"dtype=torch.float16: cpu does not compute in it"):
        hybrid_engine.init_inference(build_model(), dtype="fp16")


@pytest.mark.parametrize("family", [*CHECKPOINTS, *WITHOUT_PARAMETERS, "unlisted"])
def test_a_checkpoint_is_read_into_the_parts_and_no_process_reads_the_whole(shared, family):
    input_ids, mask = padded_prompts()
    expected = build(family).generate(input_ids, attention_mask=mask, **GREEDY)
    for part in shared:
        greedy, share = part[3][family]
        assert torch.equal(greedy, expected)
        # Without a policy the vocabulary stays whole; so do the low-rank paths of Gemma 3n.
        assert share < {"unlisted": 0.8, "gemma3n": 0.6}.get(family, 0.56)


@pytest.mark.parametrize("family", ["llama", "tied", "gemma2", "qwen2-moe", "unlisted"])
@pytest.mark.parametrize("form", ["folder", "index", "list", "deepspeed's"])
def test_one_process_reads_a_checkpoint_whole(folder, family, form):
    path = Path(folder) / family
    files = [file.name for file in sorted(path.glob("*.safetensors"))]
    assert len(files) > 1
    options = {
        "folder": {"checkpoint": path},
        "index": {"checkpoint": path / "model.safetensors.index.json"},
        "list": {"checkpoint": files, "base_dir": str(path)},
        "deepspeed's": {"checkpoint": {"type": "ds_model", "checkpoints": files}, "base_dir": str(path)},
    }
    input_ids, mask = padded_prompts()
    engine = hybrid_engine.init_inference(on_meta(family), dtype="bf16", **options[form])
    expected = build(family).to(torch.bfloat16)
    logits = engine(input_ids, attention_mask=mask).logits.float()
    torch.testing.assert_close(logits, expected(input_ids, attention_mask=mask).logits.float(), atol=0.1, rtol=0.05)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name))


def test_a_checkpoint_that_does_not_fit_lists_what_and_loads_nothing(folder):
    sizes = {**_SIZES, "num_hidden_layers": 4, "intermediate_size": 64}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=True))
    with pytest.raises(ValueError) as error:
        hybrid_engine.init_inference(model, checkpoint=f"{folder}/llama")
    text = str(error.value)
    assert "26 missing: model.layers.2.self_attn.q_proj.weight" in text and ", ...;" in text
    assert "6 extra: " in text and "mlp.down_proj.bias" in text
    assert "6 misshapen: " in text and "model.layers.0.mlp.gate_proj.weight [80, 48] instead of [64, 48]" in text
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_checkpoint_that_is_not_there_or_cannot_be_used_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match="is on the meta device and has no weights"):
        hybrid_engine.init_inference(on_meta("llama"))
    with pytest.raises(ValueError, match="this one has weights"):
        hybrid_engine.init_inference(build_model(), checkpoint=f"{folder}/llama")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        hybrid_engine.init_inference(on_meta("llama"), checkpoint=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        hybrid_engine.init_inference(on_meta("llama"), checkpoint=tmp_path)


def test_what_compile_returns_runs_and_says_why_it_does_not_generate():
    pipe = hybrid_engine.init_inference(torch.compile(build_model(), backend="eager"))
    input_ids, _ = padded_prompts()
    assert torch.equal(pipe(input_ids=input_ids).logits, build_model()(input_ids=input_ids).logits)
    with pytest.raises(ValueError, match=r"what torch.compile\(\) returned.*model.compile\(\)"):
        pipe.generate(input_ids)
