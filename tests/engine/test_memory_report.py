"""The bytes that an engine reports are those that lie in the process's memory."""

import gc

import pytest
import torch

import hybrid_engine
from hybrid_engine.engine.memory_report import count_bytes
from hybrid_engine.metrics.memory import format_bytes
from tests.support.distributed import run_distributed
from tests.support.live_tensors import live_storages
from tests.support.training_reference import engine_config, tiny_llama

CASES = [(stage, sixteen_bits) for stage in (0, 1, 2, 3) for sixteen_bits in (False, True)]


def _bytes_of_engines(rank, world_size):
    """For each case what an engine counts in the middle of a step, what lies there, and the report."""
    engines, results = [], []
    for stage, sixteen_bits in CASES:
        gc.collect()  # what is garbage now may give its address to the engine
        before = live_storages()
        config = engine_config(stage, world_size, bf16={"enabled": sixteen_bits})
        engine, optimizer, *_ = hybrid_engine.initialize(model=tiny_llama(), config=config)
        tokens = torch.full((2, 12), 3)
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engines.append(engine)  # an address that was free could be taken again
        gc.collect()
        added = live_storages()
        buffers = {buffer.untyped_storage().data_ptr() for buffer in engine.module.buffers()}
        lies_there = sum(size for place, size in added.items() if place not in before and place not in buffers)
        counted = vars(count_bytes(engine.sharding, optimizer))
        results.append((counted, lies_there, engine.report()))
        for module in engine.sharding.fsdp_modules():
            module.unshard()
        assert vars(count_bytes(engine.sharding, optimizer)) == counted  # what is gathered is counted elsewhere
        engine.sharding.settle()
    return results


def test_the_bytes_of_an_engine_are_those_of_its_storages_at_every_stage_on_two_processes():
    for results in run_distributed(_bytes_of_engines, 2):
        for (stage, sixteen_bits), (counted, lies_there, report) in zip(CASES, results, strict=True):
            # Besides there are the tokens, and single numbers as the sum of the losses.
            assert sum(counted.values()) == pytest.approx(lies_there, abs=512), (stage, sixteen_bits, counted)
            assert f"parameters: {format_bytes(counted['parameters'])}" in report
            assert (f"and {format_bytes(counted['shards'])} of shards" in report) == (stage < 3)
            assert (counted["masters"] > 0) == sixteen_bits and counted["gradients"] > 0
