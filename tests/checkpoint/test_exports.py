"""A saved model computes what the trained one does, whatever adapters it carries, and saving changes nothing."""

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import hybrid_engine
from hybrid_engine.checkpoint.export import ask_model, check_saved_logits, relative_difference, save_adapter
from tests.support.distributed import run_distributed

TOKENS = torch.arange(16).view(2, 8)
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
LORA = {
    "trained embedding": {"modules_to_save": ["embed_tokens"]},
    "trained head": {"modules_to_save": ["lm_head"]},
    "trained embedding and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "trained embedding, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "tokens": {"trainable_token_indices": [3, 60]},
    "DoRA": {"use_dora": True},
    "norms": {"modules_to_save": ["norm", "input_layernorm"]},
}
OTHER_KINDS = {
    "OFTConfig": {"r": 0, "oft_block_size": 8},
    "FourierFTConfig": {"n_frequency": 20},
    "ShiraConfig": {"r": 4},
    "RandLoraConfig": {},
    "VeraConfig": {},
}


def causal_model(is_tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, tie_word_embeddings=is_tied))


def adapted(base: LlamaForCausalLM, config: peft.PeftConfig) -> PeftModel:
    """`base` with adapters that are far from their start."""
    model = get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def engine_of(model, stage: int = 0, **blocks):
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}, **blocks}
    return hybrid_engine.initialize(model=model, config=config)[0]


