"""The figures of a cluster: its devices, the links between them, and the time that a collective takes.

Machine.named("h100")           # published figures
Machine.load("measured.json")   # a file of `hybrid-engine measure-links`

The planner reads them for its costs; `hybrid-engine measure-links` calls `measure_machine`.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.containers.device import host_memory_bytes
from hybrid_engine.distributed.groups import all_gather_single, reduce_scatter_single
from hybrid_engine.distributed.processes import default_device, get_world_size

VERSION = 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
SMALL_BYTES = 1 << 12
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device. `flops_per_s` is for matrix products, by dtype (`bfloat16`); `bytes_per_s` is for all other ops."""

    kind: str
    """`cuda` or `cpu`; it decides which temporary tensors an optimizer allocates in its step."""
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    """Bytes read plus bytes written."""
    op_s: float
    """Seconds that each op takes in addition, independent of its size."""

    def seconds(self, flops: float, num_bytes: float, dtype: torch.dtype) -> float:
        """The time of one op: the longer of its products and its memory traffic."""
        name = str(dtype).removeprefix("torch.")
        rate = self.flops_per_s.get(name) or self.flops_per_s["float32"]
        return self.op_s + max(flops / rate, num_bytes / self.bytes_per_s)


@dataclass(frozen=True)
class Link:
    """The speed of one collective: `latency_s` for one of its rounds, `bytes_per_s` that each process sends."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and links; `near` links are inside a node of `processes_per_node`, `far` links are between nodes."""

    name: str
    source: str
    device: Device
    processes_per_node: int
    near: Mapping[str, Link]
    far: Mapping[str, Link]

    def collective_seconds(self, kind: str, num_bytes: float, size: int, stride: int) -> float:
        """The time of a collective among `size` processes, each `stride` ranks from the next.

        `num_bytes` is the size of the whole tensor; for an all-to-all it is the size on each process. A ring sends (n -
        1)/n of it, an all-reduce twice as much.
        """
        if size == 1:
            return 0.0
        link = (self.near if size * stride <= self.processes_per_node else self.far)[kind]
        return rounds(kind, size) * link.latency_s + sent_bytes(kind, num_bytes, size) / link.bytes_per_s

    @classmethod
    def named(cls, name: str) -> "Machine":
        """The table of published figures with this name; ValueError if there is none."""
        if name not in TABLES:
            raise ValueError(
                f"costs={name!r} must be one of {sorted(TABLES)}, or a file of hybrid-engine measure-links"
            )
        return TABLES[name]

    @classmethod
    def load(cls, path: str | Path) -> "Machine":
        """Loads measured figures; ValueError for any other file."""
        try:
            content = json.loads(Path(path).read_text())
            if content["version"] != VERSION:
                raise ValueError(f"version={content['version']}, this is version {VERSION}")
            sides = {side: {kind: Link(**content[side][kind]) for kind in COLLECTIVES} for side in ("near", "far")}
            device = Device(**content["device"])
            found = cls(
                name=content["name"],
                source=content["source"],
                device=device,
                processes_per_node=content["processes_per_node"],
                **sides,
            )
            found.check()
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"costs={str(path)!r} cannot be read ({type(error).__name__}: {error}); write it with "
                f"`hybrid-engine measure-links`, or take one of {sorted(TABLES)}"
            ) from error
        return found

    def check(self) -> None:
        """Raises ValueError for figures that are not positive."""
        rates = [link.bytes_per_s for side in (self.near, self.far) for link in side.values()]
        rates += [*self.device.flops_per_s.values(), self.device.bytes_per_s, self.device.memory_bytes]
        if "float32" not in self.device.flops_per_s or not all(rate > 0 for rate in rates):
            raise ValueError("rates and memory must be above 0, flops_per_s of float32 among them")

    def save(self, path: str | Path) -> None:
        """Writes the figures to a JSON file that `load` reads."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")


def rounds(kind: str, size: int) -> float:
    """Number of messages that a collective waits for, one after the other."""
    return math.ceil(math.log2(size)) * (2 if kind == "all_reduce" else 1)


def sent_bytes(kind: str, num_bytes: float, size: int) -> float:
    """Bytes that each of `size` processes sends in a collective over `num_bytes`."""
    return num_bytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)


def _table(name: str, source: str, memory_gb: float, rates: Mapping[str, float], memory: float, links: Any) -> Machine:
    """Published peaks. Latencies are assumed: 10 us per round, 20 us between nodes, 5 us per op."""
    near, far = links
    return Machine(
        name=name,
        source=source,
        device=Device(
            kind="cuda",
            memory_bytes=int(memory_gb * 1e9),
            flops_per_s=rates,
            bytes_per_s=memory,
            op_s=5e-6,
        ),
        processes_per_node=8,
        near=dict.fromkeys(COLLECTIVES, Link(10e-6, near)),
        far=dict.fromkeys(COLLECTIVES, Link(20e-6, far)),
    )


TABLES: Mapping[str, Machine] = {
    table.name: table
    for table in (
        _table(
            "v100",
            "NVIDIA V100 datasheet (SXM2 32 GB); NVLink 300 GB/s both ways; DGX-1: 4 x 100 Gb/s for 8 devices",
            32,
            {"float16": 125e12, "bfloat16": 15.7e12, "float32": 15.7e12, "float64": 7.8e12},
            900e9,
            (150e9, 6.25e9),
        ),
        _table(
            "a100",
            "NVIDIA A100 datasheet (SXM 80 GB, dense, no TF32); NVLink 600 GB/s both ways; DGX A100: 200 Gb/s a device",
            80,
            {"float16": 312e12, "bfloat16": 312e12, "float32": 19.5e12, "float64": 9.7e12},
            2039e9,
            (300e9, 25e9),
        ),
        _table(
            "h100",
            "NVIDIA H100 datasheet (SXM 80 GB, dense, no TF32); NVLink 900 GB/s both ways; DGX H100: 400 Gb/s a device",
            80,
            {"float16": 989e12, "bfloat16": 989e12, "float32": 67e12, "float64": 34e12},
            3350e9,
            (450e9, 50e9),
        ),
        _table(
            "h200",
            "NVIDIA H200 datasheet (SXM, dense, no TF32); NVLink 900 GB/s both ways; DGX H200: 400 Gb/s a device",
            141,
            {"float16": 989e12, "bfloat16": 989e12, "float32": 67e12, "float64": 34e12},
            4800e9,
            (450e9, 50e9),
        ),
    )
}


def measure_machine(num_bytes: int, repeats: int) -> Machine:
    """Measures device and links; all processes get the same result. Collective; ValueError for one process."""
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
    """Measures this process's device: matrix products by dtype, memory bandwidth, small ops."""
    device = default_device()
    is_cuda = device.type == "cuda"
    width, count = (8192, 1 << 28) if is_cuda else (384, 1 << 23)
    rates = {str(d).removeprefix("torch."): 2 * width**3 / _product_seconds(width, d, device, repeats) for d in DTYPES}
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    copying = _seconds(lambda: torch.neg(source, out=target), repeats)
    tiny = torch.ones(1, device=device)
    op = _seconds(lambda: [torch.neg(tiny, out=tiny) for _ in range(100)], repeats) / 100
    total = torch.cuda.get_device_properties(device).total_memory if is_cuda else host_memory_bytes()[1]
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
