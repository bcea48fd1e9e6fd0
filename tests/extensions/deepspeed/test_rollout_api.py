"""DeepSpeed's rollout API: what comes out is what transformers generates, cut at the end-of-sequence token."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import hybrid_engine as deepspeed
from hybrid_engine.runtime.rollout import (
    HybridEngineRollout,
    RolloutBatch,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)
from hybrid_engine.runtime.rollout.hybrid_engine_rollout import HybridEngineRolloutConfig
from tests.support.models import PAD, VOCAB, build_model, padded_prompts
from tests.support.paths import DOCS

pytestmark = pytest.mark.quick

EOS = 11
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)
GREEDY = SamplingConfig(max_new_tokens=12, temperature=0)


def build_engine(**options):
    config = {
        "train_batch_size": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": {"enabled": True, "max_running": 2},
    }
    return deepspeed.initialize(model=build_model(), config=config | options)[0]


@pytest.fixture
def engine():
    return build_engine().eval()


@pytest.fixture
def rollout(engine):
    return build_rollout(RolloutConfig(), student_engine=engine, tokenizer=TOKENIZER)


def request():
    return RolloutRequest(*padded_prompts())


def expected_mask(batch, prompt_mask, num_samples=1):
    """Token by token: 1 in the answer up to the first end-of-sequence token."""
    width = prompt_mask.shape[1]
    rows = []
    for row, tokens in enumerate(batch.input_ids[:, width:].tolist()):
        length = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
        answer = [1] * length + [0] * (len(tokens) - length)
        rows.append(prompt_mask[row // num_samples].tolist() + answer)
    return rows


def test_greedy_rollouts_are_what_the_model_generates_itself(rollout):
    input_ids, mask = padded_prompts()
    own = build_model().generate(
        input_ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=EOS, pad_token_id=PAD
    )
    batch = rollout.generate(request(), GREEDY)
    assert torch.equal(batch.input_ids, own)
    assert batch.attention_mask.tolist() == expected_mask(batch, mask)
    assert batch.response_start_idx.tolist() == [9] * 6
    assert (batch.batch_size, batch.seq_len) == tuple(own.shape)
    assert batch.attention_mask.dtype == batch.response_start_idx.dtype == torch.int64


@pytest.mark.parametrize("pad", [PAD, EOS, None], ids=["pad", "pad is eos", "no pad"])
def test_the_end_token_ends_a_row_and_what_follows_is_masked(engine, pad):
    _, mask = padded_prompts()
    rollout = HybridEngineRollout(engine, SimpleNamespace(pad_token_id=pad, eos_token_id=EOS))
    sampling = SamplingConfig(max_new_tokens=40, n_samples_per_prompt=4)
    torch.manual_seed(0)
    engine.eval()
    batch = rollout.generate(request(), sampling)
    answers, answer_mask = batch.input_ids[:, 9:], batch.attention_mask[:, 9:]
    assert batch.attention_mask.tolist() == expected_mask(batch, mask, num_samples=4)
    num_ended = int((answer_mask.sum(1) < answers.shape[1]).sum())
    assert 0 < num_ended < 24, "some rows end, others do not"
    assert (answers[answer_mask == 0] == (EOS if pad is None else pad)).all()
    # Nobody decodes for a row that has ended.
    assert engine.latency_stats()["generated_tokens"] == int(answer_mask.sum())


def test_without_an_end_token_every_row_is_as_long_as_asked(engine):
    rollout = HybridEngineRollout(engine, SimpleNamespace(pad_token_id=PAD, eos_token_id=None))
    batch = rollout.generate(request(), GREEDY)
    assert batch.input_ids.shape == (6, 21) and batch.attention_mask[:, 9:].all()


def test_sampling_options_are_those_of_generate(rollout, engine):
    input_ids, mask = padded_prompts()
    sampling = SamplingConfig(max_new_tokens=7, temperature=1.3, top_p=0.8, top_k=20, n_samples_per_prompt=3)
    torch.manual_seed(4)
    batch = rollout.generate(request(), sampling)
    torch.manual_seed(4)
    same = engine.generate(
        input_ids, attention_mask=mask, do_sample=True, max_new_tokens=7, temperature=1.3, top_p=0.8, top_k=20,
        num_return_sequences=3, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    assert torch.equal(batch.input_ids, same)
    assert torch.equal(batch.input_ids[:, :9], input_ids.repeat_interleave(3, dim=0))


def test_top_k_filters_and_minus_one_draws_from_the_whole_vocabulary(rollout):
    prompt = RolloutRequest(*padded_prompts(num_prompts=1))
    likeliest = rollout.generate(prompt, SamplingConfig(max_new_tokens=5, temperature=0)).input_ids

    def num_distinct(top_k):
        sampling = SamplingConfig(max_new_tokens=1, temperature=50.0, top_k=top_k, n_samples_per_prompt=2000)
        return len(rollout.generate(prompt, sampling).input_ids[:, -1].unique())

    one = rollout.generate(prompt, SamplingConfig(max_new_tokens=5, top_k=1)).input_ids
    assert torch.equal(one, likeliest)
    assert [num_distinct(3), num_distinct(-1), num_distinct(0)] == [3, VOCAB, VOCAB]


def test_samples_at_temperature_zero_are_equal(rollout):
    one = rollout.generate(request(), GREEDY)
    three = rollout.generate(request(), SamplingConfig(max_new_tokens=12, temperature=0, n_samples_per_prompt=3))
    assert torch.equal(three.input_ids, one.input_ids.repeat_interleave(3, dim=0))
    assert torch.equal(three.attention_mask, one.attention_mask.repeat_interleave(3, dim=0))


def test_an_engine_that_trains_goes_on_training_and_the_next_rollout_sees_the_step():
    engine = build_engine()
    rollout = build_rollout(RolloutConfig(), engine, TOKENIZER)
    engine.train()
    before = rollout.generate(request(), GREEDY)
    assert engine.module.training
    rollout.sync_weights(step=0)
    engine.backward(engine(input_ids=before.input_ids, attention_mask=before.attention_mask).logits.square().mean())
    engine.step()
    after = rollout.generate(request(), GREEDY)
    input_ids, mask = padded_prompts()
    engine.eval()
    own = type(engine.module).generate(
        engine.module, input_ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=EOS,
        pad_token_id=PAD,
    )  # fmt: skip
    assert torch.equal(after.input_ids, own)
    assert after.input_ids.tolist() != before.input_ids.tolist()
    engine.train()
    too_long = SamplingConfig(max_new_tokens=10_000)
    with pytest.raises(ValueError, match="more than the model's max_position_embeddings"):
        rollout.generate(request(), too_long)
    assert engine.module.training
    rollout.shutdown()
    assert engine.generator.workspace.allocated_bytes == 0


def answer_divergences(student, teacher, batch):
    """`[answer tokens]`: KL of the student from the teacher, of their logits for the rows of a RolloutBatch."""
    is_answer = torch.arange(batch.seq_len) >= batch.response_start_idx[:, None]
    is_learned = (is_answer & batch.attention_mask.bool())[:, 1:]
    theirs, ours = teacher.log_softmax(-1)[:, :-1], student.log_softmax(-1)[:, :-1]
    return (theirs.exp() * (theirs - ours)).sum(-1)[is_learned]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_student_learns_from_a_frozen_teacher_by_the_calls_of_deepspeeds_distillation_trainer(stage, tmp_path):
    """`deepspeed/runtime/rlhf`: the calls of OPSDTrainer in their order, and TeacherWrapper's engine."""
    student = build_engine(zero_optimization={"stage": stage})
    teacher_config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    teacher, *_ = deepspeed.initialize(model=build_model(seed=1).requires_grad_(False), config=teacher_config)
    rollout = build_rollout(RolloutConfig(), student_engine=student, tokenizer=TOKENIZER, student_model_path="unused")
    sampling = SamplingConfig(max_new_tokens=6, temperature=1.0, top_p=1.0, top_k=-1, n_samples_per_prompt=1)
    torch.manual_seed(0)
    losses = []
    for step in range(6):
        rollout.sync_weights(step)
        student.eval()
        batch = rollout.generate(request(), sampling)
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        with torch.no_grad():
            taught = teacher(**inputs).logits
        student.train()
        loss = answer_divergences(student(**inputs).logits, taught, batch).mean()
        if step == 0:
            with torch.no_grad():
                plain = [build_model(seed=seed).double()(**inputs).logits for seed in (0, 1)]
            expected = answer_divergences(*plain, batch).mean()
            torch.testing.assert_close(loss.double(), expected, atol=1e-4, rtol=1e-4)
        student.backward(loss)
        student.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    student.save_checkpoint(str(tmp_path), tag="step_6")
    assert (tmp_path / "latest").read_text() == "step_6"


