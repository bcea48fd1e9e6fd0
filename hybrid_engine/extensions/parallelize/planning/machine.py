"""What a cluster can do: its devices, the links between them, and how long a collective takes.

Machine.named("h100")           # published figures
Machine.load("measured.json")   # what `hybrid-engine measure-links` wrote
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

VERSION = 1
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device. `flops_per_s` is of matrix products, by dtype (`bfloat16`); `bytes_per_s` of everything else."""

    kind: str
    """`cuda` or `cpu`, which says what optimizers allocate while they step."""
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    """Read and written."""
    op_s: float
    """What each op takes however small it is."""

    def seconds(self, flops: float, num_bytes: float, dtype: torch.dtype) -> float:
        """The time of one op: it waits for whichever takes longer, products or memory."""
        name = str(dtype).removeprefix("torch.")
        rate = self.flops_per_s.get(name) or self.flops_per_s["float32"]
        return self.op_s + max(flops / rate, num_bytes / self.bytes_per_s)


@dataclass(frozen=True)
class Link:
    """How fast one collective is: `latency_s` of one of its rounds, `bytes_per_s` that each process sends."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and links; `near` ones are those inside a node of `processes_per_node`, `far` ones between nodes."""

    name: str
    source: str
    device: Device
    processes_per_node: int
    near: Mapping[str, Link]
    far: Mapping[str, Link]

    def collective_seconds(self, kind: str, num_bytes: float, size: int, stride: int) -> float:
        """The time of a collective among `size` processes, each `stride` ranks from the next.

        `num_bytes` are those of the whole tensor, of an all-to-all those that each process has. A ring sends (n - 1)/n
        of them, an all-reduce twice.
        """
        if size == 1:
            return 0.0
        link = (self.near if size * stride <= self.processes_per_node else self.far)[kind]
        return rounds(kind, size) * link.latency_s + sent_bytes(kind, num_bytes, size) / link.bytes_per_s

    @classmethod
    def named(cls, name: str) -> "Machine":
        """The table of published figures of that name; ValueError where there is none."""
        if name not in TABLES:
            raise ValueError(
                f"costs={name!r} must be one of {sorted(TABLES)}, or a file of hybrid-engine measure-links"
            )
        return TABLES[name]

    @classmethod
    def load(cls, path: str | Path) -> "Machine":
        """What was measured; ValueError for a file that is something else."""
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
        """ValueError for figures that are no rates."""
        rates = [link.bytes_per_s for side in (self.near, self.far) for link in side.values()]
        rates += [*self.device.flops_per_s.values(), self.device.bytes_per_s, self.device.memory_bytes]
        if "float32" not in self.device.flops_per_s or not all(rate > 0 for rate in rates):
            raise ValueError("rates and memory must be above 0, flops_per_s of float32 among them")

    def save(self, path: str | Path) -> None:
        """Writes the figures to a file of JSON that `load` reads."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")


def rounds(kind: str, size: int) -> float:
    """How often a collective waits for a message."""
    return math.ceil(math.log2(size)) * (2 if kind == "all_reduce" else 1)


def sent_bytes(kind: str, num_bytes: float, size: int) -> float:
    """The bytes that each of `size` processes sends in a collective over `num_bytes`."""
    return num_bytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)


def _table(name: str, source: str, memory_gb: float, rates: Mapping[str, float], memory: float, links: Any) -> Machine:
    """Published peaks; latencies, which nobody publishes, are assumed: 10 us a round, between nodes 20, 5 an op."""
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
