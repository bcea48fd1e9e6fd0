"""Tensors of a checkpoint: whole, in one file, or in pieces that the model holds stacked or joined.

Reading a part reads only its bytes. One file is open at a time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from hybrid_engine.containers.tensor_parallel import Cut

Bounds = tuple[tuple[int, int], ...]


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


class Rows:
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
