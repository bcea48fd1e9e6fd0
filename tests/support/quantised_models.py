"""Models that transformers loads in 4 or 8 bits, in the hybrid engine; run by `test_quantised.py`.

It has a Python of its own: where the packages are, peft imports them, for which every process would wait seconds.
"""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

import hybrid_engine
from hybrid_engine.containers.quantised import dequantise, is_quantised, stored_tensors
from hybrid_engine.ops.linear_divergence import divergence
from hybrid_engine.optim.state_offload import count_bytes
from hybrid_engine.rlhf.batches.sequences import build_sequences, response_divergences, response_logprobs
from hybrid_engine.rlhf.experience.teacher_loading import load_frozen
from hybrid_engine.rlhf.experience.teachers import ModelTeacher
from hybrid_engine.rlhf.options.shared import AdapterOptions, TrainingOptions
from hybrid_engine.rlhf.planning import memory_plan
from hybrid_engine.rlhf.planning.comparison import check_one_process
from hybrid_engine.rlhf.planning.memory_plan import Sharded, kept_parts
from hybrid_engine.rlhf.runs.run_checks import check_trainable
from tests.support.distributed import run_distributed

FORMATS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "nf4 twice": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    "int8 weights": TorchAoConfig(Int8WeightOnlyConfig()),
}
LLM_INT8 = BitsAndBytesConfig(load_in_8bit=True)
GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
PROMPTS = torch.tensor([[0, 5, 6, 7], [9, 8, 4, 3]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(source, quantisation):
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=quantisation, dtype=torch.float32)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


def build_engine(model, stage=0, num_processes=1, **options):
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": {"enabled": True, **options},
    }
    return hybrid_engine.initialize(model=model, config=config)[0]


def bits(model):
    return {
        name: [part.detach().clone() for part in stored_tensors(parameter)]
        for name, parameter in model.named_parameters()
        if is_quantised(parameter)
    }


def assert_same_bits(ours, before):
    assert ours.keys() == before.keys() and before
    for name, parts in before.items():
        assert all(map(torch.equal, ours[name], parts)), name


def step(engine):
    engine.train()
    engine.backward(engine(input_ids=PROMPTS, attention_mask=MASK, labels=PROMPTS).loss)
    engine.step()
    engine.eval()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_base_trains_and_rolls_out_natively_and_stays_the_same_to_the_bit(source, name, pinned):
    engine = build_engine(load(source, FORMATS[name]), pin_parameters=pinned)
    before = bits(engine.module)
    assert "containers: all 3 LlamaDecoderLayer" in engine.report()
    assert ("layer by layer on every pass" in engine.report()) == (not pinned)
    engine.eval()
    for _ in range(2):
        expected = type(engine.module).generate(engine.module, input_ids=PROMPTS, attention_mask=MASK, **GREEDY)
        found = engine.generate(PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(found.sequences, expected)
        batch = build_sequences([[5, 6, 7], [9, 8, 4, 3]], found.sequences[:, 4:].tolist(), 0, torch.device("cpu"))
        with torch.no_grad():
            torch.testing.assert_close(found.logprobs, response_logprobs(engine, batch), atol=1e-4, rtol=1e-4)
        step(engine)
    assert_same_bits(bits(engine.module), before)


def held_bytes(model):
    linears = [linear for layer in model.layers for linear in layer.linears] + [model.lm_head]
    return sum(linear._fused_weight.num_bytes for linear in linears)


@pytest.mark.parametrize("pinned", [True, False])
def test_dequantised_layers_take_the_stated_memory_and_give_it_back(source, pinned):
    engine = build_engine(load(source, FORMATS["nf4"]), pin_parameters=pinned).eval()
    model = engine.generator.model
    of_a_layer = 4 * sum(linear.num_inputs * linear.num_outputs for linear in model.layers[0].linears)
    most = []
    for layer in model.layers:
        forward = layer.forward

        def note(*arguments, forward=forward, **named):
            most.append(held_bytes(model))
            return forward(*arguments, **named)

        layer.forward = note
    engine.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    assert set(most) == {of_a_layer * (3 if pinned else 1)} and held_bytes(model) == 0
    assert model.buffer_bytes(is_streamed=not pinned) == most[0]


def test_only_the_packed_weights_count_as_kept(source):
    engine = build_engine(load(source, FORMATS["nf4"]))
    whole = sum(4 * p.numel() for p in AutoModelForCausalLM.from_pretrained(source).parameters())
    assert count_bytes(engine.sharding, engine.optimizer).parameters < 0.6 * whole


def test_where_inputs_are_rounded_too_the_models_own_generate_runs_and_says_why(source):
    engine = build_engine(load(source, LLM_INT8)).eval()
    assert "rounds its inputs to 8 bits too (bitsandbytes' LLM.int8)" in engine.report()
    expected = type(engine.module).generate(engine.module, input_ids=PROMPTS, attention_mask=MASK, **GREEDY)
    assert torch.equal(engine.generate(PROMPTS, attention_mask=MASK, **GREEDY), expected)


@pytest.mark.parametrize("name", ["nf4", "int8 weights"])
def test_checkpoints_hold_the_adapter_and_exports_are_in_full_precision(source, tmp_path, name):
    engine = build_engine(load(source, FORMATS[name]))
    step(engine)
    engine.save_checkpoint(tmp_path / "run", exclude_frozen_parameters=True)
    engine.save_16bit_model(tmp_path / "export")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert type(merged.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    with torch.no_grad():
        expected = engine(input_ids=PROMPTS).logits
        torch.testing.assert_close(merged(input_ids=PROMPTS).logits, expected, atol=1e-4, rtol=1e-4)
    step(engine)
    resumed = build_engine(load(source, FORMATS[name]))
    resumed.load_checkpoint(tmp_path / "run")
    step(resumed)
    for ours, theirs in zip(resumed.module.parameters(), engine.module.parameters(), strict=True):
        assert not ours.requires_grad or torch.equal(ours, theirs)


def test_a_base_whose_scales_have_moved_in_a_forward_pass_is_exported_as_before(source, tmp_path):
    engine = build_engine(load(source, LLM_INT8)).eval()
    folders = [tmp_path / name for name in ("before", "after")]
    for folder in folders:
        engine.save_16bit_model(folder)
        with torch.no_grad():
            logits = engine(input_ids=PROMPTS).logits
    linear = engine.module.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert linear.weight.SCB is None
    before, after = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders)
    assert all(map(torch.equal, before.parameters(), after.parameters()))
    with torch.no_grad():  # inputs are rounded to 8 bits on one side
        torch.testing.assert_close(after(input_ids=PROMPTS).logits, logits, atol=0.1, rtol=0.1)


def test_a_plan_for_several_processes_refuses_a_quantised_base(source):
    config = AutoModelForCausalLM.from_pretrained(source, quantization_config=FORMATS["nf4"]).config
    check_one_process([config], 1)
    check_one_process([AutoConfig.from_pretrained(source)], 2)
    with pytest.raises(
        ValueError, match=r"--processes=2: --model is quantized: .* --processes 1, or give the model in"
    ):
        check_one_process([config], 2)


def test_what_is_dequantised_is_what_the_libraries_multiply_by(source):
    model = build_engine(load(source, FORMATS["nf4"])).module.get_base_model()
    linear = model.model.layers[0].mlp.up_proj.base_layer
    torch.manual_seed(2)
    inputs = torch.randn(3, linear.in_features)
    torch.testing.assert_close(inputs @ dequantise(linear.weight).t(), linear(inputs), atol=1e-5, rtol=1e-5)


def on_two_processes(rank, world_size, source, name):
    model = load(source, FORMATS[name])
    refusals = []
    for refuse in (
        lambda: build_engine(model, stage=3),
        lambda: check_trainable(AdapterOptions(lora_rank=8), model.config, "packed"),
    ):
        try:
            refuse()
        except ValueError as error:
            refusals.append(str(error))
    return refusals


@pytest.mark.parametrize("name", ["nf4", "int8 weights"])
def test_several_processes_refuse_them_by_name(source, name):
    for of_engine, of_recipe in run_distributed(on_two_processes, 2, source, name):
        assert "q_proj.base_layer.weight is quantized" in of_engine and "train it on one process" in of_engine
        assert "--model='packed' is quantized" in of_recipe and "on one process instead of 2" in of_recipe


def test_a_model_that_bitsandbytes_has_repacked_is_refused(source):
    model = load(source, FORMATS["nf4"]).eval()
    linear = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    linear.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"q_proj.base_layer was repacked by a forward pass .* load the model anew"):
        build_engine(model)


