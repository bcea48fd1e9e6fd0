"""zero.Init: a plain build's values, in shards from the start, through to training, generating and transformers."""

import copy
import ctypes
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

import hybrid_engine as deepspeed
from hybrid_engine.zero.sharding import full_tensor, local_tensor
from tests.support.distributed import run_distributed
from tests.support.fresh_python import run_python
from tests.support.training_reference import (
    ADAM,
    engine_config,
    relative_error,
    tiny_llama,
    train_engine,
    train_plainly,
    whole_weights,
)

pytestmark = [pytest.mark.long, pytest.mark.torch_versions]

STEPS = 3


class Initialised(nn.Module):
    """Its constructor initialises in the ways people write: by a walk, through `data`, by slices, with ties."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embed = nn.Embedding(11, 4, padding_idx=1)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 5), 2, enable_nested_tensor=False)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))
        self.apply(self._initialise)
        with torch.no_grad():
            self.layers[0].weight[1] = 7.0
            self.layers[1].weight.copy_(self.layers[0].weight)
            self.layers[2].weight.mul_(1 / self.layers[2].weight.norm())
        with deepspeed.zero.GatheredParameters([self.layers[2].weight], modifier_rank=0):
            self.layers[2].weight.data[0] = 3.0
        self.layers[3].weight.data.abs_()
        self.layers[3].weight.requires_grad = False

    def _initialise(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
            with torch.no_grad():
                module.weight[module.padding_idx].fill_(0)


def classes_with_constructors():
    return [(cls, cls.__init__) for cls in (nn.Linear, nn.Embedding, nn.TransformerEncoderLayer, Initialised)]


def whole(model):
    return {name: full_tensor(p).clone() for name, p in model.named_parameters(remove_duplicate=False)}


def build_inside(rank, world_size):
    """Values, types and marks after a build, beside those of a plain one."""
    torch.manual_seed(0)
    plain = whole(Initialised())
    before = classes_with_constructors()
    torch.manual_seed(rank)  # rank 0's values count
    with deepspeed.zero.Init(config_dict_or_path=engine_config(3, world_size)):
        model = Initialised()
        inside = nn.Linear(5, 3)
    results = {"values": whole(model).keys() == plain.keys() and relative_error(whole(model), plain)}
    results["restored"] = classes_with_constructors() == before and "__init_subclass__" not in vars(nn.Module)
    results["types"] = {type(p) for p in model.parameters()}
    results["frozen"] = [name for name, p in model.named_parameters() if not p.requires_grad]
    results["tied"] = model.head.weight is model.embed.weight
    results["marks"] = (inside.weight.ds_status.name, tuple(inside.weight.ds_shape), inside.weight.ds_tensor.numel())
    results["clones"] = len({p.ds_id for p in model.parameters()}) == len(list(model.parameters()))
    return results


class SkipsInit(nn.Module):
    """Built without values, which it then gives."""

    def __init__(self):
        super().__init__()
        self.inner = nn.utils.skip_init(nn.Linear, 4, 6)
        for value, param in enumerate(self.inner.parameters()):
            nn.init.constant_(param, value + 1)


def build_without_values():
    with deepspeed.zero.Init():
        model = nn.ModuleList([SkipsInit(), nn.utils.skip_init(nn.Linear, 4, 6)])
        alone = nn.utils.skip_init(nn.Linear, 4, 6)
        for param in [*model[1].parameters(), *alone.parameters()]:
            nn.init.constant_(param, 3)
    params = [*model.parameters(), *alone.parameters()]
    return {type(p) for p in params}, [full_tensor(p).unique().tolist() for p in params]


def other_ways(rank, world_size):
    config = engine_config(3, world_size, bf16={"enabled": True})
    results = {"without values": build_without_values()}
    with deepspeed.zero.Init(config_dict_or_path=config), deepspeed.zero.Init():
        model = Initialised()
    results["dtypes"] = ({p.dtype for p in model.parameters()}, model.steps.dtype)
    with deepspeed.zero.Init():
        model = tiny_llama()
    held = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    params = list(engine.module.parameters())
    results["cast"] = {p.dtype for p in params} | {local_tensor(p).dtype for p in params}
    results["cast in place"] = all(p is q for p, q in zip(held, params, strict=True))
    results["cast state"] = train_engine(engine, STEPS).weights
    engine, *_ = deepspeed.initialize(model=tiny_llama(), config=config)
    results["built plainly"] = train_engine(engine, STEPS).weights
    existing = Initialised()
    values = whole(existing)
    deepspeed.zero.Init(module=existing)
    error = relative_error(whole(existing), values)  # collective
    results["existing"] = error if rank == 0 else 0.0
    results["existing types"] = {type(p) for p in existing.parameters()}
    with deepspeed.zero.Init(enabled=False, config_dict_or_path={"anything": 1}):
        plain = nn.Linear(2, 2)
    results["disabled"] = type(plain.weight) is nn.Parameter and not hasattr(plain.weight, "ds_id")
    before = classes_with_constructors()
    try:
        with deepspeed.zero.Init():
            nn.Linear("wrong", 3)
    except TypeError:
        results["after an error"] = classes_with_constructors() == before
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = tiny_llama()
    results["refused"] = []
    for other in (engine_config(1, world_size), mesh_config(world_size)):
        try:
            deepspeed.initialize(model=model, config=other)
        except ValueError as error:
            results["refused"].append(str(error))
    return results


def mesh_config(world_size):
    """Every process is a shard group of its own, with copies across."""
    return {**engine_config(3, world_size), "zero_optimization": {"stage": 3, "mics_shard_size": 1}}


def train(rank, world_size):
    config = engine_config(3, world_size)
    results = {}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = tiny_llama()
    held = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    results["same objects"] = all(a is b for a, b in zip(held, engine.module.parameters(), strict=True))
    results["config"] = train_engine(engine, STEPS).weights
    results["alias"] = all(p.ds_tensor.data_ptr() == local_tensor(p).data_ptr() for p in held if p.ndim > 1)
    without = {name: block for name, block in config.items() if name != "optimizer"}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=without)
        results["inside"] = nn.Linear(2, 2).weight.ds_status.name
    results["instance"] = train_engine(engine, STEPS).weights
    with deepspeed.zero.Init(config_dict_or_path=mesh_config(world_size)):
        model = tiny_llama()
    engine, *_ = deepspeed.initialize(model=model, config=mesh_config(world_size))
    results["mesh"] = train_engine(engine, STEPS).weights
    return results


def train_adapters(rank, world_size):
    """With adapters from peft, added inside the block and after it, only they are trained."""
    config = engine_config(3, world_size)
    results = {}
    for name in ("inside", "after"):
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = tiny_llama()
            if name == "inside":
                model = with_adapters(model)
        model = with_adapters(model) if name == "after" else model
        engine, *_ = deepspeed.initialize(model=model, config=config)
        results[name] = train_engine(engine, STEPS).weights
    return results


def with_adapters(model):
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "down_proj", "embed_tokens"]))


def generate(rank, world_size):
    config = engine_config(3, world_size, hybrid_engine={"enabled": True})
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = tiny_llama()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine.eval().generate(torch.arange(6)[None], max_new_tokens=8, do_sample=False)


class Stack(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(depth)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def give_memory_back_at_once():
    """Else glibc keeps holes of a few MB each, and the peak counts them too."""
    threshold_of_mmap = -3
    ctypes.CDLL(None).mallopt(threshold_of_mmap, 256 * 1024)


def peak_bytes():
    """Of this process alone: getrusage's is never below that of the process which started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def peak_of_building(rank, world_size):
    """The process's peak above what it was before, and the model's size."""
    give_memory_back_at_once()
    before = peak_bytes()
    config = {"train_batch_size": world_size, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Stack(40)
    deepspeed.initialize(model=model, config=config)
    return peak_bytes() - before, 40 * 1024 * 1024 * 4


def everything(rank, world_size):
    peak = peak_of_building(rank, world_size)  # first: a peak only rises
    return (
        peak,
        build_inside(rank, world_size),
        other_ways(rank, world_size),
        train(rank, world_size),
        generate(rank, world_size),
        train_adapters(rank, world_size),
    )


@pytest.fixture(scope="module", params=[1, 2])
def runs(request):
    return run_distributed(everything, request.param)


def test_no_process_ever_holds_the_whole_model(runs):
    for (peak, whole_bytes), *_ in runs:
        assert 0.4 < peak / whole_bytes * len(runs) < 1.5


def test_the_values_are_those_of_a_plain_build_on_rank_0(runs):
    for _, built, *_ in runs:
        assert built["values"] == 0.0
        assert built["tied"] and built["clones"] and built["restored"]
        assert built["frozen"] == ["layers.3.weight"]


def test_parameters_are_marked_shards(runs):
    for _, built, *_ in runs:
        expected = (DTensor, "NOT_AVAILABLE") if len(runs) > 1 else (nn.Parameter, "AVAILABLE")
        assert built["types"] == {expected[0]}
        status, shape, _ = built["marks"]
        assert (status, shape) == (expected[1], (3, 5))
    assert sum(built["marks"][2] for _, built, *_ in runs) == 15


def test_precision_existing_modules_nesting_and_errors(runs):
    for _, _, other, *_ in runs:
        assert other["dtypes"] == ({torch.bfloat16}, torch.int64)
        assert other["cast"] == {torch.bfloat16} and other["cast in place"]
        built_plainly = other["built plainly"]
        assert all(torch.equal(other["cast state"][name], built_plainly[name]) for name in built_plainly)
        assert other["existing"] == 0.0 and other["disabled"] and other["after an error"]
        assert other["existing types"] == {DTensor if len(runs) > 1 else nn.Parameter}
        if len(runs) > 1:
            stage, mesh = other["refused"]
            assert "zero_optimization.stage=1 and a model built under zero.Init" in stage
            assert "(2,)" in mesh and "(2, 1)" in mesh


def test_modules_that_get_their_storage_after_their_constructor_are_sharded(runs):
    for _, _, other, *_ in runs:
        types, values = other["without values"]
        assert types == {DTensor if len(runs) > 1 else nn.Parameter}
        assert values == [[1.0], [2.0], [3.0], [3.0], [3.0], [3.0]]


def test_it_trains_like_a_plain_loop(runs):
    expected = train_plainly(tiny_llama(), STEPS).weights
    for _, _, _, trained, *_ in runs:
        for name in ("config", "instance", "mesh"):
            assert relative_error(trained[name], expected) < 1e-5
        assert trained["same objects"] and trained["alias"]
        assert trained["inside"] == ("NOT_AVAILABLE" if len(runs) > 1 else "AVAILABLE")


def test_it_generates_like_transformers(runs):
    expected = tiny_llama().generate(torch.arange(6)[None], max_new_tokens=8, do_sample=False)
    assert all(torch.equal(generated, expected) for *_, generated, _ in runs)


def test_adapters_train_like_in_a_plain_loop_whether_added_inside_or_after(runs):
    model = with_adapters(tiny_llama())
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    expected = train_plainly(model, STEPS).weights
    assert any(not torch.equal(before[name], expected[name]) for name in before)
    for *_, trained in runs:
        for name in ("inside", "after"):
            assert relative_error(trained[name], expected) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config_dict_or_path": {"zero_optimization": {"stage": 2}}}, "zero_optimization.stage=2"),
        ({"config": {"zero_optimization": {"stage": 4}}}, "zero_optimization.stage"),
        ({"remote_device": "nvme"}, "nvme"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_built(arguments, words):
    with pytest.raises(ValueError, match=words):
        deepspeed.zero.Init(**arguments)


def load_with_transformers(rank, world_size, folder):
    """transformers' own ZeRO-3 loading: what it loads, initialises, resizes and trains."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    ids = torch.arange(8)[None]
    plain = LlamaForCausalLM.from_pretrained(folder)
    results = {"expected": plain.generate(ids, max_new_tokens=6, do_sample=False)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,  # the plain loop clips nothing
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "hybrid_engine": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    keep = HfDeepSpeedConfig(config)
    results["is on"] = is_deepspeed_zero3_enabled() and keep.is_zero3()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    results["types"] = {type(p) for p in loaded.parameters()}
    results["loaded"] = relative_error(whole(loaded), whole(plain))
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    results["fresh"] = {name: (value.mean().item(), value.std().item()) for name, value in whole(fresh).items()}
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    results["new head"] = full_tensor(classifier.score.weight)
    grown = AutoModelForCausalLM.from_pretrained(folder)
    grown.resize_token_embeddings(72)
    results["grown"] = full_tensor(grown.get_input_embeddings().weight)
    engine, *_ = deepspeed.initialize(model=loaded, config={**config, "gradient_accumulation_steps": 1})
    results["generated"] = engine.eval().generate(ids, max_new_tokens=6, do_sample=False)
    engine.train()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    results["trained"] = whole_weights(engine)
    return results


def load_in_a_script(rank, world_size, folder):
    deepspeed.enable_compat()
    return load_with_transformers(rank, world_size, folder)


@pytest.fixture(scope="module", params=[1, 2])
def loads(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return run_distributed(load_in_a_script, request.param, folder)


def test_transformers_loads_into_shards(loads):
    for results in loads:
        assert results["is on"] and results["loaded"] == 0.0
        assert results["types"] == {DTensor if len(loads) > 1 else nn.Parameter}
        assert torch.equal(results["generated"], results["expected"])


def test_transformers_initialises_what_no_checkpoint_has(loads):
    for results in loads:
        for name, (mean, std) in results["fresh"].items():
            is_norm = "norm" in name
            assert (mean, std) == ((1.0, 0.0) if is_norm else (pytest.approx(0, abs=0.005), pytest.approx(0.02, 0.2)))
        assert results["new head"].std() == pytest.approx(0.02, 0.4)
        assert torch.equal(results["new head"], loads[0]["new head"])
        old = tiny_llama().get_input_embeddings().weight
        assert results["grown"].shape[0] == 72 and torch.equal(results["grown"][: len(old)], old)
        assert results["grown"][len(old) :].abs().max() > 0


def test_a_model_that_transformers_loaded_trains_like_a_plain_one(loads):
    plain = copy.deepcopy(tiny_llama())
    ids = torch.arange(8)[None]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    plain(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    for results in loads:
        assert relative_error(results["trained"], expected) < 1e-4


def test_after_enable_compat_packages_find_deepspeed_and_before_it_not():
    program = """
import importlib.metadata
import transformers, accelerate
from accelerate.utils.imports import is_deepspeed_available
assert not is_deepspeed_available()
import hybrid_engine
hybrid_engine.enable_compat()
assert is_deepspeed_available() and importlib.metadata.version("deepspeed")
from accelerate.utils import DummyOptim, HfDeepSpeedConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig as Derived
assert issubclass(Derived, HfDeepSpeedConfig)
import deepspeed.runtime.zero.partition_parameters
assert deepspeed.zero.Init is deepspeed.runtime.zero.partition_parameters.Init
"""
    result = run_python("-c", program)
    assert result.returncode == 0, result.stderr
