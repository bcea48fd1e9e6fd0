"""A kernel that does not compile, by Triton's real compiler, is named: containers give way, all else ends."""

from types import SimpleNamespace

import pytest
import torch
from models import build_model, padded_prompts

import hybrid_engine
from hybrid_engine.generation.live import LiveBatch
from hybrid_engine.ops import dispatch, log_prob
from hybrid_engine.ops.dispatch import tl
from hybrid_engine.ops.kernel_errors import KernelError, describe_kernel_error
from hybrid_engine.ops.norm import NormOp

pytest.importorskip("triton", reason="Triton does not exist for this platform")

CONFIG = {
    "train_batch_size": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "hybrid_engine": {"enabled": True},
}


def broken_kernel(x_ptr):
    """Triton has no such operation."""
    tl.store(x_ptr, tl.no_such_operation(tl.load(x_ptr)))


@pytest.fixture
def compiled(monkeypatch):
    """`launch` as on an H100: whatever is launched is `broken_kernel`, and is compiled."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.runtime.jit.JITFunction(broken_kernel)

    def compile_it(*_):
        source = triton.compiler.ASTSource(kernel, {"x_ptr": "*fp32"})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))

    monkeypatch.setattr(dispatch, "IS_INTERPRETED", False)
    monkeypatch.setattr(dispatch, "start", compile_it)
    return kernel


def launch_it(kernel):
    from hybrid_engine.ops.log_prob import launch

    launch(kernel, (1,), torch.ones(1), device=torch.device("cpu"))


def test_containers_whose_kernel_does_not_compile_give_way_with_one_line(compiled, monkeypatch, caplog):
    model, (ids, mask) = build_model(), padded_prompts()
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
    monkeypatch.setattr(NormOp, "__call__", lambda op, *arguments: launch_it(compiled))
    attached = hybrid_engine.attach(model)
    reason = attached.generator.fallback_reason
    assert reason.startswith("broken_kernel of ") and "does not compile with Triton" in reason
    assert "no_such_operation" in reason
    assert [record.message for record in caplog.records].count(
        f"attach(): LlamaForCausalLM generates by its own generate(): {reason}"
    ) == 1
    found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=4)
    assert torch.equal(found, expected)


def test_exact_mode_refuses_to_start_and_names_the_kernel(compiled, monkeypatch):
    config = {**CONFIG, "hybrid_engine": {"enabled": True, "exact": True}}
    monkeypatch.setattr(NormOp, "__call__", lambda op, *arguments: launch_it(compiled))
    monkeypatch.setattr("hybrid_engine.generation.probing.container_probe.probe_bits", lambda *_: launch_it(compiled))
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
    strategy = SimpleNamespace(scheduler=None, turn=lambda: launch_it(compiled))
    with pytest.raises(KernelError, match=r"broken_kernel of .* does not compile"):
        LiveBatch(engine.generator.model, strategy, 8).turn()


def test_the_op_is_named_and_other_errors_are_not(compiled, monkeypatch):
    monkeypatch.setattr(log_prob, "logprob_kernel", compiled)
    monkeypatch.setattr(log_prob, "use_triton", lambda logits: True)
    with pytest.raises(Exception, match="no_such_operation") as found:
        log_prob.token_logprobs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))
    assert describe_kernel_error(found.value).startswith("broken_kernel of log_prob does not compile")
    for error in (ValueError("no"), RuntimeError("CUDA error: an illegal memory access")):
        assert describe_kernel_error(error) is None
