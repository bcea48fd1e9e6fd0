"""Options of the adapter that a recipe trains: what peft makes of them, and which are refused before any work."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from hybrid_engine.recipes import agent, dpo, grpo, kto, online_dpo, ppo, reward, sft
from hybrid_engine.rlhf.batches.passes import RunPasses
from hybrid_engine.rlhf.options.shared import AdapterOptions
from hybrid_engine.rlhf.runs.checkpoints import OPTIONS, check_saved_options
from hybrid_engine.rlhf.runs.checkpoints import _options as options_of
from hybrid_engine.rlhf.runs.run_checks import check_targets, lora_config
from tests.support.chat import MARKED_TEMPLATE, build_chat_tokenizer

ADAPTER = {"lora_rank": 2, "lora_alpha": 32, "lora_targets": ("q_proj", "mlp.down_proj")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny chat model."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_chat_tokenizer(MARKED_TEMPLATE)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def config(model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": "a" * (n % 3 + 1)}) + "\n" for n in range(20)))
    return sft.Config(
        out=str(tmp_path / "run"), model=model, dataset=str(path), batch_size=4, learning_rate=1e-2, save_every=0
    )


def test_an_adapter_is_what_the_options_say_and_is_saved_as_peft_reads_it(config, model):
    folder = sft.run(replace(config, **ADAPTER, lora_dropout=0.25))
    saved = PeftConfig.from_pretrained(folder / "adapter")
    assert (saved.r, saved.lora_alpha, saved.lora_dropout) == (2, 32, 0.25)
    assert saved.target_modules == {"q_proj", "mlp.down_proj"}
    base = AutoModelForCausalLM.from_pretrained(model)
    plain, tokens = base(torch.arange(9)[None]).logits, torch.arange(9)[None]
    theirs = PeftModel.from_pretrained(base, folder / "adapter").eval()(tokens).logits
    assert not torch.allclose(theirs, plain, atol=1e-4)
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, theirs)


def test_dropout_acts_in_training_alone(config):
    folders = [sft.run(replace(config, **ADAPTER, out=f"{config.out}-{p}", lora_dropout=p)) for p in (0.0, 0.5)]
    logits = [AutoModelForCausalLM.from_pretrained(folder)(torch.arange(9)[None]).logits for folder in folders]
    assert not torch.allclose(*logits, atol=1e-4)
    results = [json.loads((folder.parent / "sft-log" / "result.json").read_text()) for folder in folders]
    again = sft.held_out_loss  # of the saved model, which has no dropout any more
    for folder, result in zip(folders, results, strict=True):
        _, corpus = sft.load_corpus(config)
        net = AutoModelForCausalLM.from_pretrained(folder)
        assert again(InEval(net), corpus, RunPasses()) == pytest.approx(result["held_out_nats_per_token"], rel=1e-5)


class InEval(torch.nn.Module):
    """A model that stands for an engine."""

    def __init__(self, module):
        super().__init__()
        self.module, self.device = module, torch.device("cpu")

    def forward(self, **inputs):
        return self.module(**inputs)


def test_without_options_an_adapter_is_what_it_was():
    assert lora_config(AdapterOptions(lora_rank=4)) == LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    assert AdapterOptions(lora_rank=4, lora_targets=("all-linear",)) == AdapterOptions(lora_rank=4)


@pytest.mark.parametrize("recipe", [sft, reward, dpo, kto, online_dpo, grpo, ppo, agent])
def test_every_recipe_with_an_adapter_has_its_options(recipe):
    made = recipe.Config(model="m", **ADAPTER)
    assert lora_config(made).lora_alpha == 32 and lora_config(made).target_modules == {"q_proj", "mlp.down_proj"}
    with pytest.raises(ValueError, match="--lora-alpha=32 needs an adapter; give --lora-rank, such as 8, or leave"):
        recipe.Config(model="m", lora_alpha=32)
    with pytest.raises(ValueError, match=r"--lora-dropout=1\.0 must be at least 0 and below 1"):
        recipe.Config(model="m", lora_rank=2, lora_dropout=1.0)
    if recipe in (grpo, ppo, agent):
        with pytest.raises(
            ValueError, match=r"--lora-dropout=0\.1 would compare two different networks .*first_ratio would not be 1"
        ):
            recipe.Config(model="m", lora_rank=2, lora_dropout=0.1)
    else:
        assert lora_config(recipe.Config(model="m", lora_rank=2, lora_dropout=0.1)).lora_dropout == 0.1


def test_targets_that_the_model_does_not_have_are_named_with_near_ones(config, model, tmp_path):
    with pytest.raises(
        ValueError, match=r"--lora-targets='qproj' matches no linear layer in the body of --model=.*use q_proj"
    ):
        sft.run(replace(config, **ADAPTER | {"lora_targets": ("v_proj", "qproj")}))
    with pytest.raises(ValueError, match="--lora-targets='lm_head' matches no linear layer in the body"):
        grpo.run(grpo.Config(model=model, dataset=config.dataset, reward=("exact",), out=config.out, lora_rank=2,
                             lora_targets=("lm_head",)))  # fmt: skip
    for recipe in (agent, dpo):
        with pytest.raises(ValueError, match="of the model that is made without --model, which has down_proj, "):
            recipe.run(recipe.Config(out=config.out, lora_rank=2, lora_targets=("c_attn",)))
    assert not (tmp_path / "run").exists()
    check_targets(["c_attn", "mlp.c_proj"], GPT2Config(n_layer=1), "GPT-2")  # whose linears are of a class of its own


def test_a_run_of_before_goes_on_with_the_adapter_that_it_had(config, tmp_path):
    config = replace(config, lora_rank=2)
    earlier = {name: value for name, value in options_of(config).items() if name not in ADAPTER or name == "lora_rank"}
    del earlier["lora_dropout"]
    (tmp_path / OPTIONS).write_text(json.dumps(earlier))
    check_saved_options(tmp_path, config)
    with pytest.raises(ValueError, match="--lora-alpha=32 but the interrupted run is from a version without this"):
        check_saved_options(tmp_path, replace(config, lora_alpha=32))
