"""What a tensor costs: brought from one layout to another, kept for the backward pass, and as a parameter."""

from collections.abc import Sequence
from math import prod

from hybrid_engine.extensions.parallelize.planning.classes import State, TensorClass
from hybrid_engine.extensions.parallelize.planning.copies import Copies
from hybrid_engine.extensions.parallelize.planning.cost import Cost
from hybrid_engine.extensions.parallelize.planning.moving import Layout, gradient_layout, local_elements
from hybrid_engine.extensions.parallelize.planning.setting import Setting


class TensorCosts:
    """The costs of the tensors of a class, on a mesh of these sizes; `num_recomputed` modules are recomputed.

    `copies` are those of generation; None: there are none.
    """

    def __init__(self, mesh: Sequence[int], setting: Setting, num_recomputed: int, copies: Copies | None = None):
        self.mesh, self.setting, self.num_recomputed, self.copies = tuple(mesh), setting, num_recomputed, copies

    def move(self, tensor: TensorClass, source: Layout, state: State) -> Cost:
        """The time of bringing a tensor that lies in `source` to one that wants it so, and its gradient back."""
        value, (wanted, gradient) = tensor.value, state
        size = self.setting.weights.itemsize(value.dtype)
        num_elements = prod(value.shape)
        seconds = 0.0
        if source != wanted:
            seconds += self.setting.move_seconds(num_elements, size, source, wanted, self.mesh)
            if all(reader.again for reader in tensor.readers):
                seconds *= 2
        back = gradient_layout(source)
        if tensor.has_gradient and gradient != back:
            seconds += self.setting.move_seconds(num_elements, size, gradient, back, self.mesh)
        return Cost(communication_s=tensor.count * seconds)

    def keep(self, tensor: TensorClass, layout: Layout, again: bool) -> Cost:
        """The bytes that keeping a tensor in `layout` for the backward pass takes; `again`: in a recomputed module."""
        value = tensor.value
        num_bytes = local_elements(value.shape, layout, self.mesh) * self.setting.weights.itemsize(value.dtype)
        if again:
            return Cost(again_bytes=tensor.count * num_bytes / self.num_recomputed)
        return Cost(kept_bytes=tensor.count * num_bytes)

    def is_kept_free(self, tensor: TensorClass, source: Layout, layout: Layout, again: bool) -> bool:
        """Whether what is kept in `layout` is there in any case: a parameter, a view, what its maker keeps, or what
        enters a recomputed module (`again`)."""
        is_given = tensor.maker is None or tensor.is_view or tensor.kept_by_maker
        return layout == source and (is_given or (again and tensor.enters))

    def parameter(self, tensor: TensorClass, layout: Layout) -> Cost:
        """The bytes of a parameter that is kept in `layout`, its gradient, its optimizer's state, and copies of it."""
        setting, dtype = self.setting, tensor.value.dtype
        size = setting.weights.itemsize(dtype)
        local = local_elements(tensor.value.shape, layout, self.mesh) * tensor.count
        is_sharded = setting.use_zero and setting.num_units > 1
        shard = local / setting.num_units if is_sharded else local
        resident = local * size + (shard * size if is_sharded else 0)
        copied = self._copied_elements(tensor, layout) * size
        if not tensor.has_gradient:
            return Cost(resident_bytes=local * size, copied_bytes=copied)
        state = shard * setting.weights.state_bytes(dtype)
        gradients = local * size * (1 if setting.num_units == 1 else 2) if not is_sharded else (local + shard) * size
        is_at_once = setting.machine.device.kind == "cuda"  # where torch.optim steps all parameters together
        stepping = shard * max(size, 4 if setting.weights.has_masters else size) if is_at_once else 0.0
        if is_sharded and not setting.is_eager:  # FSDP2 copies the gradients of a graph, one unit, to sum them at once
            stepping = max(stepping, local * size)
        return Cost(
            copied_bytes=copied,
            resident_bytes=resident + state,
            gradient_bytes=gradients,
            stepping_bytes=stepping,
            reduction_s=setting.reduction_seconds(local * size),
        )

    def _copied_elements(self, tensor: TensorClass, layout: Layout) -> int:
        if self.copies is None:
            return 0
        return tensor.count * self.copies.num_elements(tensor.value.key, tensor.value.shape, layout)
