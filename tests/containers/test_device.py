"""A GPU's memory behind lasting addresses: what is asked of the driver, and when; test_decode_graph has the rest."""

import gc
from contextlib import nullcontext

import pytest
import torch

from hybrid_engine.containers import device
from hybrid_engine.containers.device import DeviceMemory

GPU = torch.device("cuda", 0)
GRAIN = 2 << 20
OUT_OF_MEMORY = 2


class Driver:
    """Notes its calls; `cuMemCreate` answers what `answers` says, then 0."""

    def __init__(self):
        self.calls, self.answers = [], []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = GRAIN
            if name == "cuMemAddressReserve":
                arguments[0]._obj.value = 0x700000000
            return self.answers.pop(0) if name == "cuMemCreate" and self.answers else 0

        return call


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(device, "load_driver", lambda: driver)
    monkeypatch.setattr(device, "_ABANDONED", [])
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: driver.calls.append(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    return driver


MAPPED = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
UNMAPPED = ["synchronize", "cuMemUnmap", "cuMemRelease"]


def test_memory_comes_and_goes_and_the_address_is_reserved_once(driver):
    memory = DeviceMemory(3 * GRAIN + 1, GPU)
    assert memory._size.value == 4 * GRAIN and memory.__cuda_array_interface__["data"] == (0x700000000, False)
    reserved = ["cuMemGetAllocationGranularity", "cuMemAddressReserve"]
    memory.take()
    memory.take()
    memory.release()
    memory.release()
    memory.take()
    assert driver.calls == reserved + MAPPED + UNMAPPED + MAPPED


def test_what_pytorch_keeps_is_given_back_before_memory_is_said_to_have_ended(driver):
    memory = DeviceMemory(GRAIN, GPU)
    driver.calls, driver.answers = [], [OUT_OF_MEMORY]
    memory.take()
    assert driver.calls == ["cuMemCreate", "empty_cache", *MAPPED]
    memory.release()
    driver.answers = [OUT_OF_MEMORY, OUT_OF_MEMORY]
    with pytest.raises(torch.OutOfMemoryError, match=r"2097152 bytes .* cuda:0, of whose 1073741824 bytes 1048576"):
        memory.take()
    assert not memory.is_taken
    driver.answers = [1]
    with pytest.raises(RuntimeError, match="cuMemCreate for 2097152 bytes on cuda:0 failed with CUDA error 1"):
        memory.take()


def test_addresses_that_nobody_looks_at_go_at_the_next_call_and_not_while_a_graph_may_be_recorded(driver):
    forgotten, other = DeviceMemory(GRAIN, GPU), DeviceMemory(GRAIN, GPU)
    forgotten.take()
    driver.calls = []
    del forgotten
    gc.collect()
    assert driver.calls == []
    other.take()
    assert driver.calls == [*UNMAPPED, "cuMemAddressFree", *MAPPED]


def test_small_buffers_are_kept_and_large_ones_lie_on_such_memory(driver, monkeypatch):
    monkeypatch.setattr(device, "is_supported", lambda device: device.type == "cpu")
    monkeypatch.setattr(device, "_HAS_PAGES", False)
    monkeypatch.setattr(DeviceMemory, "tensor", lambda self, shape, dtype: torch.empty(shape, dtype=dtype))
    buffer, cpu = device.LastingBuffer(), torch.device("cpu")
    monkeypatch.setattr(device, "_index", lambda device: 0)
    tensor = buffer.take((1024, 64), torch.float32, cpu)
    buffer.release()
    assert buffer.num_bytes == 0 and buffer.take((1024, 64), torch.float32, cpu) is tensor
    assert driver.calls[-6:] == UNMAPPED + MAPPED
    driver.calls = []
    buffer.take((16,), torch.float32, cpu)
    assert driver.calls == []
