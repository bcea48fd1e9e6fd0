"""Finds the files of Megatron-LM's ranks and reads them without executing code from them; maps weight names.

`mp_rank_TT/model_optim_rng.pt` holds the part of tensor-parallel rank TT, `mp_rank_TT_PPP/model_optim_rng.pt` the part
of its pipeline stage PPP. DeepSpeed writes `mp_rank_TT_model_states.pt`.
Distributed checkpoints of Megatron Core (`torch_dist`) hold whole tensors by name: `common.pt` has the options,
`.metadata` says where each piece of a tensor is in the `*.distcp` files. `loading.py` calls this.
"""

import argparse
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hybrid_engine.checkpoint.tensor_files import INDEX_FILE, read_index
from hybrid_engine.inference.checkpoint import Bounds, Joined, Source

RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?$")
RANK_FILE = re.compile(r"mp_rank_(\d+)()_model_states\.pt$")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
UNNEEDED = ("megatron.", "transformer_engine.", "numpy.", "signal.", "_io.BytesIO", "types.SimpleNamespace", "torch.")
"""Prefixes of the names of unneeded objects in these files: options, random states, states of kernels."""
LAYERS = "language_model.encoder.layers."
CORE = (
    (r"^(embedding|output_layer)\.", r"language_model.\1."),
    (r"^decoder\.", "language_model.encoder."),
    (r"\.linear_qkv\.layer_norm_", ".linear_qkv_norm_"),  # norms that Transformer Engine fuses with the next linear
    (r"self_attention\.linear_qkv_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "post_attention_layernorm."),
    (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
    (r"\.linear_qkv\.", ".query_key_value."),
    (r"\.linear_proj\.", ".dense."),
    (r"\.linear_fc1\.", ".dense_h_to_4h."),
    (r"\.linear_fc2\.", ".dense_4h_to_h."),
)
OLDER = (
    (r"^language_model\.transformer\.", "language_model.encoder."),
    (r"\.attention\.", ".self_attention."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_norm\.", ".post_attention_layernorm."),
    (r"\.final_norm\.", ".final_layernorm."),
)
COMMON_FILE = "common.pt"
MODEL = re.compile(r"(model\.)?((embedding|decoder|output_layer)\..*)")
STACKED = re.compile(r"decoder\.layers\.(?!\d)(.*)")


class Unneeded:
    """Placeholder for an object that is not needed; accepts any arguments and state and does nothing."""

    def __new__(cls, *_: Any) -> "Unneeded":
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def find_iteration(folder: Path) -> Path:
    """The folder of the latest iteration if `folder` holds several, otherwise `folder`."""
    for marker, form in (("latest_checkpointed_iteration.txt", "iter_{:0>7}"), ("latest", "{}")):
        if (folder / marker).is_file():
            latest = (folder / marker).read_text().strip()
            return folder / (latest if latest == "release" else form.format(latest))
    return folder


def has_rank_files(folder: Path) -> bool:
    """Whether `folder` has files of ranks, or folders of them."""
    return folder.is_dir() and any(_place(path) is not None for path in folder.iterdir())


def find_rank_files(folder: Path) -> list[list[Path]]:
    """The files of ranks, first by pipeline stage and then by tensor-parallel rank.

    Raises ValueError if there are none, or if one is missing.
    """
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        place = _place(path)
        if place is None:
            continue
        held = [path] if path.is_file() else [path / name for name in MODEL_FILES if (path / name).is_file()]
        if held:
            files[place] = held[0]
    num_stages = 1 + max((stage for stage, _ in files), default=0)
    num_ranks = 1 + max((rank for _, rank in files), default=0)
    grid = [(stage, rank) for stage in range(num_stages) for rank in range(num_ranks)]
    if sorted(files) != grid:
        found = ", ".join(f"{rank}" if num_stages == 1 else f"{rank} of stage {stage}" for stage, rank in sorted(files))
        found = f"files of ranks [{found}]" if files else "no mp_rank_XX files"
        raise ValueError(f"checkpoint={folder} holds {found}; expected those of ranks 0 to the last, of every stage")
    return [[files[stage, rank] for rank in range(num_ranks)] for stage in range(num_stages)]


def _place(path: Path) -> tuple[int, int] | None:
    """Stage and rank of a file or folder."""
    match = (RANK_FOLDER if path.is_dir() else RANK_FILE).match(path.name)
    return None if match is None else (int(match[2] or 0), int(match[1]))


def load_mapped(path: Path) -> dict[str, Any]:
    """The content of a file from torch.save, with its tensors memory-mapped; functions that it names are not called.

    Raises:
        ValueError: it is not such a file, or names objects that Megatron-LM does not write.
    """
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        inert = [(Unneeded, name) for name in unknown if name.startswith(UNNEEDED)]
        # Megatron stores its command line in the file.
        with torch.serialization.safe_globals([argparse.Namespace, *inert]):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    # Damaged bytes make torch raise nearly anything: UnpicklingError, KeyError, UnicodeDecodeError, ...
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"checkpoint: {path} is not a file of tensors from torch.save: {reason}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"checkpoint: {path} holds a {type(content).__name__}, and should be a dict")
    return dict(content)


def read_arguments(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options of the training run. Raises ValueError if they do not describe the model."""
    arguments = content.get("args")
    values = dict(arguments) if isinstance(arguments, Mapping) else vars(arguments or argparse.Namespace())
    if "num_attention_heads" not in values:
        raise ValueError(
            f"checkpoint={folder} has keys {', '.join(sorted(content))}; it needs the weights under model or module, "
            f"and args with num_attention_heads"
        )
    return values


def common_name(name: str) -> str:
    """The name in the third release of a weight that a checkpoint calls `name`."""
    name = name.removeprefix("module.")
    for pattern, replacement in (*CORE, *OLDER):
        name = re.sub(pattern, replacement, name)
    return name


def layer_of(name: str) -> int | None:
    """The layer of a weight, from its name in the third release; None for a weight outside layers."""
    return int(name.removeprefix(LAYERS).split(".")[0]) if name.startswith(LAYERS) else None


def with_layer(name: str, layer: int) -> str:
    """The name of the same weight in another layer."""
    return f"{LAYERS}{layer}.{name.removeprefix(LAYERS).split('.', 1)[1]}"


def is_distributed(folder: Path) -> bool:
    """Whether `folder` is a distributed checkpoint."""
    return (folder / INDEX_FILE).is_file() and (folder / COMMON_FILE).is_file()


def read_distributed(folder: Path) -> tuple[dict[str, Any], dict[str, Source]]:
    """The content of `common.pt`, and the model's tensors by their names in Megatron-LM's third release.

    Raises ValueError if a file is damaged.
    """
    files = {path.name for path in folder.glob("*.distcp")}
    index = read_index(folder, files, skips_others=True)
    sources: dict[str, Source] = {}
    for key, entry in index.state_dict_metadata.items():
        match = MODEL.fullmatch(key)
        if match is None or not isinstance(entry, TensorStorageMetadata) or "_extra_state" in key:
            continue
        stacked = STACKED.fullmatch(match[2])
        if stacked is None:
            sources[match[2]] = Pieces(folder, index, key)
            continue
        for layer in range(entry.size[0]):
            sources[f"decoder.layers.{layer}.{stacked[1]}"] = Pieces(folder, index, key, layer)
    for name in [name for name in sources if name.endswith("_w")]:  # gate and up have separate names
        parts = [sources.pop(name), sources.pop(f"{name[:-2]}_v")]
        sources[name[:-2]] = Joined(parts, 0)
    return load_mapped(folder / COMMON_FILE), {common_name(name): source for name, source in sources.items()}


class Pieces:
    """A tensor of the checkpoint, or one layer of it, which is assembled from its pieces when it is read."""

    def __init__(self, folder: Path, index: Metadata, key: str, layer: int | None = None):
        entry = index.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        self.folder, self.index, self.key, self.layer = folder, index, key, layer
        self.entry, self.num_before = entry, 0 if layer is None else 1
        self.shape = tuple(entry.size[self.num_before :])

    def read(self, dim: int, ranges: Bounds) -> torch.Tensor:
        """See `Source`."""
        return torch.cat([self._read_box(dim, start, stop) for start, stop in ranges], dim)

    def _read_box(self, dim: int, start: int, stop: int) -> torch.Tensor:
        box = [(0, length) for length in self.entry.size]
        box[dim + self.num_before] = (start, stop)
        if self.layer is not None:
            box[0] = (self.layer, self.layer + 1)
        result = torch.empty([last - first for first, last in box], dtype=self.entry.properties.dtype)
        num_read = 0
        for chunk in self.entry.chunks:
            pairs = zip(box, chunk.offsets, chunk.sizes, strict=True)
            common = [(max(first, at), min(last, at + size)) for (first, last), at, size in pairs]
            if any(first >= last for first, last in common):
                continue
            piece = self._load(chunk.offsets)
            if piece.numel() != chunk.sizes.numel():
                raise ValueError(f"checkpoint={self.folder}: a piece of {self.key} is {list(piece.shape)} in its file")
            piece = piece.view(chunk.sizes)  # the file may omit the layer dimension
            wanted = zip(common, chunk.offsets, strict=True)
            found = piece[tuple(slice(first - at, last - at) for (first, last), at in wanted)]
            places = zip(common, box, strict=True)
            result[tuple(slice(a - first, b - first) for (a, b), (first, _) in places)] = found
            num_read += found.numel()
        if num_read != result.numel():
            raise ValueError(f"checkpoint={self.folder}: pieces of {self.key} are missing; copy the folder again")
        return result[0] if self.layer is not None else result

    def _load(self, offsets: torch.Size) -> torch.Tensor:
        place = self.index.storage_data.get(MetadataIndex(self.key, offsets))
        if place is None:
            raise ValueError(f"checkpoint={self.folder}: {INDEX_FILE} does not say where {self.key} lies")
        with (self.folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"checkpoint: {self.folder / place.relative_path} is damaged at {self.key}") from error