@pytest.mark.parametrize("name", [*FORMATS, "llm.int8"])
def test_a_plan_has_the_bytes_of_the_packed_weights(source, name):
    quantisation = FORMATS.get(name, LLM_INT8)
    loaded = AutoModelForCausalLM.from_pretrained(source, quantization_config=quantisation, dtype=torch.float32)
    held = sum(part.nbytes for parameter in loaded.parameters() for part in stored_tensors(parameter))
    shapes = memory_plan._shapes(memory_plan._build(AutoModelForCausalLM, loaded.config, torch.float32))
    (weights, *_) = kept_parts([shape._replace(is_trained=False) for shape in shapes], Sharded(0, 1, 4))
    assert weights.num_bytes == held and "quantised ones in" in weights.formula


def test_a_quantised_teacher_states_the_distributions_of_its_own_logits(source, tmp_path):
    load_quantised = AutoModelForCausalLM.from_pretrained
    load_quantised(source, quantization_config=FORMATS["nf4"], dtype=torch.float32).save_pretrained(tmp_path)
    student = LlamaForCausalLM.from_pretrained(source)
    policy = SimpleNamespace(actor=SimpleNamespace(module=student))
    model = load_frozen(str(tmp_path), TrainingOptions(), policy, is_same_vocabulary=False)
    assert any(map(is_quantised, model.parameters()))
    batch = build_sequences([[5, 6, 7], [9]], [[8, 4], [3, 2, 1]], 0, torch.device("cpu"))
    found = response_divergences(student, ModelTeacher(model=model, temperature=1.0).read(batch), batch, 1.0, 1.0)
    width = batch.response_mask.shape[1]
    inputs = {"attention_mask": batch.attention_mask, "position_ids": batch.position_ids}
    logprobs = [m(batch.input_ids, **inputs).logits[:, -width - 1 : -1].log_softmax(-1) for m in (student, model)]
    expected = torch.where(batch.response_mask, divergence(*logprobs, 1.0), 0.0)
    assert expected.sum() > 1e-4
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
    found.sum().backward()
    assert student.lm_head.weight.grad is not None
