"""All plans that a planner chooses from, as tables: classes of ops, their possible splits, and the cost of each split.

A class of ops is split in one way. A tensor that several ops need in the same layout is moved once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from torch.distributed.tensor import Replicate

from hybrid_engine.extensions.parallelize.graph.graph import END, FREE, SHARED, Code, Graph, Op, Value
from hybrid_engine.extensions.parallelize.planning.layouts import (
    GenerationCopies,
    Layout,
    gradient_layout,
    kept_layout,
    local_elements,
)
from hybrid_engine.extensions.parallelize.planning.op_classes import (
    OpClass,
    Reader,
    SavedTensors,
    State,
    TensorClass,
    differentiable,
    exchange_seconds,
    is_alias,
    kept_by,
    kind_of,
    reused_parameters,
    work,
)
from hybrid_engine.extensions.parallelize.planning.plan import Names, Plan
from hybrid_engine.extensions.parallelize.planning.setting import ZERO, Cost, PlanSetting


class Space:
    """The plans of one mesh; `choices(op)` gives the splits of an op that are considered.

    `ops` are the ops of one stage, by default all; tensors from and to other stages are whole. `recomputed` maps the
    key of an op to its recomputed module. `order` lists the axes of the mesh, the one over which most is split first;
    by default the last axis comes first, because the first one splits samples.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Sequence[int],
        setting: PlanSetting,
        choices: Callable[[Op], Iterable[Names]],
        *,
        ops: Sequence[Op] | None = None,
        shares: bool = True,
        recomputed: Mapping[str, str] | None = None,
        order: Sequence[int] | None = None,
    ):
        self.graph, self.mesh, self.setting = graph, tuple(mesh), setting
        self.recomputed = dict(recomputed or {})
        self.num_recomputed = max(len(set(self.recomputed.values())), 1)
        self.costs = TensorCosts(self.mesh, setting, self.num_recomputed, self._copies(order))
        self.whole: Layout = (Replicate(),) * len(self.mesh)
        self.ops = list(graph.ops.values()) if ops is None else list(ops)
        self.code = Code.of(graph) if setting.is_eager else None
        self.gradients = differentiable(graph, setting.trains)
        self.classes: list[OpClass] = []
        self.class_of: dict[str, int] = {}
        self._make_classes(shares, choices)
        self.tensors = self._make_tensors()

    def _copies(self, order: Sequence[int] | None) -> GenerationCopies | None:
        """The parameter copies of generation; None if generation does not run on the trained parts."""
        num_parts, generation = prod(self.mesh), self.setting.generation
        if generation is None or num_parts == 1 or generation.tensor_parallel != num_parts:
            return None
        return GenerationCopies(
            self.graph, self.mesh, tuple(reversed(range(len(self.mesh)))) if order is None else order
        )

    def _make_classes(self, shares: bool, choices: Callable[[Op], Iterable[Names]]) -> None:
        numbers: dict[object, int] = {}
        reused = reused_parameters(self.graph, self.ops)
        for op in self.ops:
            possible = list(choices(op))
            kind = (kind_of(op, self.graph, reused), tuple(possible)) if shares else op.key
            number = numbers.setdefault(kind, len(numbers))
            if number == len(self.classes):
                self.classes.append(OpClass(ops=[], choices=possible))
            self.classes[number].ops.append(op)
            self.class_of[op.key] = number
        for one in self.classes:
            self._fill(one)

    def _fill(self, one: OpClass) -> None:
        op = one.ops[0]
        variants = list(self._variants(one.ops))
        for names in one.choices:
            found = [self._op_cost(other, names, count, repeated) for other, count, repeated in variants]
            one.costs.append(sum((cost for cost, _ in found), ZERO))
            one.largest.append(max(largest for _, largest in found))
            inputs, gradients = op.rule.input_placements(names), op.rule.gradient_placements(names)
            one.states.append(tuple(zip(inputs, gradients, strict=True)))
            one.outputs.append(op.rule.output_placements(names))

    def _variants(self, ops: Sequence[Op]) -> Iterable[tuple[Op, int, int]]:
        """Ops of a class that differ in which tensors have a gradient: an op, their number, number recomputed."""
        groups: dict[object, list[Op]] = {}
        for op in ops:
            groups.setdefault(tuple(key in self.gradients for key in (*op.inputs, *op.outputs)), []).append(op)
        for group in groups.values():
            yield group[0], len(group), sum(op.key in self.recomputed for op in group)

    def _op_cost(self, op: Op, names: Names, count: int, repeated: int) -> tuple[Cost, float]:
        """The cost of `count` ops like `op`, `repeated` of them recomputed, and bytes of the largest tensor."""
        done = work(op, self.graph, names, self.mesh, self.setting, self.gradients)
        kept = kept_by(op, self.graph, self.gradients).extra_bytes_per_element
        if kept:
            layout = op.rule.input_placements(names)[0]
            kept *= local_elements(self.graph.values[op.inputs[0]].shape, layout, self.mesh)
        cost = Cost(
            compute_s=count * (done.forward_s + done.backward_s) + repeated * done.forward_s,
            communication_s=count * exchange_seconds(op, self.graph, names, self.mesh, self.setting),
            kept_bytes=kept * (count - repeated),
            again_bytes=kept * repeated / self.num_recomputed,
        )
        return cost, done.largest_bytes

    def _make_tensors(self) -> list[TensorClass]:
        kept = {op.key: kept_by(op, self.graph, self.gradients) for op in self.ops}
        views = {op.key for op in self.ops if is_alias(op)}
        held = self._held(kept, views)
        readers = self._readers(kept, views, held)
        makers = {key: (op, position) for op in self.ops for position, key in enumerate(op.outputs)}
        counted: dict[TensorClass, list[str]] = {}
        examples: dict[object, Value] = {}
        for key, found in readers.items():
            op, position = makers.get(key, (None, 0))
            value = self.graph.values[key]
            if not found:
                continue
            modules = {self.recomputed.get(op_key) for op_key in self._reading[key]}
            module = self.recomputed.get(op.key) if op is not None else None
            kind = (value.shape, value.dtype, value.kind if op is None else "result")
            example = examples.setdefault((kind, found, op and (self.class_of[op.key], position)), value)
            one = TensorClass(
                value=example,
                maker=None if op is None else (self.class_of[op.key], position),
                readers=found,
                has_gradient=key in self.gradients,
                is_view=op is not None and op.key in views,
                kept_by_maker=op is not None and kept[op.key].results,
                made_again=module is not None,
                enters=value.kind == "result" and bool(modules - {None, module}),
                count=0,
            )
            counted.setdefault(one, []).append(key)
        self.members = list(counted.values())
        return [replace(one, count=len(keys)) for one, keys in counted.items()]

    def _held(self, kept: Mapping[str, SavedTensors], views: set[str]) -> set[str]:
        """Tensors whose memory is kept until the backward pass, for themselves or for a view of them."""
        held: set[str] = set()
        for op in reversed(self.ops):
            operands = kept[op.key].operands
            held |= {key for position, key in enumerate(op.inputs) if position in operands}
            if op.key in views and any(key in held for key in op.outputs):
                held |= set(op.inputs[:1])
        return held

    def _readers(
        self, kept: Mapping[str, SavedTensors], views: set[str], held: set[str]
    ) -> dict[str, tuple[Reader, ...]]:
        found: dict[str, dict[Reader, None]] = {}
        self._reading: dict[str, list[str]] = {}
        inside = {op.key for op in self.ops}
        for op in self.ops:
            through = op.key in views and any(key in held for key in op.outputs)
            operands = kept[op.key].operands
            for position, key in enumerate(op.inputs):
                keeps = position in operands or (through and position == 0)
                way = FREE if self.code is None else self.code.way(op, key)
                reader = Reader(self.class_of[op.key], position, keeps, op.key in self.recomputed, way)
                found.setdefault(key, {})[reader] = None
                self._reading.setdefault(key, []).append(op.key)
        made = {key for op in self.ops for key in op.outputs}
        ends = dict.fromkeys((key for key in self.graph.outputs if key is not None), True)
        ends |= dict.fromkeys(self.graph.mutations.values(), False)
        if len(inside) < len(self.graph.ops):
            later = {key for op in self.graph.ops.values() if op.key not in inside for key in op.inputs}
            ends |= {key: ends.get(key, False) for key in later & made}
        for key in made & ends.keys():
            way = FREE if self.code is None else self._end(self.code, key)
            found.setdefault(key, {})[Reader(None, 0, ends[key] and self.setting.trains, False, way)] = None
            self._reading.setdefault(key, [])
        return {key: tuple(readers) for key, readers in found.items()}

    def _end(self, code: Code, key: str) -> str:
        """How a result of the graph leaves it: the border of a leaf makes its results whole."""
        return SHARED if code.makers[key].path in code.leaves else END

    def reader_states(self, reader: Reader) -> list[State]:
        """The states of a reader for each choice of its class."""
        if reader.op_class is None:
            return [(self.whole, self.whole)]
        return [states[reader.position] for states in self.classes[reader.op_class].states]

    def evaluate(self, assignment: Sequence[int]) -> tuple[Cost, float]:
        """The cost of a plan, given by a choice for each class, and the bytes of its largest tensor."""
        total, largest = ZERO, 0.0
        for one, choice in zip(self.classes, assignment, strict=True):
            total += one.costs[choice]
            largest = max(largest, one.largest[choice])
        for tensor in self.tensors:
            total += self.tensor_cost(tensor, assignment)
        return total, largest

    def tensor_cost(self, tensor: TensorClass, assignment: Sequence[int]) -> Cost:
        """The cost of the tensors of one class under a plan: moving, keeping, and as parameters."""
        states = [self.reader_states(r)[0 if r.op_class is None else assignment[r.op_class]] for r in tensor.readers]
        total = ZERO
        if tensor.value.kind == "parameter":
            source = kept_layout((wanted for wanted, _ in states), self.whole)
            total += self.costs.parameter(tensor, source)
        else:
            source = self.source(tensor, assignment)
        for state in dict.fromkeys(states):
            total += self.costs.move(tensor, source, state)
        for again in (False, True):
            kept = {s[0] for s, r in zip(states, tensor.readers, strict=True) if r.keeps and r.again == again}
            if tensor.kept_by_maker and tensor.made_again == again:
                total += self.costs.keep(tensor, source, again)
            for layout in kept:
                if not self.costs.is_kept_free(tensor, source, layout, again):
                    total += self.costs.keep(tensor, layout, again)
        if tensor.enters:
            total += self.costs.keep(tensor, source, False)
        return total

    def by_op(self, assignment: Sequence[int]) -> dict[str, Cost]:
        """The cost of a plan by the op that makes a tensor; a parameter counts for the first op that reads it."""
        found = {op.key: ZERO for op in self.ops}
        for one, choice in zip(self.classes, assignment, strict=True):
            for op in one.ops:
                found[op.key] += one.costs[choice].times(1 / len(one.ops))
        for tensor, keys in zip(self.tensors, self.members, strict=True):
            each = self.tensor_cost(tensor, assignment).times(1 / tensor.count)
            for key in keys:
                owner = key.rsplit("/", 1)[0] if tensor.maker is not None else self._reading[key][0]
                found[owner] += each
        return found

    def source(self, tensor: TensorClass, assignment: Sequence[int]) -> Layout:
        """The layout in which a tensor is made."""
        if tensor.maker is None:
            return self.whole
        number, position = tensor.maker
        return self.classes[number].outputs[assignment[number]][position]

    def plan(self, assignment: Sequence[int]) -> Plan:
        """The plan that gives each class its choice."""
        chosen = {op.key: self.classes[n].choices[assignment[n]] for op in self.ops for n in [self.class_of[op.key]]}
        return Plan(
            graph=self.graph, mesh=self.mesh, splits={key: names for key, names in chosen.items() if any(names)}
        )


