"""Writes tensors to a folder and reads them back with torch.distributed.checkpoint, sharded or not.

They can be read on another number of processes and at another ZeRO stage. These functions raise a ValueError, an
OSError or the exception of SIGINT: torch's own `CheckpointException` is not an Exception, so scripts do not catch it.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hybrid_engine.checkpoint.folder import find_cause
from hybrid_engine.distributed.verdict import HeldInterrupts

INDEX_FILE = ".metadata"
METADATA = "torch.distributed.checkpoint.metadata"
RECORDS = {
    *((METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((METADATA, name) for name in ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
"""Classes and functions that an index may name, by module and name."""
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
STATE_FILE = "state.pt"


def write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, held: HeldInterrupts, is_alone: bool) -> None:
    """Writes `tensors` to `folder`. Unless `is_alone` it is collective, and an error on one process is raised on all.

    Raises:
        OSError: the disk is full, or a similar error.
        ValueError: torch cannot write them for another reason.
    """
    with _raising_the_cause(), _without_process_group_warning():
        dcp.save(dict(tensors), storage_writer=_Writer(folder, held), no_dist=is_alone)


def read_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, index: Metadata) -> None:
    """Reads into `tensors`, only the shard of each; local.

    Raises:
        OSError: a file cannot be read.
        ValueError: a tensor is missing, has another shape, or is damaged.
    """
    with _raising_the_cause(), _without_process_group_warning():
        dcp.load(dict(tensors), storage_reader=_Reader(folder, index), no_dist=True)


class _Writer(dcp.FileSystemWriter):
    """Allows SIGINT while it writes: torch exchanges the errors of this part only."""

    def __init__(self, folder: Path, held: HeldInterrupts) -> None:
        super().__init__(folder)
        self._held = held

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            with self._held.allowed():
                return super().write_data(plan, planner)
        except BaseException as error:
            # Here, before the error is sent to other processes without its context.
            raise find_cause(error) from None


class _Reader(dcp.FileSystemReader):
    """Uses an index that was read already; torch would unpickle it."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


@contextmanager
def _raising_the_cause() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        cause = find_cause(error)
        if cause is error:
            raise
        raise cause from None


