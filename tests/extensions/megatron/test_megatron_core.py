"""Checkpoints of Megatron Core, saved by four ranks, are the models that they were saved from, on any layout."""

import os
import pickle
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_engine.extensions.megatron.loading import build_empty_megatron_gpt, load_megatron_gpt
from hybrid_engine.inference import init_inference
from tests.generation.test_pipeline_stages import build_gpt2
from tests.support.distributed import run_distributed
from tests.support.megatron_checkpoints import megatrons, save_distributed, save_ranks
from tests.support.models import PAD, VOCAB, padded_prompts, randomised

GREEDY = {
    "do_sample": False,
    "max_new_tokens": 8,
    "pad_token_id": PAD,
    "eos_token_id": [7, 11],
    "logprobs": "processed",
}


def build_llama():
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=VOCAB, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"llama": build_llama, "gpt2": build_gpt2}
SAVERS = {"ranks": save_ranks, "distributed": save_distributed}
KINDS = [f"{model} {saver}" for model in MODELS for saver in SAVERS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    for kind in KINDS:
        model, saver = kind.split()
        SAVERS[saver](randomised(MODELS[model]), folder / kind)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_checkpoint_of_four_ranks_is_the_model_that_it_was_saved_from(saved, kind):
    model, loaded = randomised(MODELS[kind.split()[0]]), load_megatron_gpt(saved / kind)
    tokens = torch.randint(3, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(tokens).logits[..., :VOCAB], model(tokens).logits, atol=2e-5, rtol=1e-5)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == ("gpt2" in kind)


def rolled(engine):
    input_ids, mask = padded_prompts()
    output = engine.generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    return output.sequences, output.logprobs


def on_layouts(rank, world_size, folder, layouts):
    """Rollouts of each checkpoint on each layout."""
    found = {}
    for kind in KINDS:
        for tp_size, num_stages in layouts:
            engine = init_inference(
                build_empty_megatron_gpt(folder / kind), checkpoint=folder / kind,
                tensor_parallel={"tp_size": tp_size}, pipeline_parallel_size=num_stages,
            )  # fmt: skip
            found[kind, tp_size, num_stages] = rolled(engine)
    return found


def test_it_generates_what_the_model_generates_on_any_layout(saved):
    found = (
        run_distributed(on_layouts, 4, saved, [(2, 2)])[3] | run_distributed(on_layouts, 2, saved, [(2, 1), (1, 2)])[0]
    )
    expected = {name: init_inference(randomised(build)) for name, build in MODELS.items()}
    assert len(found) == 12
    for (kind, _, _), (sequences, logprobs) in found.items():
        input_ids, mask = padded_prompts()
        own = expected[kind.split()[0]].generate(input_ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(sequences, own.sequences)
        torch.testing.assert_close(logprobs, own.logprobs, atol=1e-5, rtol=0)


def change(path, edit):
    with megatrons():
        content = torch.load(path, weights_only=False)
        edit(content)
        torch.save(content, path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda args: vars(args).update(num_layers=6), r"layers \[0, 1, 2, 3\] of 6; copy the folders of all stages"),
        (lambda args: vars(args).update(position_embedding_type="none"), "position_embedding_type='none'"),
        (lambda args: vars(args).update(num_experts=8), "num_experts=8"),
    ],
)
def test_a_model_of_another_form_is_refused_by_what_its_options_say(tmp_path, edit, message):
    save_distributed(randomised(build_llama), tmp_path / "saved")
    change(tmp_path / "saved" / "common.pt", lambda content: edit(content["args"]))
    with pytest.raises(ValueError, match=message):
        load_megatron_gpt(tmp_path / "saved")


def test_a_missing_stage_is_named(saved, tmp_path):
    shutil.copytree(saved / "llama ranks" / "iter_0000012", tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "mp_rank_01_001")
    with pytest.raises(ValueError, match=r"0 of stage 1.*; expected those of ranks 0 to the last, of every stage"):
        load_megatron_gpt(tmp_path / "saved")


class Hostile:
    """What runs a command where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", ["ranks", "common.pt", ".metadata"])
def test_nothing_that_a_checkpoint_holds_is_run(tmp_path, file):
    made, model = tmp_path / "made", randomised(build_llama)
    if file == "ranks":
        save_ranks(model, tmp_path / "saved", 1, 1)
        path = tmp_path / "saved" / "iter_0000012" / "mp_rank_00_000" / "model_optim_rng.pt"
    else:
        save_distributed(model, tmp_path / "saved")
        path = tmp_path / "saved" / file
    if file == ".metadata":
        with megatrons():
            index = pickle.loads(path.read_bytes())
            index.mcore_data = Hostile(made)
            path.write_bytes(pickle.dumps(index))
        load_megatron_gpt(tmp_path / "saved")  # a part of the index that nobody reads
    else:
        change(path, lambda content: content.update(rng_state=Hostile(made)))
        with pytest.raises(ValueError, match="is not a file of tensors"):
            load_megatron_gpt(tmp_path / "saved")
    assert not made.exists()
