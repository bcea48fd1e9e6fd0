"""A kernel that does not compile, by Triton's real compiler, is named, and its op runs in torch where that may be."""

import gc
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

import hybrid_engine
from hybrid_engine.generation.live.batches import ContainerBatch
from hybrid_engine.ops import dispatch, expert_gemm, norm, sample
from hybrid_engine.ops.dispatch import KernelError, Launch, describe_kernel_error, need_kernels, replaced_kernels, tl
from hybrid_engine.ops.linear_log_prob import linear_log_prob
from hybrid_engine.ops.linear_log_prob_tiles import LogitShape
from hybrid_engine.ops.norm import NormOp
from tests.support.fake_cuda import replaced
from tests.support.launch_ops import op_checks
from tests.support.models import build_model, padded_prompts
from tests.support.tape import TapeRecorder

pytest.importorskip("triton", reason="Triton does not exist for this platform")

CONFIG = {
    "train_batch_size": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "hybrid_engine": {"enabled": True},
}


def broken_kernel(x_ptr):
    """Triton has no such operation."""
    tl.store(x_ptr, tl.no_such_operation(tl.load(x_ptr)))


def compile_broken(*_, **__):
    """Fails as the first launch of `broken_kernel` does on an H100."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.runtime.jit.JITFunction(broken_kernel)
    source = triton.compiler.ASTSource(kernel, {"x_ptr": "*fp32"})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.fixture
def replaceable(monkeypatch):
    """Kernels may be replaced, and none has been in this process."""
    monkeypatch.delenv("HYBRID_ENGINE_FALLBACK", raising=False)
    monkeypatch.setattr(dispatch, "_replaced", {})
    monkeypatch.setattr(dispatch, "_said", set())


@pytest.fixture
def compiled(monkeypatch, replaceable):
    """`launch` as on an H100: whatever is launched is `broken_kernel`, and is compiled."""
    import triton

    prepare = Launch.__init__

    def prepare_broken(launch, kernel, *args, **meta):
        prepare(launch, Broken(kernel.__name__), *args, **meta)

    monkeypatch.setattr(dispatch, "IS_INTERPRETED", False)
    monkeypatch.setattr(Launch, "__init__", prepare_broken)
    monkeypatch.setattr(dispatch, "_kept", {})
    return triton.runtime.jit.JITFunction(broken_kernel)


class Broken:
    """A kernel in whose place `broken_kernel` is compiled."""

    def __init__(self, name):
        self.__name__ = name

    def __getitem__(self, grid):
        return compile_broken


@contextmanager
def kernels_on_cpu(*ops):
    """Inside, the ops of these modules, or all, launch their kernels for tensors on a CPU too."""

    def takes(tensor):
        return tensor.dtype in dispatch.KERNEL_DTYPES

    with pytest.MonkeyPatch.context() as patch:
        for op in ops:
            patch.setattr(op, "use_triton", takes)
        with nullcontext() if ops else replaced(dispatch.use_triton, takes):
            yield


def launch_it(kernel):
    Launch(kernel, (1,), torch.device("cpu"))(torch.ones(1))


def run_seeded(call):
    """The tensors that an op gives, flat; those that its call makes are the same each time."""

    def flat(part):
        if isinstance(part, tuple):
            return [tensor for inner in part for tensor in flat(inner)]
        return [part.clone()] if isinstance(part, torch.Tensor) else []

    torch.manual_seed(0)
    return flat(call())


def test_every_op_runs_in_torch_once_its_kernel_did_not_compile_which_one_line_says(compiled, caplog):
    slow = ("exact", " 64 rows", "128 rows", "256 rows", "2100 rows", "x 2048", ", 1 rows")
    checks = [(name, call) for name, call in op_checks(torch.float32) if not any(part in name for part in slow)]
    expected = [run_seeded(call) for _, call in checks]
    with kernels_on_cpu():
        found = [run_seeded(call) for _, call in checks]
    for (name, _), right, ours in zip(checks, expected, found, strict=True):
        assert len(right) == len(ours), name
        for one, other in zip(right, ours, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    lines = [record.message for record in caplog.records]
    ops = [line.split(" of ")[1].split()[0] for line in lines]
    assert all(line.endswith("; torch's operations run in its place") for line in lines)
    assert sorted(ops) == [
        "deepspeed_bindings", "expert_gemm", "expert_sum", "gated_delta", "gated_norm", "latent_attention_kernels",
        "linear_divergence_kernels", "linear_log_prob_kernels", "linears", "linears", "linears", "linears",
        "moe_gating", "moe_res_matmul", "norm", "sample", "sample", "short_conv", "softmax_context_launch",
        "softmax_context_launch", "state_space", "xielu",
    ]  # fmt: skip


@pytest.mark.parametrize("broken", ["sums_kernel", "gradient_kernel"])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_a_heads_gradients_are_right_whichever_of_its_kernels_does_not_compile(
    broken, has_entropy, kernels, replaceable, monkeypatch
):
    if not dispatch.IS_INTERPRETED:
        pytest.skip("the kernel that compiles is interpreted here")
    start = Launch.__call__

    def start_unless_broken(launch, *args):
        if launch.kernel.__name__ == broken:
            compile_broken()
        start(launch, *args)

    monkeypatch.setattr(Launch, "__call__", start_unless_broken)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 24).requires_grad_() for rows in (7, 130))
    targets, shape = torch.arange(7) * 11, LogitShape(temperature=0.7)
    logprobs, entropy = linear_log_prob(hidden, weight, targets, None, shape, has_entropy)
    loss = logprobs.sum() if entropy is None else logprobs.sum() + 0.3 * entropy.sum()
    found = torch.autograd.grad(loss, (hidden, weight))
    assert len(replaced_kernels()) == 1
    right = (hidden.double() @ weight.double().t() / 0.7).log_softmax(-1)
    loss = right.gather(1, targets[:, None]).sum() - (0.3 * (right.exp() * right).sum() if has_entropy else 0.0)
    for ours, theirs in zip(found, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_containers_go_on_where_one_of_their_kernels_does_not_compile(compiled, caplog):
    model, (ids, mask) = build_model(), padded_prompts()
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
    with kernels_on_cpu(norm):
        attached = hybrid_engine.attach(model)
        found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
    assert attached.generator.fallback_reason is None and torch.equal(found, expected)
    (line,) = [record.message for record in caplog.records if "compile" in record.message]
    assert line.startswith("norm_kernel of norm does not compile with Triton")


def test_a_step_whose_experts_read_the_host_once_their_kernel_failed_is_not_captured(compiled, monkeypatch):
    """The kernel fails in the pass before the capture, which the host must not read in."""
    engine = hybrid_engine.initialize(model=build_model("mixtral"), config=CONFIG)[0].eval()
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = engine.generate(ids, **options)
    recorder = engine.generator.native.steps.recorder = TapeRecorder()
    with kernels_on_cpu(expert_gemm):
        assert engine.generator.model.can_be_recorded
        for _ in range(2):
            assert torch.equal(engine.generate(ids, **options), expected)
        assert not engine.generator.model.can_be_recorded
    assert len(replaced_kernels()) == 1 and not recorder.tapes


@pytest.mark.parametrize("why", ["HYBRID_ENGINE_FALLBACK", "an exact model"])
def test_no_op_is_replaced_where_its_kernel_must_run(why, compiled, monkeypatch):
    logits, tokens = torch.randn(2, 5), torch.tensor([0, 3])
    holder = torch.nn.Module()
    if why == "an exact model":
        need_kernels(holder)
    else:
        monkeypatch.setenv(why, "0")
    with kernels_on_cpu(sample):
        with pytest.raises(Exception, match="no_such_operation"):
            sample.token_logprobs(logits, tokens)
        assert not replaced_kernels()
        del holder
        gc.collect()
        if why == "an exact model":
            expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            torch.testing.assert_close(sample.token_logprobs(logits, tokens), expected)


def test_containers_give_way_with_one_line_to_a_kernel_without_a_reference(compiled, monkeypatch, caplog):
    model, (ids, mask) = build_model(), padded_prompts()
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
    monkeypatch.setattr(NormOp, "__call__", lambda op, *arguments: launch_it(compiled))
    attached = hybrid_engine.attach(model)
    reason = attached.generator.fallback_reason
    assert reason.startswith("broken_kernel of ") and "does not compile with Triton" in reason
    assert "no_such_operation" in reason
    assert [record.message for record in caplog.records].count(
        f"attach(): LlamaForCausalLM generates with its own generate(): {reason}"
    ) == 1
    found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
    assert torch.equal(found, expected)


def test_exact_mode_refuses_to_start_and_names_the_kernel(compiled, monkeypatch):
    config = {**CONFIG, "hybrid_engine": {"enabled": True, "exact": True}}
    monkeypatch.setattr(NormOp, "__call__", lambda op, *arguments: launch_it(compiled))
    monkeypatch.setattr("hybrid_engine.generation.model.container_probe.probe_bits", lambda *_: launch_it(compiled))
    with pytest.raises(ValueError, match=r"hybrid_engine.exact: broken_kernel of "):
        hybrid_engine.initialize(model=build_model(), config=config)


def test_a_rollout_and_a_training_step_end_by_the_kernels_name(compiled, monkeypatch):
    engine, ids = hybrid_engine.initialize(model=build_model(), config=CONFIG)[0], torch.tensor([[5, 6, 7]])
    engine.eval()
    with monkeypatch.context() as broken:
        broken.setattr(engine.generator.native, "run", lambda *_: launch_it(compiled))
        with pytest.raises(KernelError, match=r"broken_kernel of .* does not compile"):
            engine.generate(ids, max_new_tokens=2)
    engine.train()
    with pytest.raises(KernelError, match=r"broken_kernel of .* does not compile"):
        handle = engine.module.model.layers[0].register_forward_hook(lambda *_: launch_it(compiled))
        engine(input_ids=ids, labels=ids)
    handle.remove()
    loss = engine(input_ids=ids, labels=ids).loss
    loss.register_hook(lambda _: launch_it(compiled))
    with pytest.raises(KernelError, match=r"broken_kernel of .* does not compile"):
        engine.backward(loss)


def test_live_batches_and_warm_ups_end_by_the_kernels_name_too(compiled, monkeypatch):
    engine = hybrid_engine.initialize(model=build_model(), config=CONFIG)[0]
    engine.eval()
    monkeypatch.setattr(engine.generator.native, "warm_up", lambda *_: launch_it(compiled))
    with pytest.raises(KernelError, match=r"broken_kernel of .* does not compile"):
        engine.warm_up()
    strategy = SimpleNamespace(scheduler=None, has_work=True, step=lambda: launch_it(compiled))
    with pytest.raises(KernelError, match=r"broken_kernel of .* does not compile"):
        ContainerBatch(engine.generator.model, strategy, 8).turn()


def test_the_op_is_named_and_other_errors_are_not(compiled, monkeypatch):
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    monkeypatch.setattr(sample, "logprob_kernel", compiled)
    monkeypatch.setattr(sample, "use_triton", lambda logits: True)
    with pytest.raises(Exception, match="no_such_operation") as found:
        sample.token_logprobs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))
    assert describe_kernel_error(found.value).startswith("broken_kernel of sample does not compile")
    for error in (ValueError("no"), RuntimeError("CUDA error: an illegal memory access")):
        assert describe_kernel_error(error) is None


def test_what_the_device_says_of_a_kernel_that_did_compile_is_not_its_compilers():
    launcher: dict = {"__name__": "triton.backends.nvidia.driver"}
    exec(
        'def __call__(): raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")', launcher
    )
    with pytest.raises(RuntimeError) as found:
        launcher["__call__"]()
    assert describe_kernel_error(found.value) is None
    launcher["__name__"] = "triton.backends.nvidia.compiler"
    with pytest.raises(RuntimeError) as found:
        launcher["__call__"]()
    assert describe_kernel_error(found.value) is not None
