"""Reads distributed checkpoints of Megatron Core (`torch_dist`): whole tensors by name, for any layout that wrote them.

`common.pt` has the options, `.metadata` says where each piece of a tensor is in the `*.distcp` files. The weights of
all layers are one tensor `[L, ...]`, or each layer has its own. Gate and up of a gated MLP are stored one after the
other. `loading.py` calls this.
"""

import io
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hybrid_engine.checkpoint.tensor_files import INDEX_FILE, read_index
from hybrid_engine.extensions.megatron.checkpoints.rank_files import common_name, load_mapped
from hybrid_engine.inference.checkpoint import Bounds, Joined, Source

COMMON_FILE = "common.pt"
MODEL = re.compile(r"(model\.)?((embedding|decoder|output_layer)\..*)")
STACKED = re.compile(r"decoder\.layers\.(?!\d)(.*)")


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
