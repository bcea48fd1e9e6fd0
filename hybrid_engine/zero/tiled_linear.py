"""`deepspeed.zero.TiledLinear`: a linear layer made of several small ones, each of which is a tile of its weight.

In DeepSpeed a tile is what stage 3 gathers at a time. FSDP2 gathers transformer layers, so here the tiles only keep a
model's code and the names of its weights working.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn

from hybrid_engine.config.checks import check_integer
from hybrid_engine.zero.gathered_parameters import GatheredParameters


class RowOfTiles(nn.Sequential):
    """The tiles of one part of the output; a module that is called, so that FSDP2 can gather it alone.

    It is not a ModuleList, which FSDP2 refuses up to torch 2.11 although it can be called.
    """

    def forward(self, parts: Sequence[torch.Tensor]) -> list[Any]:
        """The output of each tile for its part of the input."""
        return [tile(part) for tile, part in zip(self, parts, strict=True)]


class TiledLinear(nn.Module):
    """`torch.nn.Linear` as `out_splits` times `in_splits` tiles, `linears[out][in]`; a row's last tile has the bias.

    Args:
        in_features: of the whole layer, cut into `in_splits` parts whose sizes differ by one at most.
        out_features: of the whole layer, cut into `out_splits` parts in the same way.
        bias: whether the layer has a bias.
        input_is_already_split: the input is then a sequence of `in_splits` tensors.
        combine_out_splits: False returns the parts of the output as a list.
        linear_cls: builds a tile from `(in_features, out_features, bias=..., **kwargs)`.
        init_linear: the layer whose weights are copied.

    Raises:
        ValueError: more parts than features, or fewer than 1.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_integer("in_splits", in_splits, 1, in_features)
        check_integer("out_splits", out_splits, 1, out_features)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes, self.out_sizes = _cut(in_features, in_splits), _cut(out_features, out_splits)
        self.linears = nn.ModuleList(
            RowOfTiles(
                *(
                    linear_cls(columns, rows, bias=bias and number == in_splits - 1, **kwargs)
                    for number, columns in enumerate(self.in_sizes)
                )
            )
            for rows in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """The output of the whole layer for `input_`, `[..., in_features]` or its parts."""
        if self.in_splits == 1:
            parts = [input_]
        else:
            parts = input_ if self.input_is_already_split else input_.split(self.in_sizes, dim=-1)
        if len(parts) != self.in_splits:
            raise ValueError(f"TiledLinear: the input has {len(parts)} parts, in_splits={self.in_splits}; give as many")
        outputs = [self._add_up(tiles(parts)) for tiles in self.linears]
        return self._combine(outputs) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies the weights of a whole layer of the same shape; collective if the tiles are sharded."""
        if tuple(other.weight.shape) != (self.out_features, self.in_features) or self.use_bias != (
            other.bias is not None
        ):
            raise ValueError(
                f"TiledLinear: a layer of shape {tuple(other.weight.shape)}, bias={other.bias is not None}, does not "
                f"fit one of {(self.out_features, self.in_features)}, bias={self.use_bias}; give one that does"
            )
        for tiles, rows in zip(self.linears, _slices(self.out_sizes), strict=True):
            for tile, columns in zip(cast(RowOfTiles, tiles), _slices(self.in_sizes), strict=True):
                with GatheredParameters(tile.parameters(), modifier_rank=0):
                    tile.weight.copy_(other.weight[rows, columns])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[rows])

    def _add_up(self, outputs: list[Any]) -> Any:
        return sum(outputs[1:], start=outputs[0])

    def _combine(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)


class TiledLinearReturnBias(TiledLinear):
    """A TiledLinear whose tiles return the product and the bias, to be added later, like Megatron's."""

    def _add_up(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._add_up([product for product, _ in outputs]), biases[-1] if biases else None

    def _combine(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        return super()._combine([product for product, _ in outputs]), super()._combine(biases) if biases else None


def _cut(length: int, num_parts: int) -> list[int]:
    size, rest = divmod(length, num_parts)
    return [size + 1] * rest + [size] * (num_parts - rest)


def _slices(sizes: Sequence[int]) -> list[slice]:
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
