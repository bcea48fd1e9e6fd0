"""What this machine can do, measured: its links by collectives over all processes, its device by a few ops."""

import os
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from hybrid_engine.distributed.processes import default_device, get_world_size
from hybrid_engine.distributed.single_tensors import all_gather_single, reduce_scatter_single
from hybrid_engine.extensions.parallelize.planning.machine import COLLECTIVES, Device, Link, Machine, rounds, sent_bytes

SMALL_BYTES = 1 << 12
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def measure_machine(num_bytes: int, repeats: int) -> Machine:
    """All of it, the same on every process; collective. ValueError for a single process, which has no links."""
    size = get_world_size()
    if size < 2:
        raise ValueError(
            "measure-links needs at least 2 processes; run `torchrun --nproc-per-node 2 --no-python hybrid-engine "
            "measure-links`"
        )
    inside = min(int(os.environ.get("LOCAL_WORLD_SIZE", size)), size)
    nodes = [dist.new_group(list(range(first, first + inside))) for first in range(0, size, inside)]
    everything = measure_links(dist.group.WORLD, num_bytes, repeats)
    near = everything
    if 1 < inside < size:
        near = measure_links(nodes[dist.get_rank() // inside], num_bytes, repeats)
    device = measure_device(repeats)
    return Machine(
        name=f"{platform.node()}, {size} processes",
        source=f"measured with torch {torch.__version__}, {dist.get_backend()}",
        device=device,
        processes_per_node=inside,
        near=near,
        far=everything,
    )


def measure_links(group: dist.ProcessGroup | None, num_bytes: int, repeats: int) -> dict[str, Link]:
    """Latency and bandwidth of each collective among the processes of a group, from a small and a large message."""
    size = dist.get_world_size(group)
    found = {}
    for kind in COLLECTIVES:
        small, large = (
            _slowest(_seconds(_collective(kind, count, size, group), repeats), group)
            for count in (SMALL_BYTES, num_bytes)
        )
        difference = sent_bytes(kind, num_bytes, size) - sent_bytes(kind, SMALL_BYTES, size)
        found[kind] = Link(small / rounds(kind, size), difference / max(large - small, 1e-9))
    return found


def _collective(kind: str, num_bytes: int, size: int, group: dist.ProcessGroup | None) -> Callable[[], object]:
    """One call of it on a tensor of about `num_bytes`; of an all-gather and a reduce-scatter the whole tensor has."""
    device = default_device()
    part = torch.ones(max(num_bytes // 4 // size, 1), device=device)
    whole = torch.ones(part.numel() * size, device=device)
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(other, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    return calls[kind]


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` calls, after one that is not counted."""
    taken = []
    for _ in range(repeats + 1):
        _wait()
        start = time.perf_counter()
        call()
        _wait()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _slowest(seconds: float, group: dist.ProcessGroup | None) -> float:
    found = torch.tensor([seconds], dtype=torch.float64, device=default_device())
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)


def measure_device(repeats: int = 5) -> Device:
    """What this process's device does: products by dtype, memory, small ops."""
    device = default_device()
    is_cuda = device.type == "cuda"
    width, count = (8192, 1 << 28) if is_cuda else (384, 1 << 23)
    rates = {str(d).removeprefix("torch."): 2 * width**3 / _product_seconds(width, d, device, repeats) for d in DTYPES}
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    copying = _seconds(lambda: torch.neg(source, out=target), repeats)
    tiny = torch.ones(1, device=device)
    op = _seconds(lambda: [torch.neg(tiny, out=tiny) for _ in range(100)], repeats) / 100
    total = torch.cuda.get_device_properties(device).total_memory if is_cuda else _memory_of_machine()
    shared_by = 1 if is_cuda else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return Device(
        kind=device.type,
        memory_bytes=total // shared_by,
        flops_per_s=rates,
        bytes_per_s=8 * count / copying,
        op_s=op,
    )


def _product_seconds(width: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    left, right = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    return _seconds(lambda: left @ right, repeats)


def _memory_of_machine() -> int:
    import psutil  # here, not at the top: on a GPU nobody asks for this

    return psutil.virtual_memory().total
