"""A planned graph computes what the module computes, forward and backward: ranks are simulated in one process."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import Graph, build_graph
from hybrid_engine.extensions.parallelize.module.steps import Steps
from hybrid_engine.extensions.parallelize.planning.autodist import best_plan
from hybrid_engine.extensions.parallelize.planning.layouts import edges_of, parameter_layouts, value_layouts
from hybrid_engine.extensions.parallelize.planning.machine import COLLECTIVES, Device, Link, Machine
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.policies import batch_plan, replicated_plan, tensor_parallel
from hybrid_engine.extensions.parallelize.planning.setting import PlanSetting
from tests.support.causal_models import CAUSAL_MODELS, build_causal, causal_batch
from tests.support.distributed import leave_process_group
from tests.support.random_splits import random_plan


@pytest.fixture(scope="module", autouse=True)
def _four_simulated_ranks() -> Iterator[None]:
    leave_process_group()
    dist.init_process_group("fake", rank=0, world_size=4)
    yield
    leave_process_group()


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x, y):
        return F.mse_loss(self.layers(x), y)


class Transformer(nn.Module):
    """Tied weights, a buffer that is written into, a dict as argument, causal attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.qkv, self.out, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch):
        self.calls += 1
        x = self.embed(batch["ids"])
        heads = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.relu(self.up(x))) * batch["mask"][..., None]
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 16) / 3), nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, x, y):
        chosen, experts = self.router(x).softmax(-1).topk(2)
        weights = torch.zeros(*x.shape[:-1], 4, device=x.device).scatter(-1, experts, chosen)
        hidden = F.silu(torch.einsum("nk,ekm->enm", x, self.up))
        mixed = torch.einsum("enm,emk,ne->nk", hidden, self.down, weights)
        return (mixed - y).abs().mean()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, image, label):
        x = F.max_pool2d(F.relu(self.norm(self.first(image)), inplace=True), 2)
        x = self.second(x).mean((2, 3))
        x[:, 0] = 1.0
        return F.cross_entropy(self.head(x), label)


def causal_lm(name: str) -> tuple[nn.Module, dict[str, Any]]:
    arguments = causal_batch() | {"use_cache": False}
    return build_causal(name, num_layers=1), arguments


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mlp": lambda: (MLP(), {"x": torch.randn(4, 8), "y": torch.randn(4, 4)}),
    "transformer": lambda: (
        Transformer(),
        {
            "batch": {
                "ids": torch.randint(0, 16, (4, 6)),
                "mask": torch.randint(0, 2, (4, 6)),
                "labels": torch.randint(-1, 16, (4, 6)).where(torch.rand(4, 6) > 0.2, -100).clamp(-100),
            }
        },
    ),
    "experts": lambda: (MixtureOfExperts(), {"x": torch.randn(12, 8), "y": torch.randn(12, 8)}),
    "convolutions": lambda: (Convolutions(), {"image": torch.randn(4, 4, 8, 8), "label": torch.randint(0, 4, (4,))}),
    **{name: partial(causal_lm, name) for name in CAUSAL_MODELS},
}


def build(name: str) -> tuple[nn.Module, dict[str, Any], Graph]:
    torch.manual_seed(0)
    module, arguments = CASES[name]()
    if "batch" in arguments:
        arguments["batch"]["labels"].masked_fill_(arguments["batch"]["labels"] == -1, 0)
    return module, arguments, build_graph(module, arguments)


