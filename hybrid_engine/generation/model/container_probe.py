"""Runs the probes of containers: the narrow one when they are built, the wide one once per machine.

`Generator` calls it. It makes the weights readable, brings all processes to one verdict, and caches wide verdicts.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hybrid_engine.containers
import hybrid_engine.ops
from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.distributed.verdict import Partners, attempt, is_out_of_memory
from hybrid_engine.generation.model.exact import ExactModel
from hybrid_engine.generation.model.probe import (
    LogprobDifference,
    probe_bits,
    probe_containers,
    probe_module,
    probe_widely,
)
from hybrid_engine.generation.model.weights import WeightGatherer, pass_over_layers
from hybrid_engine.ops.cpu_kernels import use_compiled
from hybrid_engine.ops.cpu_library import cache_folder
from hybrid_engine.ops.dispatch import KernelError, fallback_forced, naming_kernels, replaced_kernels

Readable = Callable[[InferenceModel | None], AbstractContextManager[None]]
"""Returns a context in which containers and the module's forward can read their weights."""
PACKAGES = ("torch", "triton", "transformers", "peft", "hybrid-engine")
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
"""Config entries that do not affect the computation."""


@contextmanager
def _falling_back() -> Iterator[None]:
    """Inside, a kernel that does not compile becomes a reason to use the model's own `generate()`."""
    try:
        with naming_kernels():
            yield
    except KernelError as error:
        if is_out_of_memory(error):  # of the GPU, for the kernel's code
            raise
        raise UnsupportedModelError(str(error)) from error


class ContainerProbe:
    """Compares containers of `module` with its forward. Collective; an error of one process is raised on all.

    Args:
        module: module whose containers are probed.
        gatherer: gatherer of its weights.
        readable: makes the weights readable.
        partners: the processes that come to one verdict.
        world_size: number of processes that have parts of the weights.
    """

    def __init__(
        self, module: nn.Module, gatherer: WeightGatherer, readable: Readable, partners: Partners, world_size: int
    ) -> None:
        self._module, self._gatherer, self._readable = module, gatherer, readable
        self._partners, self._world_size = partners, world_size

    def run(self, model: InferenceModel) -> LogprobDifference:
        """Runs the narrow probe, or in exact mode the probe of bits.

        Raises:
            UnsupportedModelError: containers and module compute different functions, or a kernel does not compile.
        """
        return self._partners.agree(lambda: self._run(model))

    def _run(self, model: InferenceModel) -> LogprobDifference:
        with self._readable(model), _falling_back():
            layers = partial(pass_over_layers, model, self._gatherer)
            if isinstance(model, ExactModel):
                return probe_bits(self._module, model, layers, model.run_trainer, self._world_size)
            return probe_containers(self._module, model, layers, self._world_size)

    def run_own(self, generate: Callable[..., Any]) -> LogprobDifference | None:
        """Measures the module's cached, token-by-token `generate()` against its forward; None: not measurable.

        Collective. Not measured are modules whose forward or `generate()` takes more than tokens, such as an
        encoder-decoder, and modules whose `generate()` fails on a few tokens: their first rollout reports the error.
        """
        (cannot,) = self._partners.highest([int(self._module.config.is_encoder_decoder)])
        if cannot:
            return None
        difference, error = attempt(lambda: self._run_own(generate))
        (has_failed,) = self._partners.highest([int(error is not None)])
        if error is not None and not isinstance(error, Exception):
            raise error
        return None if has_failed else difference

    def _run_own(self, generate: Callable[..., Any]) -> LogprobDifference:
        with self._readable(None):
            return probe_module(self._module, generate, self._world_size)

    def run_widely(
        self, model: InferenceModel, device: torch.device, block_size: int, recorder: Any, num_sharing: int
    ) -> bool:
        """Runs the wide probe; returns False if its verdict on such a model was known on all processes.

        Args:
            model: containers that passed the narrow probe.
            device: device that they compute on.
            block_size: number of tokens of a KV block.
            recorder: records a step; None if steps are not recorded.
            num_sharing: number of processes that share one model.

        Raises:
            UnsupportedModelError: containers and module compute different functions, or a kernel does not compile.
        """
        setting = {
            "block_size": block_size,
            "is_recorded": recorder is not None,
            "ranks": num_sharing,
            "is_streamed": self._gatherer.is_streamed,
            "without kernels": fallback_forced() or replaced_kernels(),
        }
        key = cache_key(self._module, device, model.dtype, **setting)
        if self._partners.highest([int(read_verdict(key) is None)]) == [0]:
            return False
        difference = self._partners.agree(lambda: self._run_widely(model, block_size, recorder))
        self._gatherer.count_bytes()  # not a rollout's
        keep_verdict(key, difference)
        return True

    def _run_widely(self, model: InferenceModel, block_size: int, recorder: Any) -> LogprobDifference:
        with self._readable(model), _falling_back():
            layers = partial(pass_over_layers, model, self._gatherer)
            return probe_widely(self._module, model, layers, block_size, recorder, self._world_size)


def cache_key(module: nn.Module, device: torch.device, dtype: torch.dtype, **others: Any) -> str:
    """Returns the cache key of a verdict; `others` are further JSON values that it depends on."""
    structure = [(name, type(part).__qualname__) for name, part in module.named_modules()]
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    config = {name: value for name, value in module.config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    is_compiled = device.type == "cpu" and use_compiled(torch.empty(0, dtype=dtype))
    depends = [structure, shapes, config, _device_name(device), str(dtype), _versions(), _source_hash(), others]
    depends.append(is_compiled)
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()


def read_verdict(key: str) -> LogprobDifference | None:
    """Returns the difference stored under `key`; None if there is none, or the file is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(_path(key).read_text())
        return LogprobDifference(mean=float(found["mean"]), max=float(found["max"]))
    return None


def keep_verdict(key: str, difference: LogprobDifference) -> None:
    """Stores a verdict if the folder is writable; several processes may do so at once."""
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
    """Hash of the source of containers and ops, so that edited kernels are probed again."""
    folders = [Path(part.__file__ or "").parent for part in (hybrid_engine.containers, hybrid_engine.ops)]
    files = [path for folder in folders for path in sorted((*folder.glob("*.py"), *folder.glob("*.c")))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
