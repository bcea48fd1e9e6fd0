"""Checkpoints and exports without frozen parameters: adapters alone, for a base that is there already."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch import nn

import hybrid_engine
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.training_reference import engine_config, tiny_llama, train_engine

pytestmark = pytest.mark.quick

BEFORE, AFTER = 3, 3


def adapted(adapter_seed=0, base_seed=0):
    """peft's LoRA on a small Llama; the seeds choose their first values."""
    base = tiny_llama(base_seed)
    torch.manual_seed(adapter_seed)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


def build_engine(model, stage=0, world_size=1):
    return hybrid_engine.initialize(model=model, config=engine_config(stage, world_size))[0]


def weights(engine, of_adapters):
    named = engine.module.named_parameters()
    return {name: full_tensor(p).clone() for name, p in named if ("lora_" in name) == of_adapters}


def stored_names(folder):
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def on_two_ranks(rank, world_size, folder):
    """ZeRO-3: saves after some steps, goes on; then loads what it saved and goes on again."""
    engine = build_engine(adapted(), 3, world_size)
    train_engine(engine, BEFORE)
    path = engine.save_checkpoint(folder / "run", exclude_frozen_parameters=True)
    engine.save_16bit_model(folder / "export", exclude_frozen_parameters=True)
    saved = weights(engine, of_adapters=True)
    went_on = train_engine(engine, AFTER, first_step=BEFORE).norms
    resumed = build_engine(adapted(adapter_seed=5), 3, world_size)
    resumed.load_checkpoint(folder / "run")
    return saved, went_on, train_engine(resumed, AFTER, first_step=BEFORE).norms, stored_names(path)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run_distributed(on_two_ranks, 2, folder)


def test_a_run_of_adapters_goes_on_from_a_checkpoint_without_its_base(tmp_path):
    engine = build_engine(adapted())
    train_engine(engine, BEFORE)
    path = engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    saved = weights(engine, of_adapters=True)
    names = stored_names(path)
    assert {name.removeprefix("weights.") for name in names if name.startswith("weights.")} == set(saved)
    went_on = train_engine(engine, AFTER, first_step=BEFORE).losses
    resumed = build_engine(adapted(adapter_seed=5))
    resumed.load_checkpoint(tmp_path)
    assert_equal(weights(resumed, of_adapters=True), saved)
    assert train_engine(resumed, AFTER, first_step=BEFORE).losses == went_on


def test_the_base_of_the_engine_that_loads_stays_as_it_is(tmp_path):
    engine = build_engine(adapted())
    train_engine(engine, BEFORE)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other = build_engine(adapted(base_seed=8))
    base = weights(other, of_adapters=False)
    other.load_checkpoint(tmp_path)
    assert_equal(weights(other, of_adapters=False), base)
    assert_equal(weights(other, of_adapters=True), weights(engine, of_adapters=True))


def test_two_ranks_under_zero_3_save_and_load_it_and_so_does_one(two_ranks):
    folder, ranks = two_ranks
    for saved, went_on, resumed, names in ranks:
        assert resumed == went_on
        assert {name.removeprefix("weights.") for name in names if name.startswith("weights.")} == set(saved)
    alone = build_engine(adapted(adapter_seed=5))
    alone.load_checkpoint(folder / "run")
    assert_equal(weights(alone, of_adapters=True), ranks[0][0])
    assert train_engine(alone, AFTER, first_step=BEFORE).norms == pytest.approx(ranks[0][1], rel=1e-5)


def test_a_model_of_other_names_or_shapes_is_refused(tmp_path):
    engine = build_engine(adapted())
    train_engine(engine, 1)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    with pytest.raises(ValueError, match=r"lora_A\.default\.weight is not in the model"):
        build_engine(tiny_llama()).load_checkpoint(tmp_path)
    wider = adapted()
    wider.base_model.model.model.embed_tokens.weight = nn.Parameter(torch.zeros(70, 32), requires_grad=False)
    before = weights(other := build_engine(wider), of_adapters=True)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has shape \[70, \d+\] in the model"):
        other.load_checkpoint(tmp_path)
    assert_equal(weights(other, of_adapters=True), before)


def test_what_is_trained_is_never_left_out(tmp_path):
    engine = build_engine(tiny_llama())
    train_engine(engine, BEFORE)
    path = engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    full = engine.save_checkpoint(tmp_path / "full")
    assert stored_names(path) == stored_names(full)


class Two(nn.Module):
    """Two parameters of names to choose."""

    def __init__(self, *names, value=0.0, size=3):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.full((size,), value)))

    def forward(self):
        return sum(p.sum() for p in self.parameters())


def test_without_strictness_weights_that_one_side_lacks_stay_as_they_are(tmp_path):
    config = {"train_batch_size": 1}
    saving, *_ = hybrid_engine.initialize(model=Two("a", "b", value=1.0), config=config)
    saving.save_checkpoint(tmp_path, "t", {}, True, False)
    loading, *_ = hybrid_engine.initialize(model=Two("a", "c"), config=config)
    with pytest.raises(ValueError, match="b is not in the model; c is not in the checkpoint"):
        loading.load_checkpoint(tmp_path)
    loading.load_checkpoint(tmp_path, "t", False, True, True, False)  # positions of DeepSpeed's arguments
    assert (loading.module.a.tolist(), loading.module.c.tolist()) == ([1.0] * 3, [0.0] * 3)
    in_bf16, *_ = hybrid_engine.initialize(
        model=Two("a", "c"), config={**config, "bf16": {"enabled": True}, "optimizer": {"type": "Adam"}}
    )
    in_bf16.module.c.data.fill_(5.0)  # like a head that was initialised later
    in_bf16.load_checkpoint(tmp_path, load_module_strict=False, load_module_only=True)
    assert (in_bf16.module.a.tolist(), in_bf16.module.c.tolist()) == ([1.0] * 3, [5.0] * 3)
    wider, *_ = hybrid_engine.initialize(model=Two("a", "c", size=4), config=config)
    with pytest.raises(ValueError, match=r"a has shape \[4\] in the model and \[3\]"):
        wider.load_checkpoint(tmp_path, load_module_strict=False)


def test_an_export_without_frozen_parameters_is_the_state_dict_of_the_others(tmp_path, two_ranks):
    engine = build_engine(adapted())
    train_engine(engine, BEFORE)
    input_ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = engine.eval()(input_ids=input_ids).logits
    assert engine.save_16bit_model(tmp_path, "adapters.bin", True)
    engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
    states = [torch.load(tmp_path / name) for name in ("adapters.bin", "pytorch_model.bin")]
    for state in states:
        assert_equal(state, weights(engine, of_adapters=True))
    loaded = adapted(adapter_seed=5).eval()
    missing = loaded.load_state_dict(states[0], strict=False)
    assert not missing.unexpected_keys
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=input_ids).logits, expected)
    folder, ranks = two_ranks
    assert_equal(torch.load(folder / "export" / "pytorch_model.bin"), ranks[0][0])


def test_buffers_are_exported_with_what_is_trained(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].requires_grad_(False)
    engine, *_ = hybrid_engine.initialize(
        model=module, config={"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    )
    engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
    state = torch.load(tmp_path / "pytorch_model.bin")
    assert set(state) == {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