def expected_step(module: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and buffers of the module itself, whose buffers are put back."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    result = module(**arguments)
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward()
    after = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for name, buffer in module.named_buffers():
        buffer.copy_(before[name])
    return loss.detach(), {n: p.grad for n, p in module.named_parameters()}, after


def check_plan(graph: Graph, plan: Plan, module: nn.Module, arguments: dict[str, Any], expected: Any) -> None:
    """Runs the plan on simulated ranks and compares loss, gradients and changed buffers on each."""
    loss, gradients, buffers = expected
    tensors = [value for value in pytree.tree_leaves(arguments) if isinstance(value, Tensor)]
    inputs = dict(zip(graph.of_kind("input"), tensors, strict=True))
    with LocalTensorMode(torch.Size(plan.mesh).numel()):
        mesh = init_device_mesh("cpu", plan.mesh)
        layouts = parameter_layouts(graph, plan)
        held: dict[str, Any] = {name: on_all_ranks(buffer, mesh) for name, buffer in module.named_buffers()}
        constants = {name: on_all_ranks(tensor, mesh) for name, tensor in graph.constants.items()}
        graph = replace(graph, constants=constants)
        inputs = {name: on_all_ranks(tensor, mesh) for name, tensor in inputs.items()}
        for name, parameter in module.named_parameters():
            held[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, layouts[name], src_data_rank=None))
        outputs, mutations = Steps(graph, plan, mesh).run(held, inputs)
        outputs[0].backward()
        assert_on_all_ranks(outputs[0].detach(), loss)
        for name, gradient in gradients.items():
            assert held[name].grad.placements == held[name].placements
            assert_on_all_ranks(held[name].grad.full_tensor(), gradient)
        assert set(mutations) == {
            name for name in buffers if not torch.equal(buffers[name], dict(module.named_buffers())[name])
        }
        for name, value in mutations.items():
            assert_on_all_ranks(value, buffers[name])


