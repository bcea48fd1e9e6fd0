"""`loss.backward()` and `engine.scale(loss).backward()` train as `engine.backward(loss)` does, to the bit."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybrid_engine
from hybrid_engine.zero.sharding import full_tensor
from tests.support.distributed import run_distributed
from tests.support.training_reference import batches, engine_config, relative_error, tiny_llama, whole_weights

pytestmark = pytest.mark.long

STEPS = 2
STYLES = {
    "engine": lambda engine, loss: engine.backward(loss),
    "torch": lambda engine, loss: loss.backward(),
    "scale": lambda engine, loss: engine.scale(loss).backward(),
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 2.0**15}},
}


def build(stage=0, model=None, micro_batches=2, **more):
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sizes = {
        "train_batch_size": 2 * micro_batches * world_size,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
    }
    config = {**engine_config(stage), **sizes, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    return hybrid_engine.initialize(model=model or tiny_llama(), config={**config, **more})[0]


def masters(engine):
    return {t.name: full_tensor(t.master).clone() for t in engine.optimizer.parameters}


def train(engine, backward, num_steps=STEPS, rank=0):
    """Masters and gradient norms; `backward` is called with the engine and each micro-batch's loss."""
    norms = []
    for step in range(num_steps):
        for i in range(engine.gradient_accumulation_steps()):
            tokens = batches(1, step)[0][(i + rank) % 4]
            backward(engine, engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return masters(engine), norms


def is_equal(one, other, is_fp16=False):
    """To the bit; in fp16 but for numbers so small that it matters when they are divided."""
    tolerance = 1e-8 if is_fp16 else 0.0
    differences = [(one[0][name] - other[0][name]).abs().max() for name in other[0]]
    return max(differences) <= tolerance and one[1] == pytest.approx(other[1], rel=tolerance, abs=0)


def several_losses(backward):
    def action(engine, loss):
        backward(engine, loss * 0.5)
        tokens = batches(1, 7)[0][0]
        backward(engine, engine(input_ids=tokens, labels=tokens).loss * 0.25)

    return action


def from_logits(engine, loss):
    """A loss from the engine's logits and from its loss, which depends on them: each gradient is divided once."""
    tokens = batches(1, 5)[0][0]
    output = engine(input_ids=tokens, labels=tokens)
    return output.loss + output.logits.float().square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_style_gives_the_same_bits_on_one_process(precision, micro_batches):
    for change in (lambda action: action, several_losses):
        results = {
            style: train(build(micro_batches=micro_batches, **PRECISIONS[precision]), change(action))
            for style, action in STYLES.items()
            if (precision, style) != ("fp16", "torch")
        }
        assert all(is_equal(result, results["engine"], precision == "fp16") for result in results.values())


def test_a_loss_of_outputs_that_depend_on_each_other_is_divided_once():
    own = train(build(), lambda engine, loss: engine.backward(from_logits(engine, loss)))
    torchs = train(build(), lambda engine, loss: from_logits(engine, loss).backward())
    assert is_equal(torchs, own)


def test_three_micro_batches_equal_a_plain_loop():
    model = tiny_llama()
    plain = copy.deepcopy(model)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = build(model=model, micro_batches=3, gradient_clipping=0, scheduler=None, optimizer=sgd)
    ours = train(engine, STYLES["torch"])[0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        for tokens in batches(1, step)[0][:3]:
            (plain(input_ids=tokens, labels=tokens).loss / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert relative_error(ours, dict(plain.named_parameters())) < 1e-5


class Value(nn.Module):
    """A critic on hidden numbers; `forward_value` is called beside the engine's forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.head = nn.Linear(5, 1)

    def forward(self, x, reentrant=None):
        for layer in self.layers:
            x = torch.tanh(layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant))
        return self.head(x)

    def forward_value(self, x):
        return self(x)


def inputs(seed):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))


def train_pair(stage, backward, num_steps=2, micro_batches=2, **more):
    """Two engines on one loss, where one's output is the other's input; their masters."""
    first = build(stage, nn.Sequential(nn.Linear(5, 5), nn.Tanh()), micro_batches, **more)
    second = build(stage, Value(), micro_batches, **more)
    for step in range(num_steps * micro_batches):
        x = inputs(step)
        loss = second(first(x)).square().mean() + first(x).square().mean()
        backward(first, second, loss)
        first.step()
        second.step()
    return {**masters(first), **masters(second)}


def pair_plainly(num_steps=2, micro_batches=2):
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(5, 5), nn.Tanh()), Value()
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
        for m in (first, second)
    ]
    for step in range(num_steps * micro_batches):
        x = inputs(step)
        ((second(first(x)).square().mean() + first(x).square().mean()) / micro_batches).backward()
        if (step + 1) % micro_batches == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return dict([*first.named_parameters(), *second.named_parameters()])


PAIR = {"gradient_clipping": 0, "scheduler": None}
PAIR_STYLES = {
    "torch": lambda first, second, loss: loss.backward(),
    "first's": lambda first, second, loss: first.backward(loss),
    "second's": lambda first, second, loss: second.backward(loss),
    "scale": lambda first, second, loss: first.scale(loss).backward(),
}


@pytest.mark.parametrize("style", PAIR_STYLES)
def test_one_loss_over_two_engines_is_that_of_a_plain_loop(style):
    torch.manual_seed(0)
    ours, plain = train_pair(0, PAIR_STYLES[style], **PAIR), pair_plainly()
    for name, param in plain.items():
        torch.testing.assert_close(ours[name], param, rtol=1e-5, atol=1e-6)


def test_one_loss_over_two_engines_in_fp16_wants_one_loss_scale():
    def pair(*scales):
        engines = [
            build(0, nn.Linear(5, 5), 1, fp16={"enabled": True, "loss_scale": scale}, gradient_clipping=0)
            for scale in scales
        ]
        return *engines, engines[1](engines[0](inputs(0).half())).float().square().mean()

    first, second, loss = pair(64, 64)
    first.scale(loss).backward()
    first.step(), second.step()
    assert first.was_step_applied() and second.was_step_applied()
    first, second, loss = pair(64, 32)
    with pytest.raises(ValueError, match=r"another engine's loss scale 64 and not by this one's 32"):
        first.backward(loss)
    first, second, loss = pair(64, 64)
    with pytest.raises(ValueError, match=r"call engine.backward\(loss\) or engine.scale\(loss\).backward\(\)"):
        loss.backward()
    with pytest.raises(ValueError, match="there are no gradients"):
        second.step()
    loss = second(first(inputs(0).half())).float().square().mean()
    (first.scale(loss) * 0.5).backward()
    first.step(), second.step()
    assert first.was_step_applied() and second.was_step_applied()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_are_divided_once(reentrant):
    def run(backward, reentrant):
        engine = build(0, Value(), 2)
        for step in range(4):
            x = inputs(step).requires_grad_()
            backward(engine, engine(x, reentrant=reentrant).square().mean())
            engine.step()
        return masters(engine)

    expected = run(STYLES["engine"], None)
    ours = run(STYLES["torch"], reentrant)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_loss_that_the_engines_forward_did_not_give_trains_too():
    """`forward_value` through the engine, the module itself, an output in an object that nobody knows."""

    class Opaque:
        def __init__(self, value):
            self.value = value

    class Wrapped(Value):
        def forward(self, x, reentrant=None):
            return Opaque(super().forward(x))

        def forward_value(self, x):
            return Value.forward(self, x)

    def run(loss, model):
        engine = build(0, model, 2)
        for step in range(4):
            loss(engine, inputs(step)).square().mean().backward()
            engine.step()
        return masters(engine)

    expected = run(lambda engine, x: engine(x), Value())
    for ours in (
        run(lambda engine, x: engine.forward_value(x), Value()),
        run(lambda engine, x: engine.module(x), Value()),
        run(lambda engine, x: engine(x).value, Wrapped()),
    ):
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_gradients_that_are_only_asked_for_are_neither_divided_nor_counted():
    engine = build(0, Value(), 2)
    weight = engine.module.head.weight
    plain = Value()
    expected = torch.autograd.grad(plain(inputs(0)).sum(), plain.head.weight)[0]
    assert torch.equal(torch.autograd.grad(engine(inputs(0)).sum(), weight)[0], expected)
    assert weight.grad is None
    with pytest.raises(ValueError, match="there are no gradients"):
        engine.step()


def test_scale_wants_what_backward_wants():
    engine = build(0, Value())
    with pytest.raises(ValueError, match=r"scale\(\): the loss has shape \(4, 1\), it must be one number"):
        engine.scale(engine(inputs(0)))
    with pytest.raises(ValueError, match=r"scale\(\): the loss does not depend on trainable parameters"):
        engine.scale(torch.ones(()))
    evaluates = hybrid_engine.initialize(model=Value(), config={"train_batch_size": 1})[0]
    with pytest.raises(ValueError, match=r"scale\(\): this engine only evaluates"):
        evaluates.scale(evaluates(inputs(0)).sum())


def test_without_managed_accumulation_every_step_steps_and_samples_are_counted(capsys):
    engine = build(0, Value(), 2, managed_gradient_accumulation=False, steps_per_print=1)
    managed = build(0, Value(), 2)
    for i in range(2):
        assert not engine.is_gradient_accumulation_boundary()
        engine.backward(engine(inputs(i)).sum())
        STYLES["torch"](managed, managed(inputs(i)).sum())
        managed.step()
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (1, 1, 4)
    assert all(torch.equal(param, masters(managed)[name]) for name, param in masters(engine).items())
    engine(inputs(2)).sum().backward()
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (2, 6)
    assert not engine.managed_gradient_accumulation() and managed.managed_gradient_accumulation()
    lines = capsys.readouterr().out.splitlines()
    assert "step=1 loss=" in lines[0] and "step=2 lr=" in lines[1]  # nobody has told the engine that loss
    with pytest.raises(ValueError, match="every step\\(\\) is the boundary"):
        engine.set_gradient_accumulation_boundary(True)
    with (
        pytest.raises(ValueError, match=r"managed_gradient_accumulation=false step\(\) reduces"),
        engine.coalesce_grad_reduction(),
    ):
        pass


TWO_STYLES = ("engine", "torch")
"""Outside fp16 `scale()` returns the loss itself: what follows from it is the second style."""
PRECISION_OF = {0: ["fp32"], 1: ["bf16"], 2: ["fp32"], 3: ["fp32", "bf16"]}
"""Of two processes at each stage; fp16 at every one."""
PREDIVIDED = (0, 3)


def distributed_work(rank, world_size):
    results = {}
    for stage in range(4):
        for precision in PRECISION_OF[stage]:
            for style in TWO_STYLES:
                engine = build(stage, **PRECISIONS[precision])
                results[stage, precision, style] = train(engine, STYLES[style], rank=rank)
        fp16 = PRECISIONS["fp16"]
        results[stage, "fp16", "engine"] = train(build(stage, **fp16), STYLES["engine"], rank=rank)
        results[stage, "fp16", "scale"] = train(build(stage, **fp16), STYLES["scale"], rank=rank)
        if stage in PREDIVIDED:
            for style in TWO_STYLES:
                engine = build(stage, gradient_predivide_factor=4.0)
                results[stage, "predivided", style] = train(engine, STYLES[style], rank=rank)
        results[stage, "losses"] = [
            train(build(stage), several_losses(STYLES[style]), rank=rank) for style in TWO_STYLES
        ]
        results[stage, "checkpointed"] = [train(checkpointed(stage), STYLES[style], rank=rank) for style in TWO_STYLES]
        torch.manual_seed(0)
        results[stage, "pair"] = train_pair(stage, PAIR_STYLES["torch"], **PAIR)
        results[stage, "interrupted"] = train_with_an_error(stage, rank)
        results[stage, "reduced"] = reduced_once(stage, rank)
    return results


def checkpointed(stage):
    model = tiny_llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return build(stage, model.train())


def train_with_an_error(stage, rank):
    """A pass that is refused in its first hook leaves the engine as it was."""
    engine = build(stage, **PRECISIONS["fp16"])
    tokens = batches(1)[0][0]
    message = ""
    try:
        engine(input_ids=tokens, labels=tokens).loss.backward()
    except ValueError as error:
        message = str(error)
    return message, train(engine, STYLES["scale"], rank=rank)


def reduced_once(stage, rank):
    """Two passes of one step: reduced each, in one block, and by `step()` where it owns the boundary."""

    def one_step(engine, around):
        for step in range(2):
            with around(engine):
                for i in range(2):
                    tokens = batches(1, step)[0][i + rank]
                    engine.backward(engine(input_ids=tokens, labels=tokens).loss * 0.5)
            engine.step()
        return whole_weights(engine), engine.global_samples

    def coalesced(engine):
        return engine.coalesce_grad_reduction()

    def nothing(engine):
        return torch.enable_grad()

    unmanaged = {"managed_gradient_accumulation": False}
    found = [
        one_step(build(stage, micro_batches=1), nothing),
        one_step(build(stage, micro_batches=1), coalesced),
        one_step(build(stage, micro_batches=1, **unmanaged), nothing),
    ]
    engine = build(stage, micro_batches=1)
    messages = []
    with engine.coalesce_grad_reduction():
        for action in (engine.step, engine.coalesce_grad_reduction().__enter__, engine.no_sync().__enter__):
            try:
                action()
            except ValueError as error:
                messages.append(str(error))
    return found, messages


@pytest.fixture(scope="module")
def two_ranks():
    return run_distributed(distributed_work, 2)


def test_every_style_gives_the_same_bits_at_every_stage_on_two_processes(two_ranks):
    for results in two_ranks:
        for stage in range(4):
            for kind, style in (
                *((precision, "torch") for precision in PRECISION_OF[stage]),
                ("fp16", "scale"),
                *([("predivided", "torch")] if stage in PREDIVIDED else []),
            ):
                expected = results[stage, kind, "engine"]
                assert is_equal(results[stage, kind, style], expected, kind == "fp16"), (stage, kind, style)


def test_several_losses_and_recomputed_layers_give_the_same_bits_on_two_processes(two_ranks):
    for results in two_ranks:
        for stage in range(4):
            assert is_equal(results[stage, "losses"][1], results[stage, "losses"][0])
            own, torchs = results[stage, "checkpointed"]
            assert is_equal(torchs, own)


def test_one_loss_over_two_engines_on_two_processes_is_that_of_a_plain_loop(two_ranks):
    plain = pair_plainly()
    for results in two_ranks:
        for stage in range(4):
            for name, param in plain.items():
                torch.testing.assert_close(results[stage, "pair"][name], param, rtol=1e-5, atol=1e-6)


def test_a_pass_that_is_refused_leaves_the_engine_as_it_was(two_ranks):
    for results in two_ranks:
        for stage in range(4):
            message, trained = results[stage, "interrupted"]
            assert "fp16 needs the loss multiplied by the loss scale" in message
            assert is_equal(trained, results[stage, "fp16", "scale"])


def test_gradients_that_are_reduced_once_at_the_end_are_those_that_are_reduced_each_time(two_ranks):
    for results in two_ranks:
        for stage in range(4):
            found, messages = results[stage, "reduced"]
            (expected, samples), (coalesced, coalesced_samples), (unmanaged, unmanaged_samples) = found
            for name in expected:
                torch.testing.assert_close(coalesced[name], expected[name], rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(unmanaged[name], expected[name], rtol=1e-4, atol=1e-6)
            assert (samples, coalesced_samples, unmanaged_samples) == (8, 8, 16)
            assert "inside coalesce_grad_reduction() gradients are not reduced" in messages[0]
            assert "coalesce_grad_reduction(): inside coalesce_grad_reduction() already" in messages[1]
            assert "no_sync()" in messages[2]
