"""Which models have passed the wide probe on which device, kept in the user's cache folder as small JSON files.

A file's name is the hash of everything that the verdict depends on: the model's structure and config, device, dtype,
versions, and the source of containers and ops. What cannot be read or written is probed again.
"""

import hashlib
import json
import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hybrid_engine.containers
import hybrid_engine.ops
from hybrid_engine.generation.probing.agreement import LogprobDifference
from hybrid_engine.ops.cache_folder import cache_folder
from hybrid_engine.ops.cpu_kernels import use_compiled

PACKAGES = ("torch", "triton", "transformers", "peft", "hybrid-engine")
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
"""Entries of a config that say nothing of what is computed."""


def cache_key(module: nn.Module, device: torch.device, dtype: torch.dtype, **others: Any) -> str:
    """Names a verdict; `others` are further things that it depends on, as JSON takes them."""
    structure = [(name, type(part).__qualname__) for name, part in module.named_modules()]
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    config = {name: value for name, value in module.config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    is_compiled = device.type == "cpu" and use_compiled(torch.empty(0, dtype=dtype))
    depends = [structure, shapes, config, _device_name(device), str(dtype), _versions(), _source_hash(), others]
    depends.append(is_compiled)
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()


def read_verdict(key: str) -> LogprobDifference | None:
    """What was measured under `key`; None where nothing was, or the file is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(_path(key).read_text())
        return LogprobDifference(mean=float(found["mean"]), max=float(found["max"]))
    return None


def keep_verdict(key: str, difference: LogprobDifference) -> None:
    """Keeps it, if the folder can be written; several processes may at once."""
    path = _path(key)
    temporary = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"mean": difference.mean, "max": difference.max}))
        temporary.replace(path)


def _path(key: str) -> Path:
    return cache_folder("probes") / f"{key}.json"


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} {platform.machine()} {platform.processor()}"
    return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} {torch.version.cuda}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _source_hash() -> str:
    """Hash of the source of containers and ops: a kernel that was edited is probed again."""
    folders = [Path(part.__file__ or "").parent for part in (hybrid_engine.containers, hybrid_engine.ops)]
    files = [path for folder in folders for path in sorted((*folder.glob("*.py"), *folder.glob("*.c")))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