def on_all_ranks(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor on each simulated rank; collectives leave out tensors that belong to none."""
    return LocalTensor({rank: tensor.detach().clone() for rank in range(mesh.size())})


def assert_on_all_ranks(found: Tensor, expected: Tensor) -> None:
    for tensor in found._local_tensors.values() if isinstance(found, LocalTensor) else [found]:
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "transformer", "experts", "convolutions"])
def test_random_plans_compute_what_the_module_computes(name):
    module, arguments, graph = build(name)
    expected = expected_step(module, arguments)
    for seed in range(3):
        check_plan(graph, random_plan(graph, (4,), seed), module, arguments, expected)
        check_plan(graph, random_plan(graph, (2, 2), seed), module, arguments, expected)
    check_plan(graph, batch_plan(graph, (4,)), module, arguments, expected)


@pytest.mark.parametrize(("mesh", "seed"), [((4,), 4), ((2,), 21)], ids=str)
def test_parts_whose_strides_are_not_those_of_the_whole_are_viewed_all_the_same(mesh, seed):
    module, arguments, graph = build("transformer")
    check_plan(graph, random_plan(graph, mesh, seed), module, arguments, expected_step(module, arguments))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "opt"])
def test_a_random_plan_of_a_model_of_transformers_computes_what_it_computes(name):
    module, arguments, graph = build(name)
    check_plan(graph, random_plan(graph, (2,), seed=7), module, arguments, expected_step(module, arguments))


@pytest.mark.parametrize("name", list(CASES))
def test_tensor_parallel_plans_compute_what_the_module_computes(name):
    module, arguments, graph = build(name)
    expected = expected_step(module, arguments)
    for size in (2, 4):
        plan = tensor_parallel(graph, ComputeConfig(size, size))
        assert plan.splits or name == "experts"
        check_plan(graph, plan, module, arguments, expected)


SLOW_DEVICE = Device(kind="cpu", memory_bytes=1 << 40, flops_per_s={"float32": 1e6}, bytes_per_s=1e6, op_s=0.0)
FAST_LINKS = dict.fromkeys(COLLECTIVES, Link(0.0, 1e7))


@pytest.mark.parametrize("name", ["mlp", "transformer", "experts", "llama"])
def test_plans_of_autodist_compute_what_the_module_computes(name):
    module, arguments, graph = build(name)
    expected = expected_step(module, arguments)
    machine = Machine(name="", source="", device=SLOW_DEVICE, processes_per_node=4, near=FAST_LINKS, far=FAST_LINKS)
    setting = PlanSetting(machine=machine, plan_ngpus=4)
    plans = [best_plan(graph, setting), best_plan(graph, replace(setting, max_partition_degree=2))]
    assert [len(plan.mesh) for plan in plans][1] == 2
    for plan in plans:
        linears = [op for op in graph.ops.values() if op.name in ("linear", "einsum")]
        assert all(any(plan.split_of(op)) for op in linears)
        check_plan(graph, plan, module, arguments, expected)


def test_a_batch_plan_splits_everything_between_the_first_op_and_the_loss():
    _, _, graph = build("transformer")
    plan = batch_plan(graph, (2,))
    linears = [op for op in graph.ops.values() if op.name == "linear"]
    assert all(plan.split_of(op) == ("*0",) for op in linears)
    assert plan.split_of(graph.ops[":cross_entropy_loss:0"]) == ("m",)


def vocabulary_plan(graph: Graph, mesh: tuple[int, ...]) -> Plan:
    """Rows of the embedding and of the head over every axis, and what follows from that."""
    plan = replicated_plan(graph, mesh)
    for axis in range(len(mesh)):
        plan.place("*embed*", op="embedding", out="v", axis=axis)
        plan.place("*head", op="linear", out="n", axis=axis)
    plan.follow("*")
    return plan


@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["transformer", "llama"])
def test_a_head_that_is_split_by_its_vocabulary_needs_no_gather_of_logits(name, mesh):
    module, arguments, graph = build(name)
    plan = vocabulary_plan(graph, mesh)
    lies = value_layouts(graph, plan)
    (head,) = (op for op in graph.ops.values() if op.name == "linear" and op.path.endswith("head"))
    (loss,) = (op for op in graph.ops.values() if op.name == "cross_entropy_loss")
    after = list(graph.ops.values())[list(graph.ops).index(head.key) + 1 :]
    read = [edge for op in after for edge in edges_of(plan, op) if any(p.is_shard() for p in lies[edge.key])]
    assert lies[loss.inputs[0]] == (Shard(1),) * len(mesh)
    assert read
    assert all(edge.wanted == lies[edge.key] for edge in read)
    tied = [key for key, value in graph.of_kind("parameter").items() if "embed" in key]
    assert all(lies[key] == (Shard(0),) * len(mesh) for key in tied)
    check_plan(graph, plan, module, arguments, expected_step(module, arguments))


class Classes(nn.Module):
    """Losses of single samples, beside probabilities; a row of the embedding that is not trained."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4, padding_idx=2), nn.Linear(4, 8)

    def forward(self, ids, labels):
        log_probs = F.log_softmax(self.head(self.embed(ids)), -1)
        return (
            F.nll_loss(log_probs, labels, reduction="none", ignore_index=3).square().sum() + log_probs.exp()[:, 1].sum()
        )


def test_losses_of_parts_of_the_classes_are_those_of_all_also_for_the_row_of_padding():
    torch.manual_seed(0)
    module, arguments = Classes(), {"ids": torch.arange(8), "labels": torch.arange(8).flip(0)}
    graph = build_graph(module, arguments)
    expected = expected_step(module, arguments)
    for mesh in ((2,), (4,), (2, 2)):
        plan = vocabulary_plan(graph, mesh)
        assert plan.split_of(graph.ops[":log_softmax:0"]) == ("b",) * len(mesh)
        check_plan(graph, plan, module, arguments, expected)


@pytest.mark.parametrize("wrong", [{"ids": torch.full((8,), 8)}, {"labels": torch.full((8,), 8)}], ids=str)
def test_an_index_that_no_part_has_is_an_error(wrong):
    module, arguments = Classes(), {"ids": torch.arange(8), "labels": torch.arange(8)}
    graph = build_graph(module, arguments)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        check_plan(graph, vocabulary_plan(graph, (2,)), module, arguments | wrong, (None, {}, {}))


def test_a_plan_by_hand_is_megatrons_with_one_sum_after_each_mlp():
    module, arguments, graph = build("mlp")
    plan = replicated_plan(graph, (2,))
    plan.place("layers.0", out="n")
    plan.place("layers.1", out="b")
    plan.place("layers.2", out="k")
    assert [str(p) for p in parameter_layouts(graph, plan)["layers.2.weight"]] == ["S(1)"]
    check_plan(graph, plan, module, arguments, expected_step(module, arguments))


def test_steps_without_a_mesh_are_the_module():
    module, arguments, graph = build("mlp")
    loss, gradients, _ = expected_step(module, arguments)
    module.zero_grad()
    held = dict(module.named_parameters())
    inputs = {f"input:{name}": value for name, value in arguments.items()}
    outputs, _ = Steps(graph, replicated_plan(graph, (1,)), None).run(held, inputs)
    assert outputs[0] == loss
    outputs[0].backward()
    assert all(torch.equal(held[name].grad, gradient) for name, gradient in gradients.items())
    assert not isinstance(outputs[0], DTensor)
