"""Reads sharded safetensors, or files of another format, directly into a process's part of a model on meta.

Only headers are read before everything has been compared: a checkpoint that does not fit changes nothing. One file is
open at a time, and only this process's part of each tensor is read.

`build_empty_model` builds a checkpoint's model without its weights. `Stored`, `Stacked` and `Joined` are tensors of a
checkpoint: whole, in one file, or in pieces that the model holds stacked or joined. Reading a part reads only its
bytes.
"""

import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hybrid_engine.containers.views import Cut, read_whole

Bounds = tuple[tuple[int, int], ...]
NUM_LISTED = 10
# Buffers that older releases of transformers saved and newer ones compute.
COMPUTED = re.compile(r"(rotary_emb\.inv_freq|masked_bias|attn\.bias|attention\.bias|embeddings\.position_ids)$")
FORMATS = ("hybrid_engine.extensions.megatron.loading",)
"""Modules that implement `CheckpointFormat`."""


class Source(Protocol):
    """The source of a tensor's values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    def read(self, dim: int, ranges: Bounds) -> torch.Tensor:
        """Reads ranges of dimension `dim`, to the CPU, in the stored dtype."""


def read_part(source: Source, cut: Cut | None, rank: int) -> torch.Tensor:
    """The part that `rank` holds; the whole without a cut."""
    if cut is None:
        return source.read(0, ((0, source.shape[0]),) if source.shape else ())
    return source.read(cut.dim, cut.ranges[rank])


class OpenFile:
    """The single open file of a checkpoint."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None

    def get(self, path: Path) -> Any:
        """Opens `path`. Raises ValueError if it is not a safetensors file."""
        if self._path != path:
            self.close()
            try:
                self._file = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise ValueError(f"checkpoint: {path} cannot be read: {error}; write it again") from error
            self._path = path
        return self._file

    def close(self) -> None:
        """Closes the open file."""
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._path = self._file = None


class Stored:
    """One tensor of one file."""

    def __init__(self, opened: OpenFile, path: Path, key: str):
        self.opened, self.path, self.key = opened, path, key
        self.shape = tuple(opened.get(path).get_slice(key).get_shape())

    def read(self, dim: int, ranges: Bounds) -> torch.Tensor:
        """Reads ranges of dimension `dim`; no other bytes of the file are read."""
        file = self.opened.get(self.path)
        if not self.shape:
            return file.get_tensor(self.key)
        stored = file.get_slice(self.key)
        parts = [stored[(slice(None),) * dim + (slice(start, stop),)] for start, stop in ranges]
        return _joined(parts, dim)


class Stacked:
    """Tensors of one shape that the model holds along a new first dimension: experts."""

    def __init__(self, parts: Sequence[Source]):
        self.parts = parts
        self.shape = (len(parts), *parts[0].shape)

    def read(self, dim: int, ranges: Bounds) -> torch.Tensor:
        """Reads ranges of dimension `dim`; along dimension 0 they select parts."""
        if dim > 0:
            return torch.stack([part.read(dim - 1, ranges) for part in self.parts])
        return torch.stack([read_part(self.parts[i], None, 0) for start, stop in ranges for i in range(start, stop)])


