"""deepspeed.utils.zero_to_fp32: the weights of a checkpoint, read without an engine."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hybrid_engine as deepspeed
from hybrid_engine.extensions.deepspeed.zero_to_fp32 import main
from hybrid_engine.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from tests.support.distributed import run_distributed
from tests.support.training_reference import engine_config, tiny_llama, train_engine, whole_weights

pytestmark = pytest.mark.quick


def train_and_save(rank, world_size, folder):
    """Stage 3 in bf16; the masters, whole."""
    engine = deepspeed.initialize(
        model=tiny_llama(), config=engine_config(3, world_size, bf16={"enabled": True}, scheduler=None)
    )[0]
    train_engine(engine, 1)
    engine.save_checkpoint(folder, tag="first")
    train_engine(engine, 1, first_step=1)
    engine.save_checkpoint(folder, tag="second")
    masters = {
        name: deepspeed.utils.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()
    }
    return masters, whole_weights(engine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_distributed(train_and_save, 2, folder)[0]


def test_the_latest_checkpoint_of_two_processes_gives_its_masters_to_one(saved):
    folder, (masters, weights) = saved
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == masters.keys() | {"lm_head.weight"} == tiny_llama().state_dict().keys()
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert all(torch.equal(state[name], masters[name]) for name in masters)
    assert any(not torch.equal(state[name], weights[name].float()) for name in weights), "not the rounded parameters"
    first = get_fp32_state_dict_from_zero_checkpoint(folder, tag="first")
    assert any(not torch.equal(first[name], state[name]) for name in masters)


def test_a_plain_model_takes_them_tied_ones_too(saved, caplog):
    folder, (masters, _) = saved
    model = load_state_dict_from_zero_checkpoint(tiny_llama(seed=1), folder)
    assert all(torch.equal(param, masters[name]) for name, param in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight and "keep their" not in caplog.text
    untied = load_state_dict_from_zero_checkpoint(tiny_llama(tie=False), folder)
    assert torch.equal(untied.lm_head.weight, masters["model.embed_tokens.weight"]) and "keep their" not in caplog.text
    with pytest.raises(ValueError, match="is of another model, which has lm_head"):
        load_state_dict_from_zero_checkpoint(torch.nn.Linear(2, 2), folder)


def test_they_are_written_to_one_file(saved, tmp_path):
    folder, (masters, _) = saved
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path)
    convert_zero_checkpoint_to_fp32_state_dict(folder, tmp_path, safe_serialization=True)
    for state in (torch.load(tmp_path / "pytorch_model.bin"), load_file(tmp_path / "model.safetensors")):
        assert all(torch.equal(state[name], masters[name]) for name in masters)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin"]


def test_what_there_is_not_is_refused(saved):
    folder, _ = saved
    with pytest.raises(ValueError, match="third"):
        get_fp32_state_dict_from_zero_checkpoint(folder, tag="third")
    with pytest.raises(ValueError, match="lazy_mode=True is not supported"):
        get_fp32_state_dict_from_zero_checkpoint(folder, lazy_mode=True)


@pytest.fixture(scope="module")
def saved_with_frozen(tmp_path_factory):
    """A model with a frozen matrix, a tied and frozen embedding, and a buffer."""
    model = nn.ModuleDict({"base": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3), "words": nn.Embedding(4, 3)})
    model["head"] = nn.Linear(3, 4, bias=False)
    model["head"].weight = model["words"].weight
    model["base"].weight.requires_grad_(False)
    model["words"].weight.requires_grad_(False)
    engine = deepspeed.initialize(model=model, config=engine_config(0, 1, scheduler=None))[0]
    folder = tmp_path_factory.mktemp("frozen")
    engine.save_checkpoint(folder)
    return folder


def test_frozen_parameters_are_left_out_and_buffers_are_not(saved_with_frozen):
    whole = get_fp32_state_dict_from_zero_checkpoint(saved_with_frozen)
    trained = get_fp32_state_dict_from_zero_checkpoint(saved_with_frozen, exclude_frozen_parameters=True)
    assert whole.keys() - trained.keys() == {"base.weight", "words.weight", "head.weight"}
    assert {"base.bias", "norm.weight", "norm.bias", "norm.running_mean"} <= trained.keys()
    assert all(torch.equal(trained[name], whole[name]) for name in trained)


def test_the_script_beside_checkpoints_writes_the_weights(saved):
    folder, (masters, _) = saved
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "--safe_serialization", "-t", "second"]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    state = load_file(folder / "out" / "model.safetensors")
    assert all(torch.equal(state[name], masters[name]) for name in masters)


def test_the_script_has_deepspeeds_options(saved_with_frozen, tmp_path, capsys):
    options = ["--exclude_frozen_parameters", "--max_shard_size", "1GB", "-d"]
    main([str(saved_with_frozen), str(tmp_path), *options])
    assert "base.weight" not in torch.load(tmp_path / "pytorch_model.bin")
    with pytest.raises(SystemExit):
        main([str(saved_with_frozen), str(tmp_path), "--tag", "third"])
    assert "tag='third': there is no such checkpoint" in capsys.readouterr().err


def test_a_script_that_is_there_already_stays(tmp_path):
    (tmp_path / "zero_to_fp32.py").write_text("mine")
    engine = deepspeed.initialize(model=nn.Linear(2, 2), config=engine_config(0, 1, scheduler=None))[0]
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "zero_to_fp32.py").read_text() == "mine"