@contextmanager
def _without_process_group_warning() -> Iterator[None]:
    """Suppresses a warning at every save: a single process is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_index(folder: Path, files: Collection[str], skips_others: bool = False) -> Metadata:
    """The index of the checkpoint in `folder`, whose files are `files`.

    With `skips_others` it may be an index of another program: objects other than tensors are left out, whatever their
    class.

    Raises:
        ValueError: it is damaged; it names a class that no index needs; it holds objects other than tensors, which
            could not be read without running code; or a tensor is in a file that is not one of the checkpoint's.
        OSError: it cannot be read.
    """
    with (folder / INDEX_FILE).open("rb") as file:
        try:
            return _to_metadata(_IndexUnpickler(file, skips_others).load(), files, skips_others)
        except OSError:
            raise
        # Garbled bytes make pickle raise nearly anything: EOFError, IndexError, UnicodeDecodeError, MemoryError, ...
        except Exception as error:
            raise ValueError(
                f"checkpoint {str(folder)!r} is damaged: {INDEX_FILE} is not an index of tensors ({error}); load "
                "another tag"
            ) from error


class _Record:
    """Stands for an object of a class of torch in the pickle; it only keeps the object's state."""

    __slots__ = ("state",)

    def __new__(cls, *arguments: Any, **named: Any) -> "_Record":
        record = super().__new__(cls)
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Knows `RECORDS`, torch's dtypes and sizes. Its record classes are its own, so no pickle changes those of another.

    Extension codes and persistent ids come here too, or are refused by pickle itself.
    """

    def __init__(self, file: Any, knows_all: bool) -> None:
        """With `knows_all` every other name is a record too, whose contents are ignored."""
        super().__init__(file)
        self._knows_all = knows_all
        self._classes = {key: type(key[1], (_Record,), {"__slots__": ()}) for key in RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module == "collections" and name == "OrderedDict" and self._knows_all:
            return dict
        if (module, name) not in self._classes:
            if self._knows_all:
                return type(name, (_Record,), {"__slots__": ()})
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return self._classes[module, name]


def _to_metadata(root: Any, files: Collection[str], skips_others: bool) -> Metadata:
    # Megatron's index is of a class of its own, which has the same fields.
    fields = _fields(root, "Metadata" if not skips_others else type(root).__name__)
    tensors = _typed(fields["state_dict_metadata"], dict)
    places = _typed(fields["storage_data"], dict)
    if skips_others:
        tensors = {key: entry for key, entry in tensors.items() if type(entry).__name__ == "TensorStorageMetadata"}
        places = {key: place for key, place in places.items() if _fields(key, "MetadataIndex")["fqn"] in tensors}
    return Metadata(
        state_dict_metadata={_typed(key, str): _to_tensor(entry) for key, entry in tensors.items()},
        storage_data={_to_key(key): _to_place(place, files) for key, place in places.items()},
    )


def _to_tensor(record: Any) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    dtype = _typed(_state(fields["properties"], "TensorProperties"), tuple)[0]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_typed(dtype, torch.dtype)),
        size=_to_size(fields["size"]),
        chunks=[_to_chunk(chunk) for chunk in _typed(fields["chunks"], list)],
    )


def _to_chunk(record: Any) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(offsets=_to_size(fields["offsets"]), sizes=_to_size(fields["sizes"]))


def _to_key(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(fields["fqn"], str),
        None if offset is None else _to_size(offset),
        None if index is None else _to_number(index),
    )


def _to_place(record: Any, files: Collection[str]) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    if fields["relative_path"] not in files:
        raise ValueError(f"it names the file {fields['relative_path']!r}")
    if fields.get("transform_descriptors"):
        raise ValueError("its tensors are transformed")
    return _StorageInfo(fields["relative_path"], _to_number(fields["offset"]), _to_number(fields["length"]))


def _to_size(value: Any) -> torch.Size:
    return torch.Size([_to_number(length) for length in _typed(value, tuple)])


def _to_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"it holds {value!r} in place of a number")
    return value


def _fields(record: Any, name: str) -> dict[str, Any]:
    return _typed(_state(record, name), dict)


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"it holds a {type(record).__name__} in place of a {name}")
    return record.state


def _typed(value: Any, kind: Callable[..., Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it holds a {type(value).__name__} in place of a {kind}")
    return value


def serialize(values: dict[str, Any]) -> bytes:
    """`values` as the bytes of a file.

    Raises:
        ValueError: a part cannot be stored, or not read back without running code; the message names it.
    """
    for name, value in values.items():
        if not _is_storable(value):
            path, part = _find_unstorable(name, value, outer=(value,))
            raise ValueError(
                f"{path} holds a {type(part).__name__}, which cannot be stored, or not read back without running "
                f"code; use numbers, strings, lists, dicts and tensors only"
            )
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def read_values(folder: Path) -> dict[str, Any]:
    """The values that were serialized to the checkpoint in `folder`.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    serialized = (folder / STATE_FILE).read_bytes()
    try:
        values = torch.load(io.BytesIO(serialized), weights_only=True, map_location="cpu")
    # Garbled bytes make torch raise nearly anything: UnpicklingError, RuntimeError, KeyError, UnicodeDecodeError, ...
    except Exception as error:
        raise _damaged(folder) from error
    if not isinstance(values, dict):
        raise _damaged(folder)
    return values


def _damaged(folder: Path) -> ValueError:
    return ValueError(f"checkpoint {str(folder)!r} is damaged: {STATE_FILE} cannot be read; load another tag")


def _is_storable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    # Pickling runs the object's own code: a lambda raises AttributeError, a lock TypeError, others what they like.
    except Exception:
        return False
    return True


def _find_unstorable(path: str, value: Any, outer: tuple[Any, ...]) -> tuple[str, Any]:
    """The innermost part of `value` that cannot be stored, and its path; `outer` are the parts around it."""
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = [(key, part) for key, child in value.items() for part in (key, child)]
    elif isinstance(value, (list, tuple)):
        children = list(enumerate(value))
    for key, child in children:
        if not any(child is part for part in outer) and not _is_storable(child):
            return _find_unstorable(f"{path}[{key!r}]", child, (*outer, child))
    return path, value
