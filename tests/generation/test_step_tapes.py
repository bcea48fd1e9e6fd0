"""Decode steps on a CPU from tapes: the same tokens and log-probabilities as steps that run as they come."""

import gc
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hybrid_engine
from hybrid_engine.generation import recorders
from hybrid_engine.generation.recorders import StepTapes
from hybrid_engine.ops import cpu_kernels, cpu_library, dispatch
from tests.support.models import PAD, build_model, padded_prompts

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler cc")
FOREVER = 10**9
ENDS = {"eos_token_id": [7, 11, 20], "pad_token_id": PAD}
OPTIONS = {
    "greedy": {"do_sample": False},
    "top_k and top_p": {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 1.3},
    "penalty": {"do_sample": True, "top_k": 0, "repetition_penalty": 1.5, "min_new_tokens": 4},
    "rules": {"do_sample": True, "top_k": 20, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 9]]},
}


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    assert cpu_library.load_library() is not None


@pytest.fixture
def played(monkeypatch):
    """The number of steps that came from a tape, in a list of one."""
    number, play = [0], recorders._Tape.play

    def counted(self):
        number[0] += 1
        return play(self)

    monkeypatch.setattr(recorders._Tape, "play", counted)
    return number


def build_engine(model, **config):
    settings = {"enabled": True, **config}
    engine, *_ = hybrid_engine.initialize(model=model, config={"train_batch_size": 1, "hybrid_engine": settings})
    return engine.eval()


def roll_out(monkeypatch, engine, noted_at, **options):
    monkeypatch.setattr(recorders, "NOTED_AT", noted_at)
    input_ids, mask = padded_prompts()
    given = {"max_new_tokens": 24, "seed": 3, "return_dict_in_generate": True, **ENDS, **options}
    output = engine.generate(input_ids, attention_mask=mask, **given)
    return output.sequences, output.logprobs


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("family", ["llama", "qwen2-mixed-windows", "gemma2", "bloom", "gptj", "lfm2", "qwen3.5"])
def test_a_rollout_from_tapes_is_the_one_without(monkeypatch, played, family, options):
    engine = build_engine(build_model(family))
    expected = roll_out(monkeypatch, engine, FOREVER, **options)
    assert played == [0]
    actual = roll_out(monkeypatch, engine, 1, **options)
    assert played[0] > 8
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], atol=1e-6, rtol=0)
    assert f"{played[0]} steps of the last rollout played from tapes" in engine.report()


def test_tapes_go_with_their_rollout(monkeypatch):
    """They hold the weights as the rollout reads them, which may be gathered or fused."""
    engine = build_engine(build_model())
    roll_out(monkeypatch, engine, 1)
    assert not [object for object in gc.get_objects() if isinstance(object, recorders._Tape)]


def test_shared_blocks_and_few_rows_at_once_change_nothing(monkeypatch, played):
    for config in ({"kv_block_size": 4}, {"max_running": 3}, {"kv_block_size": 4, "max_running": 2}):
        engine = build_engine(build_model(), **config)
        options = {"do_sample": True, "top_k": 0, "num_return_sequences": 3}
        expected = roll_out(monkeypatch, engine, FOREVER, **options)
        actual = roll_out(monkeypatch, engine, 2, **options)
        assert torch.equal(actual[0], expected[0])
    assert played[0] > 20


def test_after_a_training_step_tapes_read_the_new_weights(monkeypatch, played):
    engine = build_engine(build_model())
    before = roll_out(monkeypatch, engine, 1)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = roll_out(monkeypatch, engine, 1)
    assert not torch.equal(after[1], before[1])
    expected = roll_out(monkeypatch, engine, FOREVER)
    assert torch.equal(after[0], expected[0])
    torch.testing.assert_close(after[1], expected[1], atol=1e-6, rtol=0)


def test_a_switch_turns_tapes_off(monkeypatch, played):
    engine = build_engine(build_model(), enable_cuda_graph=False)
    roll_out(monkeypatch, engine, 1)
    assert played == [0]


def test_a_model_whose_steps_the_host_reads_has_no_tapes(monkeypatch, played):
    engine = build_engine(build_model("mixtral"))
    roll_out(monkeypatch, engine, 1)
    assert played == [0]


def forward(tapes, inputs, weight, between=lambda hidden: hidden):
    """A product between two additions; `inputs` stays where it is."""

    def run():
        return between(inputs + 1.0) @ weight + cpu_kernels.first_largest(inputs)[:, None]

    return tapes.play("kind", run, run)


def test_a_tape_reads_its_inputs_anew_and_keeps_what_lies_between(monkeypatch, played):
    monkeypatch.setattr(recorders, "NOTED_AT", 2)
    tapes, inputs, weight = StepTapes(0), torch.zeros(3, 8), torch.randn(8, 4)
    for step in range(6):
        inputs.copy_(torch.randn(3, 8))
        expected = (inputs + 1.0) @ weight + inputs.argmax(1, keepdim=True)
        torch.testing.assert_close(forward(tapes, inputs, weight), expected)
        torch.full((64, 64), float("nan"))  # takes memory that a tape gave back
        assert played == [max(0, step - 1)]


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * x.tolist()[0][0],
        lambda x: x * float(x.numpy().max()),
        lambda x: x if bool(x.sum() > 0) else -x,
        lambda x: x[x.sum(1).nonzero().squeeze(1)],
    ],
    ids=["item", "tolist", "numpy", "bool", "nonzero"],
)
def test_what_hands_values_to_the_host_is_never_played(monkeypatch, played, between):
    monkeypatch.setattr(recorders, "NOTED_AT", 1)
    tapes, inputs, weight = StepTapes(0), torch.zeros(3, 8), torch.randn(8, 4)
    for _ in range(3):
        inputs.copy_(torch.randn(3, 8))
        expected = between(inputs + 1.0) @ weight + inputs.argmax(1, keepdim=True)
        torch.testing.assert_close(forward(tapes, inputs, weight, between), expected)
    assert played == [0]


def test_a_step_without_compiled_attention_or_with_much_memory_runs_as_it_comes(monkeypatch, played):
    monkeypatch.setattr(recorders, "NOTED_AT", 1)
    inputs, weight = torch.randn(3, 8), torch.randn(8, 4)
    tapes = StepTapes(1)
    assert torch.equal(forward(tapes, inputs, weight), forward(tapes, inputs, weight))
    monkeypatch.setattr(recorders, "MAX_BYTES", 100)
    tapes = StepTapes(0)
    assert torch.equal(forward(tapes, inputs, weight), forward(tapes, inputs, weight))
    assert played == [0]


def test_who_watches_operators_sees_them(monkeypatch, played):
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(recorders, "NOTED_AT", 1)
    tapes, inputs, weight, seen = StepTapes(0), torch.randn(3, 8), torch.randn(8, 4), []
    for _ in range(2):
        with Names():
            tapes.play("kind", lambda: inputs @ weight, lambda: inputs @ weight)
    assert seen == ["mm", "mm"] and played == [0]


def test_an_error_while_a_step_is_noted_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(recorders, "NOTED_AT", 1)
    tapes, inputs, weight = StepTapes(0), torch.randn(3, 8), torch.randn(8, 4)
    with pytest.raises(ZeroDivisionError):
        forward(tapes, inputs, weight, lambda x: x / (1 // 0))
    assert torch._C._len_torch_dispatch_stack() == 0 and cpu_kernels._noting.note is None
    torch.testing.assert_close(forward(tapes, inputs, weight), (inputs + 1.0) @ weight + inputs.argmax(1, keepdim=True))