class StoredRows:
    """Ranges of another tensor's first dimension, concatenated: a part of a fused projection."""

    def __init__(self, source: Source, ranges: Bounds):
        self.source, self.ranges = source, ranges
        self.shape = (sum(stop - start for start, stop in ranges), *source.shape[1:])

    def read(self, dim: int, ranges: Bounds) -> torch.Tensor:
        """Reads ranges of dimension `dim`, counted in this object's rows."""
        if dim > 0:
            whole = self.source.read(0, self.ranges)
            return _joined([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        pieces = []
        for start, stop in ranges:
            offset = 0
            for first, last in self.ranges:
                bound = first + max(0, start - offset), first + min(last - first, stop - offset)
                if bound[0] < bound[1]:
                    pieces.append(bound)
                offset += last - first
        return self.source.read(0, tuple(pieces))


class Joined:
    """Tensors that the model holds side by side along `dim`: gate and up."""

    def __init__(self, parts: Sequence[Source], dim: int):
        self.parts, self.dim = parts, dim
        first = parts[0].shape
        self.shape = (*first[:dim], sum(part.shape[dim] for part in parts), *first[dim + 1 :])

    def read(self, dim: int, ranges: Bounds) -> torch.Tensor:
        """Reads ranges of dimension `dim`, which may extend over several parts."""
        if dim != self.dim:
            return _joined([part.read(dim, ranges) for part in self.parts], self.dim)
        pieces = []
        for start, stop in ranges:
            offset = 0
            for part in self.parts:
                bound = max(0, start - offset), min(part.shape[dim], stop - offset)
                if bound[0] < bound[1]:
                    pieces.append(part.read(dim, (bound,)))
                offset += part.shape[dim]
        return _joined(pieces, dim)


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def find_files(checkpoint: Any, base_dir: str = "") -> list[Path]:
    """The safetensors files of a folder, an index, a list of files, or DeepSpeed's {"checkpoints": [...]}.

    Raises ValueError if there are none, or if a file is not a safetensors file.
    """
    if isinstance(checkpoint, Mapping):
        files = _listed(checkpoint, Path(base_dir))
    elif isinstance(checkpoint, list | tuple):
        files = [Path(base_dir) / name for name in checkpoint]
    else:
        path = Path(base_dir) / checkpoint
        if path.is_dir():
            files = sorted(path.glob("*.safetensors"))
        elif path.suffix == ".json":
            files = _listed(json.loads(path.read_text()), Path(base_dir) if base_dir else path.parent)
        else:
            files = [path]
    if not files:
        raise ValueError(f"checkpoint={checkpoint!r} has no *.safetensors; give their folder, index or list")
    for file in files:
        if file.suffix != ".safetensors" or not file.is_file():
            raise ValueError(f"checkpoint: {file} is no safetensors file; give a folder, index or list of such files")
    return files


def _listed(content: Mapping[str, Any], folder: Path) -> list[Path]:
    names = content.get("checkpoints") or sorted(set(content.get("weight_map", {}).values()))
    return [folder / name for name in names]


class CheckpointReader:
    """Reads the tensors, or parts of them, of a `model` on the meta device.

    Raises ValueError if tensors are missing, extra or of another shape; it lists the first of each kind.
    """

    def __init__(self, model: nn.Module, sources: Mapping[str, Source], opened: OpenFile | None = None):
        """`sources` are keyed by the model's names; `opened` is the file that they read from."""
        self.model, self._file = model, opened or OpenFile()
        self._sources: dict[int, Source] = {}
        self._match(sources)

    def _match(self, sources: Mapping[str, Source]) -> None:
        """Finds each tensor under one of its names; tied ones have several."""
        names: dict[int, list[str]] = {}
        shapes: dict[int, tuple[int, ...]] = {}
        for name, tensor in stored_tensors(self.model).items():
            names.setdefault(id(tensor), []).append(name)
            shapes[id(tensor)] = tuple(tensor.shape)
        missing, misshapen = [], []
        for key, aliases in names.items():
            found = [name for name in aliases if name in sources]
            if not found:
                missing.append(aliases[0])
                continue
            self._sources[key] = sources[found[0]]
            if sources[found[0]].shape != shapes[key]:
                misshapen.append(f"{found[0]} {list(sources[found[0]].shape)} instead of {list(shapes[key])}")
        known = {name for aliases in names.values() for name in aliases}
        extra = [name for name in sources if name not in known and not self._may_be_extra(name)]
        problems = [
            f"{len(found)} {kind}: {', '.join(found[:NUM_LISTED])}{', ...' if len(found) > NUM_LISTED else ''}"
            for kind, found in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
            if found
        ]
        if problems:
            raise ValueError(f"checkpoint does not fit {type(self.model).__name__}; tensors {'; '.join(problems)}")

    def _may_be_extra(self, name: str) -> bool:
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return bool(COMPUTED.search(name)) or any(re.search(pattern, name) for pattern in patterns)

    def read(self, parameter: torch.Tensor, cut: Cut | None, rank: int, name: str) -> torch.Tensor:
        """The part of `rank` of a parameter, in the parameter's dtype, on the CPU."""
        if not parameter.is_meta or id(parameter) not in self._sources:
            return read_whole(parameter, cut, rank, name)
        return read_part(self._sources[id(parameter)], cut, rank).to(parameter.dtype)

    def close(self) -> None:
        """Closes the open file."""
        self._file.close()

    def fill(self, device: torch.device) -> None:
        """Loads all tensors of the model that are still on the meta device, whole."""
        loaded: dict[int, torch.Tensor] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_meta and id(tensor) in self._sources:
                loaded[id(tensor)] = self.read(tensor, None, 0, "").to(device)
        self.close()
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in loaded:
                    whole = loaded[id(parameter)]
                    if not isinstance(whole, nn.Parameter):
                        whole = loaded[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                    module._parameters[name] = whole
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in loaded:
                    module._buffers[name] = loaded[id(buffer)]


def open_checkpoint_of(model: nn.Module, checkpoint: Any, base_dir: str = "") -> CheckpointReader:
    """A reader of a Megatron-LM folder, or of any argument of `find_files`.

    In safetensors, names of older releases of transformers, and experts stored one by one, are resolved as by
    `from_pretrained`. Raises ValueError if files are missing or do not fit the model.
    """
    folder = Path(base_dir) / checkpoint if isinstance(checkpoint, str | os.PathLike) else None
    if folder is not None and (known := format_of(folder)) is not None:
        return CheckpointReader(model, known.find_sources(folder))
    opened, files = OpenFile(), find_files(checkpoint, base_dir)
    stored = {key: Stored(opened, path, key) for path in files for key in opened.get(path).keys()}  # noqa: SIM118
    opened.close()
    return CheckpointReader(model, find_sources(model, stored), opened)


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of `model`, by its names; without peft adapters, which are in the model already."""
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    if not any(hasattr(module, "base_layer") for module in model.modules()):
        return tensors
    return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if tensor.is_meta}


def find_sources(model: nn.Module, stored: Mapping[str, Stored]) -> dict[str, Source]:
    """The stored tensors, keyed by the model's names.

    Raises ValueError for a tensor that `from_pretrained` would compute from others in a way not known here.
    """
    mapping = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own, prefix = stored_tensors(model), getattr(model, "base_model_prefix", None) or None
    sources: dict[str, Source] = {}
    pieces: dict[str, dict[str, list[Stored]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = key, None
        if pattern is None:
            sources[name] = stored[key]
        else:
            pieces.setdefault(name, {}).setdefault(pattern, []).append(stored[key])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name, found in pieces.items():
        sources[name] = _put_together(name, by_pattern[next(iter(found))], found)
    return sources


def _put_together(name: str, converter: WeightConverter, pieces: dict[str, list[Stored]]) -> Source:
    parts = [Stacked(pieces[pattern]) for pattern in converter.source_patterns if pattern in pieces]
    match converter.operations:
        case [MergeModulelist(dim=0)] if len(parts) == 1:
            return parts[0]
        case [MergeModulelist(dim=0), Concatenate(dim=dim)]:
            return Joined(parts, dim)
    steps = ", ".join(type(step).__name__ for step in converter.operations)
    raise ValueError(
        f"checkpoint: {name} is made of {sum(map(len, pieces.values()))} stored tensors by {steps}, which is not built "
        "here; load the model with from_pretrained() instead"
    )


@torch.no_grad()
def compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Computes buffers that are not saved (rotary frequencies), as transformers does.

    Raises ValueError for one that transformers does not compute.
    """
    unsaved = set(dict(model.named_buffers())) - set(model.state_dict())
    empty = [
        (path, module, name)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and f"{path}.{name}".removeprefix(".") in unsaved
    ]
    for _, module, name in empty:
        buffer = torch.empty_like(module._buffers[name], device=device)
        module._buffers[name] = buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer
    if isinstance(model, PreTrainedModel):
        for path in dict.fromkeys(path for path, _, _ in empty):
            # As transformers does: by the innermost model, which may read its own numbers.
            owner = max(_models_around(model, path), key=lambda place: len(place[0]))[1]
            owner._init_weights(model.get_submodule(path))
        if any(module._buffers[name].isnan().any() for _, module, name in empty):
            for _, owner in _models_around(model, None):
                owner._init_weights(owner)  # which may compute the buffers of its layers
    for path, module, name in empty:
        if module._buffers[name].isnan().any():
            raise ValueError(
                f"checkpoint: buffer {path}.{name} is neither saved nor computed by {type(model).__name__}; build "
                "the model with its buffers on the CPU"
            )


def _models_around(model: PreTrainedModel, path: str | None) -> list[tuple[str, PreTrainedModel]]:
    """The models of transformers, with their paths, that hold the module at `path`; None: all of them."""
    models = [(name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    return [
        (name, module) for name, module in models if path is None or f"{path}.".startswith(f"{name}." if name else "")
    ]


def build_empty_model(folder: str | os.PathLike[str]) -> PreTrainedModel:
    """The causal model of a folder of transformers, or of a checkpoint of Megatron's, on the meta device.

    Raises:
        ValueError: the folder does not exist, or does not hold such a model.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"checkpoint={str(folder)!r} is no folder; name one with config.json or Megatron's files")
    if (known := format_of(Path(folder))) is not None:
        return known.build_empty(Path(folder))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    except (OSError, KeyError, TypeError) as error:  # depends on the missing or damaged part
        raise ValueError(f"checkpoint={str(folder)!r} holds no causal model of transformers: {error}") from error


class CheckpointFormat(Protocol):
    """Recognition and reading of one project's checkpoints."""

    def recognises(self, folder: Path) -> bool:
        """Whether `folder` is a checkpoint of this project."""

    def build_empty(self, folder: Path) -> PreTrainedModel:
        """Its model on the meta device. ValueError if it does not hold one."""

    def find_sources(self, folder: Path) -> Mapping[str, Source]:
        """Its tensors, keyed by the names in `build_empty`'s model. ValueError if it is damaged."""


def format_of(folder: Path) -> CheckpointFormat | None:
    """The format of a folder; None for one of transformers, or of no known format."""
    for name in FORMATS:
        found: CheckpointFormat = importlib.import_module(name)  # type: ignore[assignment]
        if found.recognises(folder):
            return found
    return None