def test_an_evaluating_engine_goes_on_evaluating(rollout, engine):
    rollout.generate(request(), GREEDY)
    assert not engine.module.training


def test_the_mask_of_prompts_is_the_callers_whatever_their_tokens(rollout):
    """A prompt may hold the padding id as a token, and masks may be of any kind of number."""
    input_ids = torch.tensor([[PAD, PAD, 5], [PAD, 7, 9]])
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    batch = rollout.generate(RolloutRequest(input_ids, mask), GREEDY)
    own = build_model().generate(
        input_ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=12, eos_token_id=EOS, pad_token_id=PAD
    )
    assert torch.equal(batch.input_ids, own)
    assert batch.attention_mask[:, :3].tolist() == [[0, 1, 1], [0, 1, 1]]


def test_scripts_derive_their_config_and_assign_to_it(engine):
    @dataclass
    class Mine(RolloutConfig):
        max_response_length: int = 1024

    config = Mine()
    config.max_response_length = 12
    rollout = build_rollout(config, student_engine=engine, tokenizer=TOKENIZER, student_model_path="a/model")
    assert isinstance(rollout, RolloutEngine) and rollout.name == "hybrid_engine"
    sampling = SamplingConfig(config.max_response_length)
    sampling.temperature = 0
    assert rollout.generate(request(), sampling).seq_len == 21


