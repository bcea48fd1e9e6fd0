"""The training dataloader: every sample at most once per epoch, the same samples on any number of processes."""

import random

import pytest
import torch

from hybrid_engine.distributed.dataloader import TrainingDataLoader

pytestmark = pytest.mark.quick


def _loader(num_samples=23, **more):
    return TrainingDataLoader(list(range(num_samples)), **{"micro_batch_size": 2, "collate_fn": list, **more})


def test_an_epoch_hands_out_each_sample_at_most_once_and_only_full_batches():
    loader = _loader()
    samples = [sample for batch in loader for sample in batch]
    assert len(samples) == len(set(samples)) == 22 and len(loader) == 11


def test_each_epoch_has_another_order_and_the_same_seed_the_same():
    loader, again = _loader(), _loader()
    first, second = list(loader), list(loader)
    assert first != second and [list(again), list(again)] == [first, second]
    assert list(_loader(seed=1)) != first


def test_two_processes_together_see_what_one_sees():
    one = list(_loader(micro_batch_size=2))
    ranks = [list(_loader(micro_batch_size=1, rank=rank, world_size=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == one


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_resumes_in_the_middle_of_an_epoch_also_on_another_number_of_processes(world_size):
    loader = _loader()
    expected = [sample for batch in loader for sample in batch] + [sample for batch in loader for sample in batch]
    loader, seen = _loader(), []
    for batch in loader:
        seen += batch
        if len(seen) == 10:
            break
    resumed = [_loader(micro_batch_size=2 // world_size, rank=r, world_size=world_size) for r in range(world_size)]
    for part in resumed:
        part.load_state_dict(loader.state_dict())
    for _ in range(2):
        for batches in zip(*resumed, strict=True):
            seen += [sample for batch in batches for sample in batch]
    assert seen == expected


def test_it_reads_no_global_random_state():
    states = random.getstate(), torch.get_rng_state()
    first = list(_loader())
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
    torch.manual_seed(123)
    assert list(_loader()) == first


def test_samples_are_collated_into_tensors_by_default():
    data = [{"input_ids": torch.tensor([i, i])} for i in range(4)]
    batch = next(iter(TrainingDataLoader(data, micro_batch_size=4)))
    assert batch["input_ids"].shape == (4, 2)


def test_a_dataset_without_length_or_too_small_is_an_error_naming_the_remedy():
    with pytest.raises(ValueError, match=r"training_data=generator has no length.*map-style"):
        TrainingDataLoader((i for i in range(3)), micro_batch_size=1)
    with pytest.raises(ValueError, match=r"3 samples, fewer than the 4.*lower train_micro_batch_size_per_gpu"):
        _loader(3, world_size=2)
