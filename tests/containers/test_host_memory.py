"""Free memory is the least of what machine, container and shell allow, from files as Linux writes them."""

import resource

import pytest
import torch

from hybrid_engine.cli.machine_checks import examine
from hybrid_engine.containers import device
from hybrid_engine.containers.device import free_and_total_bytes, host_memory_bytes
from hybrid_engine.extensions.deepspeed.accelerator import Accelerator
from hybrid_engine.generation.memory import read_memory

MIB, GIB = 2**20, 2**30
UNLIMITED_V1 = 9223372036854771712
"""What cgroup v1 says where there is no limit."""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Files of a machine with 6 of 8 GiB free; `add(path, text)` writes more of them."""

    def add(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    memory = (("MemTotal", 8 * GIB), ("MemFree", 1 * GIB), ("MemAvailable", 6 * GIB), ("Buffers", 0))
    add("proc/meminfo", "\n".join(f"{name}:{size // 1024:16} kB" for name, size in memory))
    add("proc/self/statm", "1000 10 10 10 0 10 0")
    monkeypatch.setattr(device, "ROOT", tmp_path)
    monkeypatch.setattr(device.sys, "platform", "linux")
    return add


def add_v2_group(add, path, limit, used, cached=0):
    folder = f"sys/fs/cgroup/{path}".rstrip("/")
    add(f"{folder}/memory.max", limit)
    add(f"{folder}/memory.current", used)
    half = cached // 2
    add(f"{folder}/memory.stat", f"anon {used - cached}\nfile {cached}\ninactive_file {half}\nactive_file {half}")


def add_v1_group(add, path, limit, used, cached=0):
    folder = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    add(f"{folder}/memory.limit_in_bytes", limit)
    add(f"{folder}/memory.usage_in_bytes", used)
    # Its own pages stand before those of its groups together.
    add(f"{folder}/memory.stat", f"inactive_file 0\nactive_file 0\ntotal_inactive_file {cached}\ntotal_active_file 0")


def test_without_a_limit_it_is_the_machines(machine):
    assert host_memory_bytes() == (6 * GIB, 8 * GIB)


def test_a_container_of_version_2_leaves_its_limit_without_what_is_used(machine):
    machine("proc/self/cgroup", "0::/")
    add_v2_group(machine, "", 3 * GIB, GIB)
    assert host_memory_bytes() == (2 * GIB, 3 * GIB)


def test_file_pages_that_the_kernel_can_drop_are_free_in_a_container(machine):
    machine("proc/self/cgroup", "0::/")
    add_v2_group(machine, "", 3 * GIB, 2 * GIB, cached=GIB)
    assert host_memory_bytes() == (2 * GIB, 3 * GIB)


def test_the_smallest_of_the_groups_above_counts(machine):
    machine("proc/self/cgroup", "0::/slice/service/part")
    add_v2_group(machine, "slice", 4 * GIB, 3 * GIB)
    add_v2_group(machine, "slice/service", 2 * GIB, GIB // 2)
    add_v2_group(machine, "slice/service/part", "max", GIB // 2)
    assert host_memory_bytes() == (GIB, 2 * GIB)


def test_a_container_of_version_1_with_the_hosts_path(machine):
    machine("proc/self/cgroup", "5:devices:/docker/0123\n4:memory:/docker/0123\n1:cpu,cpuacct:/docker/0123\n0::/")
    add_v1_group(machine, "", 2 * GIB, GIB, cached=512 * MIB)
    assert host_memory_bytes() == (1536 * MIB, 2 * GIB)


def test_a_group_of_version_1_without_limit_below_one_with_a_limit(machine):
    machine("proc/self/cgroup", "4:cpuset,memory:/above/below")
    add_v1_group(machine, "", UNLIMITED_V1, 5 * GIB)
    add_v1_group(machine, "above", 5 * GIB, GIB)
    add_v1_group(machine, "above/below", UNLIMITED_V1, GIB)
    assert host_memory_bytes() == (4 * GIB, 5 * GIB)


def test_a_limit_above_the_machines_memory_changes_nothing(machine):
    machine("proc/self/cgroup", "0::/")
    add_v2_group(machine, "", 64 * GIB, GIB)
    assert host_memory_bytes() == (6 * GIB, 8 * GIB)


def test_a_full_container_has_nothing_free(machine):
    machine("proc/self/cgroup", "0::/")
    add_v2_group(machine, "", GIB, GIB + MIB)
    assert host_memory_bytes() == (0, GIB)


@pytest.mark.parametrize("line", ["0::/../../elsewhere", "0::/gone"])
def test_a_path_that_is_not_below_the_mounted_groups_means_the_mounted_one(machine, line):
    machine("proc/self/cgroup", line)
    add_v2_group(machine, "", 3 * GIB, GIB)
    add_v2_group(machine, "../elsewhere", MIB, 0)
    assert host_memory_bytes() == (2 * GIB, 3 * GIB)


def test_the_shells_limit_of_addresses_counts(machine, monkeypatch):
    monkeypatch.setattr(device.resource, "getrlimit", lambda kind: (GIB, resource.RLIM_INFINITY))
    assert host_memory_bytes() == (GIB - 1000 * resource.getpagesize(), GIB)


def test_all_who_ask_for_host_memory_hear_of_the_limit(machine, monkeypatch):
    machine("proc/self/cgroup", "0::/")
    add_v2_group(machine, "", 3 * GIB, GIB)
    free, total = free_and_total_bytes(torch.device("cpu"))
    assert (free, total) == (2 * GIB, 3 * GIB)
    assert read_memory(None, "cpu").of(free) == GIB  # a server's half of what is free
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (Accelerator().available_memory(), Accelerator().total_memory()) == (2 * GIB, 3 * GIB)
    assert "2.0 of 3.0 GiB free" in [found.text for found in examine() if found.name == "host"]