def saves_what_it_computes(model, folder) -> None:
    """Asserts that both exports of `model` give its logits, and that its weights stay as they are."""
    engine = engine_of(model).eval()
    with torch.no_grad():
        expected = engine(input_ids=TOKENS).logits
    before = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    random_state = torch.get_rng_state()
    engine.save_16bit_model(folder / "merged")
    save_adapter(engine.module, folder / "adapter")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.module.state_dict().items())
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    apart = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")
    with torch.no_grad():
        for saved in (merged, apart.eval()):
            torch.testing.assert_close(saved(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=2e-6)
        with apart.disable_adapter():
            assert (apart(input_ids=TOKENS).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", LORA)
def test_lora_beside_trained_embeddings_heads_and_tokens_is_saved_as_it_computes(name, is_tied, tmp_path):
    base = causal_model(is_tied)
    base.save_pretrained(tmp_path / "base")
    saves_what_it_computes(adapted(base, LoraConfig(**{"r": 4, **ATTENTION, **LORA[name]})), tmp_path)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_adapters_that_draw_values_when_they_are_built_are_saved_as_they_compute(kind, tmp_path):
    base = causal_model(False)
    base.save_pretrained(tmp_path / "base")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **ATTENTION, **OTHER_KINDS[kind])
    saves_what_it_computes(adapted(base, config), tmp_path)


def test_a_tied_model_whose_adapter_leaves_the_tie_alone_stays_tied(tmp_path):
    engine = engine_of(adapted(causal_model(True), LoraConfig(r=4, **ATTENTION)))
    engine.save_16bit_model(tmp_path)
    assert LlamaConfig.from_pretrained(tmp_path).tie_word_embeddings is True


def two_active_adapters() -> PeftModel:
    model = adapted(causal_model(False), LoraConfig(**ATTENTION, r=4))
    model.add_adapter("second", LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


def second_of_two_adapters_with_heads() -> PeftModel:
    model = adapted(causal_model(False), LoraConfig(**ATTENTION, modules_to_save=["lm_head"]))
    model.add_adapter("second", LoraConfig(**ATTENTION, init_lora_weights=False, modules_to_save=["lm_head"]))
    model.set_adapter("second")
    model.base_model.model.lm_head.modules_to_save["second"].weight.data *= 2
    return model


def adapters_of_transformers() -> LlamaForCausalLM:
    model = causal_model(True)
    model.add_adapter(LoraConfig(target_modules=["embed_tokens", "q_proj"], init_lora_weights=False), "first")
    model.add_adapter(LoraConfig(target_modules=["v_proj"], init_lora_weights=False), "second")
    model.set_adapter(["first", "second"])
    return model


@pytest.mark.parametrize("build", [two_active_adapters, second_of_two_adapters_with_heads, adapters_of_transformers])
def test_all_active_adapters_and_no_others_are_merged(build, tmp_path):
    engine = engine_of(build()).eval()
    with torch.no_grad():
        expected = engine(input_ids=TOKENS).logits
        engine.save_16bit_model(tmp_path)
        saved = LlamaForCausalLM.from_pretrained(tmp_path)(input_ids=TOKENS).logits
    torch.testing.assert_close(saved, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("state", "remedy"), [("merge_adapter", "unmerge_adapter"), ("disable_adapter_layers", "enable_adapter_layers")]
)
def test_adapters_that_are_merged_or_disabled_are_refused_with_the_remedy(state, remedy, tmp_path):
    engine = engine_of(adapted(causal_model(False), LoraConfig(**ATTENTION)))
    getattr(engine.module, state)()
    with pytest.raises(ValueError, match=remedy):
        engine.save_16bit_model(tmp_path)
    getattr(engine.module, remedy)()
    engine.save_16bit_model(tmp_path)


def test_an_adapter_that_wraps_the_base_model_in_another_way_is_refused_by_name(tmp_path):
    adapted(causal_model(False), LoraConfig(**ATTENTION)).save_pretrained(tmp_path / "expert")
    base = causal_model(False)
    base.config.use_cache = False
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters={"0": str(tmp_path / "expert")})
    engine = engine_of(get_peft_model(base, config))
    with pytest.raises(ValueError, match="XLoraModel wraps the base model"):
        engine.save_16bit_model(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_adapters_that_no_weights_can_express_are_refused_by_name(kind, tmp_path):
    engine = engine_of(
        get_peft_model(causal_model(False), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3))
    )
    with pytest.raises(ValueError, match=rf"'default' is {kind[:6].upper()}_TUNING.*save_pretrained"):
        engine.save_16bit_model(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_folder_that_computes_otherwise_is_refused_and_an_earlier_save_stays(tmp_path, monkeypatch):
    engine = engine_of(adapted(causal_model(False), LoraConfig(r=4, **ATTENTION)))
    engine.save_16bit_model(tmp_path)
    earlier = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr("peft.tuners.lora.layer.Linear.merge", lambda self, *args, **options: None)
    with pytest.raises(RuntimeError, match=r"logits differ by .* Nothing was saved"):
        engine.save_16bit_model(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == earlier
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_ctrl_c_while_a_save_is_compared_ends_the_save(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    engine = engine_of(causal_model(False))
    monkeypatch.setattr("hybrid_engine.checkpoint.export.ask_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.save_16bit_model(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_16_bits_passes_and_a_lost_adapter_does_not(dtype, tmp_path):
    base = causal_model(False).to(dtype)
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, LoraConfig(r=4, lora_alpha=16, **ATTENTION)).to(dtype)
    probe = ask_model(model, torch.device("cpu"))
    assert probe is not None
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    check_saved_logits(LlamaForCausalLM, tmp_path / "merged", probe)
    with pytest.raises(RuntimeError, match="not the trained model"):
        check_saved_logits(LlamaForCausalLM, tmp_path / "base", probe)


EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def model_with_experts(seed: int, dtype: torch.dtype, target: dict[str, list[str]]) -> PeftModel:
    torch.manual_seed(seed)
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    base = MixtralForCausalLM(MixtralConfig(**shape, **heads)).to(dtype)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=ATTENTION["target_modules"], **target)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("seed", range(4))
def test_adapters_of_experts_are_saved_in_bf16_although_rounding_chooses_other_experts(seed, tmp_path):
    engine_of(model_with_experts(seed, torch.bfloat16, EXPERTS), bf16={"enabled": True}).save_16bit_model(tmp_path)


def test_experts_that_are_chosen_by_rounding_alone_are_not_compared(tmp_path):
    model = model_with_experts(0, torch.float32, EXPERTS).merge_and_unload().eval()
    router = model.model.layers[0].mlp.gate.weight.data
    nudge = 1e-6 * torch.randn(router[2].shape)
    router[3] = router[2] + nudge
    probe = ask_model(model, torch.device("cpu"))
    router[3] = router[2] - nudge
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        difference = relative_difference(model(probe.inputs["input_ids"]).logits[0], probe.logits)
    assert difference.max() > 0.2 and 2 < (difference > 0.1).sum() < 16
    check_saved_logits(MixtralForCausalLM, tmp_path, probe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lost_adapter_of_experts_or_their_router_is_noticed(dtype, tmp_path):
    for name, target, words in (
        ("experts", EXPERTS, "logits differ"),
        ("router", {"target_parameters": ["mlp.gate.weight"]}, "chooses other experts|logits differ"),
    ):
        model = model_with_experts(0, dtype, target)
        probe = ask_model(model, torch.device("cpu"))
        model.unload().save_pretrained(tmp_path / name)
        with pytest.raises(RuntimeError, match=words):
            check_saved_logits(MixtralForCausalLM, tmp_path / name, probe)


def _save_on_a_rank(rank: int, world_size: int, folder, stage: int) -> None:
    config = LoraConfig(r=4, **ATTENTION, **LORA["trained embedding"])
    engine = engine_of(adapted(causal_model(True), config), stage)
    for _ in range(2):
        engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=TOKENS).logits
    engine.save_16bit_model(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(saved(input_ids=TOKENS).logits, expected, rtol=1e-5, atol=2e-6)
    engine.backward(engine(input_ids=TOKENS, labels=TOKENS).loss)  # training goes on
    engine.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_two_processes_save_what_they_compute(stage, tmp_path):
    run_distributed(_save_on_a_rank, 2, tmp_path, stage)
