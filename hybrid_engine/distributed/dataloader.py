"""The training dataloader: the same samples in the same order for any number of processes, resumable anywhere."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from hybrid_engine.config import EngineConfig
from hybrid_engine.distributed.processes import get_rank, get_world_size


class TrainingDataLoader:
    """Micro-batches of a map-style dataset, reshuffled in each epoch from (seed, epoch) and split over the processes.

    The epoch's permutation is cut into slices of `micro_batch_size * world_size` samples, of which each process gets
    its part; samples that do not fill the last slice wait for another epoch's order. No global random state is read.

    A loop over it yields the rest of the current epoch: a new epoch after a loop that ran to its end, the remaining
    batches after `load_state_dict` or a loop that was left early.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
    ) -> None:
        """Raises ValueError if the dataset has no length or index, or is too small for a single batch."""
        self._num_per_batch = micro_batch_size * world_size
        _check_dataset(dataset, self._num_per_batch)
        if collate_fn is not None and not callable(collate_fn):
            raise ValueError(f"{collate_fn=} must be a function of a list of samples; pass one or leave it out")
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.seed = seed
        self.epoch = 0
        self.collate_fn = collate_fn or default_collate
        self._num_samples_done = 0

    def __len__(self) -> int:
        """Micro-batches of this process in an epoch."""
        return len(self.dataset) // self._num_per_batch

    def __iter__(self) -> Iterator[Any]:
        order = self._permutation()
        while self._num_samples_done + self._num_per_batch <= len(order):
            start = self._num_samples_done + self.rank * self.micro_batch_size
            samples = [self.dataset[index] for index in order[start : start + self.micro_batch_size]]
            # Counted before the yield: a checkpoint taken while the batch is in use must not repeat it.
            self._num_samples_done += self._num_per_batch
            yield self.collate_fn(samples)
        self.epoch += 1
        self._num_samples_done = 0

    def _permutation(self) -> list[int]:
        # numpy mixes both numbers into the seed; torch's CPU generator reads only 32 bits of one.
        return np.random.default_rng((self.seed, self.epoch)).permutation(len(self.dataset)).tolist()

    def state_dict(self) -> dict[str, int]:
        """The position, in samples over all processes, so that it is valid on another number of processes."""
        return {"seed": self.seed, "epoch": self.epoch, "num_samples_done": self._num_samples_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from `state`; takes effect at the next `iter()`."""
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self._num_samples_done = state["num_samples_done"]


def build_training_dataloader(
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: EngineConfig,
    micro_batch_size: int | None = None,
    unit_size: int = 1,
) -> TrainingDataLoader:
    """Builds the loader of this process; `micro_batch_size` None is the config's.

    Each `unit_size` consecutive processes, which compute a model together, get the same samples.
    """
    return TrainingDataLoader(
        dataset,
        micro_batch_size=micro_batch_size or config.train_micro_batch_size_per_gpu,
        rank=get_rank() // unit_size,
        world_size=get_world_size() // unit_size,
        collate_fn=collate_fn,
        seed=config.seed or 0,
    )


def _check_dataset(dataset: Any, num_per_batch: int) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"training_data={type(dataset).__name__} has no length and index; give a map-style dataset (a list will "
            f"do), or pass no training_data and iterate over your own loader"
        )
    if len(dataset) < num_per_batch:
        raise ValueError(
            f"training_data has {len(dataset)} samples, fewer than the {num_per_batch} of one micro-batch on all "
            f"processes; lower train_micro_batch_size_per_gpu"
        )
