"""Memory of the tensors that live in this process."""

import gc
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that a tensor lies in, by its address, which nothing else gets while the result is held.

    FakeTensors have none.
    """
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names, which are looked at too
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    local = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local if not isinstance(tensor, FakeTensor)]
    return {storage.data_ptr(): storage for storage in storages if _has_memory(storage)}


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage has an address: those of tensors that were traced do not, and tests of tracing leave some."""
    try:
        storage.data_ptr()
    except RuntimeError:
        return False
    return True