def test_options_that_only_shape_the_work_change_no_token(engine):
    busy = HybridEngineRolloutConfig(
        use_graph_capture=True, use_shared_prefill=True, align_decode_fronts=True, enable_cache_trimming=True,
        continuous_cache_capacity=16, adaptive_prefill=True, prefill_max_tokens=None, prefill_fixed_cost_ms=1.0,
    )  # fmt: skip
    plain = HybridEngineRollout(engine, TOKENIZER).generate(request(), GREEDY)
    sampling = SamplingConfig(max_new_tokens=12, temperature=0, continuous_batch_size=2)
    assert torch.equal(
        HybridEngineRollout(engine, TOKENIZER, busy).generate(request(), sampling).input_ids, plain.input_ids
    )


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: RolloutRequest(torch.ones(3), torch.ones(3)), r"prompt_ids has shape \[3\]"),
        (lambda: RolloutRequest(torch.ones(2, 3), torch.ones(2, 4)), r"prompt_attention_mask has shape \[2, 4\]"),
        (lambda: RolloutRequest(torch.ones(2, 3), torch.tensor([[1, 1, 1], [1, 1, 0]])), "rows .1.*padding_side=.left"),
        (lambda: RolloutRequest(torch.ones(2, 3), torch.tensor([[0, 0, 0], [1, 1, 1]])), r"no token in rows \[0\]"),
        (lambda: RolloutBatch(torch.ones(3), torch.ones(3), torch.ones(3)), r"input_ids has shape \[3\]"),
        (lambda: RolloutBatch(torch.ones(2, 3), torch.ones(2, 2), torch.ones(2)), "attention_mask has shape"),
        (lambda: RolloutBatch(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)), "response_start_idx has shape"),
        (lambda: SamplingConfig(0), "max_new_tokens=0"),
        (lambda: SamplingConfig(4, temperature=-0.1), "temperature=-0.1"),
        (lambda: SamplingConfig(4, top_p=1.5), "top_p=1.5"),
        (lambda: SamplingConfig(4, top_k=-2), "top_k=-2"),
        (lambda: SamplingConfig(4, n_samples_per_prompt=0), "n_samples_per_prompt=0"),
        (lambda: SamplingConfig(4, continuous_batch_size=0), "continuous_batch_size=0"),
        (lambda: HybridEngineRolloutConfig(enable_profiling=True), r"enable_profiling=True.*latency_stats\(\)"),
        (lambda: build_rollout(RolloutConfig("vllm"), object(), TOKENIZER), "'vllm' is not one of hybrid_engine"),
        (lambda: build_rollout(RolloutConfig(), tokenizer=TOKENIZER), "needs both student_engine and tokenizer"),
        (lambda: build_rollout(RolloutConfig(), build_engine(hybrid_engine={}), TOKENIZER), "hybrid_engine.enabled"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_when_it_is_built(build, told):
    with pytest.raises(ValueError, match=told):
        build()


def test_a_tokenizer_without_any_of_the_two_ids_is_refused(engine):
    rollout = HybridEngineRollout(engine, SimpleNamespace(pad_token_id=None, eos_token_id=None))
    with pytest.raises(ValueError, match=r"set tokenizer\.pad_token"):
        rollout.generate(request(), GREEDY)


def test_other_engines_plug_into_the_interface():
    class Echo(RolloutEngine):
        def generate(self, request, sampling):
            start = torch.full((len(request.prompt_ids),), request.prompt_ids.shape[1])
            return RolloutBatch(request.prompt_ids, request.prompt_attention_mask, start)

        def sync_weights(self, step):
            pass

    assert Echo().generate(request(), GREEDY).seq_len == 9
    with pytest.raises(TypeError, match="abstract"):
        RolloutEngine()


def test_the_example_of_the_documentation_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "rollout.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(example, "rollout.md", "exec"), names)
    assert names["batch"].batch_size == 8 and names["engine"].global_steps == 1
    assert names["request"].prompt_attention_mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
