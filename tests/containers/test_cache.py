"""The cache of a model: where its layers' tensors lie, and copies of blocks and slots."""

from dataclasses import replace
from itertools import pairwise

import torch

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.cache import CacheShape, LayerCacheSpec, ModelCache, StateSpec
from hybrid_engine.generation.memory import KVWorkspace
from tests.support.models import build_model

CPU = torch.device("cpu")
UNLIKE = (
    LayerCacheSpec(kv=((2, 8), (2, 8))),
    LayerCacheSpec(state=(StateSpec((3, 5)), StateSpec((7,), torch.float32))),
    LayerCacheSpec(kv=((1, 12),)),
    LayerCacheSpec(kv=((1, 12), (2, 8)), state=(StateSpec((7,), torch.float32),)),
    LayerCacheSpec(shared_with=0),
    LayerCacheSpec(),
)
"""Layers that keep keys and values, states, latent vectors, keys and values of two widths and a state, or nothing."""


def filled(dtype=torch.bfloat16):
    """A cache in which every number is another one, as far as the dtype has them."""
    shape = CacheShape(UNLIKE, 5, 3, 4)
    cache = ModelCache.zeros(shape, dtype, CPU)
    for number, tensor in enumerate(all_tensors(cache)):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 97 + 100 * number)
    return cache


def all_tensors(cache):
    """The tensors of all layers that have their own."""
    layers = [layer for layer, spec in zip(cache.layers, cache.shape.specs, strict=True) if spec.shared_with is None]
    blocks = [layer.blocks for layer in layers if layer.blocks is not None]
    return [
        *(part for of_layer in blocks for part in (of_layer if isinstance(of_layer, tuple) else (of_layer,))),
        *(state for layer in layers for state in layer.states),
    ]


def test_layers_that_are_alike_lie_as_one_tensor_of_keys_and_values():
    model = InferenceModel(build_model("llama"))
    cache = model.new_cache(3, 4)
    whole = cache.memory.view(torch.float32).view(len(model.layers), 2, 3, 2, 4, 12)
    for index, layer in enumerate(cache.layers):
        for part, tensor in enumerate(layer.kv):
            assert tensor.data_ptr() == whole[index, part].data_ptr()
            assert tensor.shape == whole[index, part].shape and tensor.is_contiguous()


def test_tensors_of_unlike_layers_have_the_shapes_of_their_specs_and_share_no_byte():
    cache = filled()
    first, states, latent, mixed, shared, nothing = cache.layers
    assert [tuple(x.shape) for x in first.kv] == [(5, 2, 3, 8)] * 2
    assert [tuple(x.shape) for x in states.states] == [(4, 3, 5), (4, 7)] and states.blocks is None
    assert [x.dtype for x in states.states] == [torch.bfloat16, torch.float32]
    assert latent.blocks.shape == (5, 1, 3, 12)
    assert [tuple(x.shape) for x in mixed.kv] == [(5, 1, 3, 12), (5, 2, 3, 8)]
    assert shared is first and nothing == (None, ())
    ranges = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in all_tensors(cache))
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    assert cache.data_ptr() <= ranges[0][0] and ranges[-1][1] <= cache.data_ptr() + cache.memory.nbytes
    assert cache.memory.nbytes == 5 * cache.shape.bytes_per_block(torch.bfloat16) + 4 * (
        cache.shape.bytes_per_slot(torch.bfloat16)
    )


def test_copies_of_blocks_and_slots_reach_every_layer_and_nothing_else():
    cache, before = filled(), filled()
    cache.copy_blocks(*torch.tensor([[4, 0], [1, 2], [2, 3]]))
    cache.copy_states(*torch.tensor([[3], [1]]))
    for new, old in zip(all_tensors(cache), all_tensors(before), strict=True):
        expected = old.clone()
        if old.dim() == 4:
            expected[1, :, :2], expected[2] = old[4, :, :2], old[0]
        else:
            expected[1] = old[3]
        assert torch.equal(new, expected)


def test_parts_of_a_cache_lie_one_after_the_other():
    cache = ModelCache.zeros(CacheShape(UNLIKE, 5, 3, 4), torch.float32, CPU)
    parts = cache.split(
        [replace(cache.shape, num_blocks=2, num_slots=1), replace(cache.shape, num_blocks=3, num_slots=3)]
    )
    assert parts[0].data_ptr() == cache.data_ptr()
    assert parts[1].data_ptr() == parts[0].data_ptr() + parts[0].memory.nbytes
    assert sum(part.memory.nbytes for part in parts) == cache.memory.nbytes


def test_a_workspace_is_taken_again_only_if_it_has_the_blocks_the_slots_and_the_layers():
    workspace, shape = KVWorkspace(), CacheShape(UNLIKE, 4, 3, 4)
    cache = workspace.take(shape, torch.float32, CPU)
    assert workspace.take(replace(shape, num_blocks=2, num_slots=0), torch.float32, CPU) is cache
    for larger in ({"num_blocks": 5}, {"num_slots": 5}, {"block_size": 2}, {"specs": UNLIKE[::-1]}):
        workspace.take(shape, torch.float32, CPU)
        other = workspace.take(replace(shape, **larger), torch.float32, CPU)
        assert other.shape == replace(shape, **larger) and not other.memory.any()
        other.memory.fill_(1)