class TensorCosts:
    """The costs of the tensors of a class, on a mesh of these sizes; `num_recomputed` modules are recomputed.

    `copies` are those of generation; None if there are none.
    """

    def __init__(
        self, mesh: Sequence[int], setting: PlanSetting, num_recomputed: int, copies: GenerationCopies | None = None
    ):
        self.mesh, self.setting, self.num_recomputed, self.copies = tuple(mesh), setting, num_recomputed, copies

    def move(self, tensor: TensorClass, source: Layout, state: State) -> Cost:
        """The time to bring a tensor from layout `source` to a reader's `state`, and its gradient back."""
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
        """The bytes of a tensor that is kept in `layout` for the backward pass; `again`: in a recomputed module."""
        value = tensor.value
        num_bytes = local_elements(value.shape, layout, self.mesh) * self.setting.weights.itemsize(value.dtype)
        if again:
            return Cost(again_bytes=tensor.count * num_bytes / self.num_recomputed)
        return Cost(kept_bytes=tensor.count * num_bytes)

    def is_kept_free(self, tensor: TensorClass, source: Layout, layout: Layout, again: bool) -> bool:
        """Whether a tensor in `layout` exists anyway: a parameter, a view, one that its maker keeps, or one that enters
        a recomputed module (`again`).
        """
        is_given = tensor.maker is None or tensor.is_view or tensor.kept_by_maker
        return layout == source and (is_given or (again and tensor.enters))

    def parameter(self, tensor: TensorClass, layout: Layout) -> Cost:
        """The bytes of a parameter that is kept in `layout`, its gradient, its optimizer state, and copies of it."""
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
        is_at_once = setting.machine.device.kind == "cuda"  # torch.optim then steps all parameters together
        stepping = shard * max(size, 4 if setting.weights.has_masters else size) if is_at_once else 0.0
        if is_sharded and not setting.is_eager:  # FSDP2 copies a graph's gradients, one FSDP unit, to sum them
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
