"""A server's memory: reserved whole, touched as it is used, within its limit; what cannot be is refused at once."""

import json
import re
from dataclasses import replace

import pytest
import torch

from hybrid_engine.containers import device
from hybrid_engine.containers.cache import CacheShape, LayerCacheSpec
from hybrid_engine.generation.memory import KVWorkspace
from hybrid_engine.recipes import agent, serve
from tests.serving.test_server import build
from tests.support.chat import build_chat_tokenizer

GIB, MIB = 2**30, 2**20
CPU = torch.device("cpu")
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Of the tiny model's keys and values: 2 layers of 2 heads of 8, in fp32."""


@pytest.fixture(scope="module")
def tokenizer():
    return build_chat_tokenizer()


@pytest.fixture(scope="module")
def engine(tokenizer):
    return build(tokenizer)


@pytest.fixture
def with_free_memory(monkeypatch):
    """This machine has so many bytes free from now on, whatever is taken."""
    return lambda free: monkeypatch.setattr(device, "host_memory_bytes", lambda: (free, free))


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_workspace_takes_memory_only_where_something_is_written():
    workspace, shape = KVWorkspace(), CacheShape((LayerCacheSpec(kv=((4, 64), (4, 64))),) * 2, 1024, 64)  # 256 MiB
    before = resident_bytes()
    cache = workspace.take(shape, torch.float32, CPU)
    assert workspace.allocated_bytes == cache.memory.nbytes == 256 * MIB
    assert workspace.resident_bytes == 0 and resident_bytes() - before < 16 * MIB
    for layer in cache.layers:
        layer.kv.keys[3] = layer.kv.values[3] = 1.0  # a block lies in 4 places of 64 KiB
    assert workspace.resident_bytes == 4 * 64 * 1024
    assert resident_bytes() - before < 16 * MIB
    workspace.release()
    assert workspace.resident_bytes == workspace.allocated_bytes == 0


def test_memory_that_comes_back_is_zeros_whatever_was_in_it():
    workspace, shape = KVWorkspace(), CacheShape((LayerCacheSpec(kv=((2, 8), (2, 8))),), 8, 16)
    first = workspace.take(shape, torch.float32, CPU)
    first.memory.fill_(255)
    workspace.release()
    assert workspace.take(shape, torch.float32, CPU) is first and not first.memory.any()
    first.memory.fill_(255)
    larger = workspace.take(replace(shape, num_blocks=9), torch.float32, CPU)
    assert len(larger.memory) > len(first.memory) and not larger.memory.any()


@pytest.mark.parametrize(
    ("memory", "free", "most"),
    [(None, 4 * MIB, 2 * MIB), (0.25, 4 * MIB, MIB), ("0.75", 4 * MIB, 3 * MIB), ("1MiB", GIB, MIB), (None, GIB, None)],
)
def test_keys_and_values_take_what_the_limit_says_and_at_most_what_answers_can_use(
    engine, tokenizer, with_free_memory, memory, free, most
):
    with_free_memory(free)
    engine.destroy()
    with engine.serving(tokenizer, longest=512, max_running=32, memory=memory):
        taken = engine.generator.workspace.allocated_bytes
    block = 64 * TOKEN_BYTES
    assert taken == (32 * 512 * TOKEN_BYTES if most is None else most // block * block)


def test_a_workspace_that_nobody_wrote_to_is_not_counted_as_free_memory(engine, tokenizer, with_free_memory):
    """On a CPU its bytes are free already: what is free would count twice, and each batch be larger than the last."""
    with_free_memory(4 * MIB)
    engine.destroy()
    taken = []
    for _ in range(2):
        with engine.serving(tokenizer, longest=512, max_running=64):
            taken.append(engine.generator.workspace.allocated_bytes)
        assert engine.generator.memory.spare_bytes(engine.generator.model) <= 4 * MIB
    assert taken == [2 * MIB, 2 * MIB]


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        (0, "memory=0 must be a fraction"),
        (1.5, "memory=1.5 must be a fraction of the free memory, above 0 and up to 1, or a size with its unit"),
        ("24", "memory='24' must be a fraction"),
        (True, "memory=True must be a fraction"),
        (float("nan"), "memory=nan must be a fraction"),
        ("6 gigs", "memory='6 gigs' must be a size above 0"),
        ("2GiB", "memory=2GiB is more than the 1.0 GiB left free"),
        ("4KiB", "longest=160: a prompt and its answer of so many tokens do not fit into 4,096 bytes, which hold 0"),
    ],
)
def test_memory_that_cannot_be_is_refused_by_name(engine, tokenizer, with_free_memory, memory, told):
    with_free_memory(GIB)
    engine.destroy()
    with pytest.raises(ValueError, match=re.escape(told)), engine.serving(tokenizer, longest=160, memory=memory):
        pass


@pytest.fixture(scope="module")
def without_weights(engine, tokenizer, tmp_path_factory):
    """A model's folder that says what it is, and whose weights cannot be read."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    config = engine.module.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"longest": 513}, "--longest=513 is more than the 512 tokens that --model="),
        ({"memory": "2GiB"}, "memory=2GiB is more than the 1.0 GiB left free"),
        ({"memory": "40KiB", "longest": 128}, "--memory=40KiB holds keys and values of 64 tokens"),
        ({"memory": "16KiB"}, "--memory=16KiB holds keys and values of 0 tokens"),
        ({"max_session_bytes": 10_000, "longest": 128}, "--max-session-bytes=10000 is less than the 19456 that one"),
        ({}, "must be a Hugging Face folder or name that loads"),
    ],
)
def test_limits_below_one_request_are_refused_before_weights_are_read(without_weights, with_free_memory, options, told):
    with_free_memory(GIB)
    with pytest.raises(ValueError, match=re.escape(told)):
        serve.run(serve.Config(model=without_weights, port=0, **options))


def test_a_longest_that_free_memory_does_not_hold_is_refused_before_weights_are_read(without_weights, with_free_memory):
    with_free_memory(80 * 2**10)
    told = "the free memory, 40,960 bytes of it, holds keys and values of 64 tokens for each model that is served"
    with pytest.raises(ValueError, match=told):
        serve.run(serve.Config(model=without_weights, port=0, longest=128))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory": "5"}, "memory='5' must be a fraction"),
        ({"stall_seconds": 0.0}, "--stall-seconds=0.0 must be at least 0.1"),
        ({"max_session_bytes": 100}, "--max-session-bytes=100 must be at least"),
    ],
)
def test_options_of_a_server_are_checked_at_once(options, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        serve.Config(model="m", **options)


def test_conversations_may_have_more_bytes_than_other_counts_may_be():
    assert serve.Config(model="m").max_session_bytes == 2 * GIB
    assert serve.Config(model="m", max_session_bytes=64 * GIB).max_session_bytes == 64 * GIB
    assert agent.Config(max_session_bytes=64 * GIB).server_options["max_session_bytes"] == 64 * GIB


def test_a_step_of_the_agent_is_remembered_whole():
    few, many = agent.Config(), agent.Config(rollout_size=512, group_size=16, max_new_tokens=1024)
    assert few.server_options["max_session_bytes"] == 2 * GIB
    assert many.server_options["max_session_tokens"] >= 512 * 16 * many.num_turns * 1280
    with pytest.raises(ValueError, match="--max-session-bytes=1000000 is less than"):
        agent.Config(max_session_bytes=1_000_000)
    with pytest.raises(ValueError, match="serving_memory='3' must be a fraction"):
        agent.Config(serving_memory="3")
