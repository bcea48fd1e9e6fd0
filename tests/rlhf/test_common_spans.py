"""Common spans of two tokenizers: their probabilities, and the distance at their ends against TRL's ULD loss."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.experimental.gold import GOLDConfig
from trl.experimental.gold.gold_trainer import ULDLoss

from hybrid_engine.recipes import distill
from hybrid_engine.rlhf.batches.head_log_probs import SpanLogProbs, SpanTokens
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.sequences import build_sequences, response_divergences
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.common_spans import CommonSpan, OtherTokensTeacher, common_spans
from hybrid_engine.rlhf.experience.teachers import StepAnswers, TeacherPrompts
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.rewards.scores import Answers
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import build_small_llama

ROWS = [PromptRow(prompt="12+12="), PromptRow(prompt="7+12=")]
ANSWERS = ["2+2=4,1+1=2;24", "7+2=9;120"]
IS_ENDED = [True, False]


def pairs_tokenizer():
    """A tokenizer with tokens of two characters, in bytes."""
    letters = [*arithmetic.ALPHABET, *"tex"]  # recipes try a tokenizer on "text"
    merges = [("1", "2"), ("2", "4"), (";", "2"), ("=", "4"), ("+", "1")]
    names = ["<pad>", "<eos>", *letters, *("".join(pair) for pair in merges)]
    bytes_of_text = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges))
    bytes_of_text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_of_text.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_of_text, pad_token="<pad>", eos_token="<eos>")


def spans_of(own, theirs):
    return common_spans([piece.encode() for piece in own], [piece.encode() for piece in theirs])


@pytest.mark.quick
def test_spans_end_where_both_texts_have_a_token_that_ends():
    found = spans_of(["12", "+3", "0", "="], ["1", "2", "+", "30", "="])
    assert found == [
        CommonSpan(range(1), range(2)),
        CommonSpan(range(1, 3), range(2, 4)),
        CommonSpan(range(3, 4), range(4, 5)),
    ]
    assert spans_of(["ab", "cd"], ["ab", "ce"]) == [CommonSpan(range(1), range(1))]
    assert spans_of(["a", "", "b"], ["a", "b"]) == [
        CommonSpan(range(1), range(1)),
        CommonSpan(range(1, 3), range(1, 2)),
    ]
    assert spans_of(["", "a"], ["a"]) == [CommonSpan(range(2), range(1))]
    assert spans_of(["ab"], ["b"]) == spans_of([], ["a"]) == []
    assert spans_of(["é"], ["\u00e9"]) == [CommonSpan(range(1), range(1))]


@pytest.mark.quick
def test_spans_are_those_of_trl():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        cuts = [sorted({0, 12, *torch.randint(1, 12, (5,), generator=generator).tolist()}) for _ in range(2)]
        sides = [[*pairwise(ends)] for ends in cuts]
        groups = ULDLoss._align_by_byte_offsets(*sides)
        found = common_spans(*([b"x" * (last - first) for first, last in side] for side in sides))
        assert [[list(span.own) for span in found], [list(span.theirs) for span in found]] == list(groups)


@pytest.fixture(scope="module")
def models_and_tokenizers():
    tokenizers = arithmetic.build_tokenizer(), pairs_tokenizer()
    made = []
    for seed, tokenizer in enumerate(tokenizers):
        torch.manual_seed(seed)
        model = build_small_llama(tokenizer, hidden_size=64, num_layers=1)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20)
        made.append(model.eval())
    return made, tokenizers


def step_of(tokenizer):
    prompts = [tokenizer(row.prompt)["input_ids"] for row in ROWS]
    ids = [tokenizer(text)["input_ids"] + [1] * ended for text, ended in zip(ANSWERS, IS_ENDED, strict=True)]
    answers = Answers(
        prompts=[row.prompt for row in ROWS],
        responses=ANSWERS,
        prompt_ids=prompts,
        response_ids=ids,
        is_cut_off=[not ended for ended in IS_ENDED],
    )
    return StepAnswers(build_sequences(prompts, ids, 0, torch.device("cpu")).numbered(), answers, [0, 1], None)


def offsets(tokens, tokenizer):
    """Byte offsets of each token; a byte for the end."""
    found, end = [], 0
    for token in tokens:
        size = 1 if token == 1 else len(tokenizer.decode([token]))
        found.append((end, end + size))
        end += size
    return found


def trl_loss(row, made, tokenizers):
    """TRL's loss of an answer, without cross-entropy, and the number of its spans."""
    sides = []
    for model, tokenizer in zip(made, tokenizers, strict=True):
        prompt = tokenizer(ROWS[row].prompt)["input_ids"]
        ids = tokenizer(ANSWERS[row])["input_ids"] + [1] * IS_ENDED[row]
        tokens = torch.tensor([prompt + ids])
        labels = torch.tensor([[-100] * len(prompt) + ids])
        spans = torch.tensor([[(0, 0)] * len(prompt) + offsets(ids, tokenizer)])
        sides.append((model(tokens).logits, labels, tokens, spans))
    config = GOLDConfig(
        output_dir="unused", report_to="none", use_uld_loss=True, teacher_tokenizer_name_or_path="unused",
        uld_crossentropy_weight=0.0, uld_distillation_weight=1.0, uld_use_hybrid_loss=False, use_extended_uld=True,
        uld_token_merge_strategy="bayesian", uld_skip_student_eos=False, uld_skip_teacher_eos=False, use_cpu=True,
        bf16=False,
    )  # fmt: skip
    (own, theirs), loss = sides, ULDLoss(config)
    value = loss(own[0], theirs[0].detach(), own[1], theirs[1], own[2], theirs[2], own[3], theirs[3])
    num_spans = len(loss._align_by_byte_offsets(*(side[3][0][side[1][0] != -100].tolist() for side in sides))[0])
    return value * num_spans


@pytest.mark.parametrize("budget", [0, 100])
def test_distances_and_gradients_are_those_of_trl(models_and_tokenizers, budget):
    made, tokenizers = models_and_tokenizers
    student, teacher = made
    parameters = list(student.parameters())
    expected = [trl_loss(row, made, tokenizers) for row in range(2)]
    gradients = torch.autograd.grad(sum(expected), parameters)
    for model in made:
        pack_where_exact(model, TrainingOptions(tokens_per_micro_batch=budget))
    prompts = TeacherPrompts("{prompt}", ROWS, tokenizers[1])
    told = OtherTokensTeacher(teacher, 1.0, tokenizers, prompts, None, sorts=True)
    step = step_of(tokenizers[0])
    told.begin_step(step)
    part = step.sequences.rows(torch.tensor([1, 0]))
    (taught,) = told.read(part)
    assert len(taught.statement.own.earlier) > 0, "some spans have several tokens of the student"
    found = response_divergences(student, [taught], part, 1.0, 0.5)
    torch.testing.assert_close(found.sum(1), torch.stack(expected[::-1]), atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), parameters), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def span_logprobs(row, made, tokenizers):
    """Log-probabilities of each span of an answer by both models, `[S]` fp64, from logits token by token."""
    sides = []
    for model, tokenizer in zip(made, tokenizers, strict=True):
        prompt = tokenizer(ROWS[row].prompt)["input_ids"]
        ids = tokenizer(ANSWERS[row])["input_ids"] + [1] * IS_ENDED[row]
        logprobs = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        sums = logprobs.gather(1, torch.tensor(ids)[:, None]).squeeze(1).cumsum(0)
        sides.append({end: total for (_, end), total in zip(offsets(ids, tokenizer), sums, strict=True)})
    ends = sorted(sides[0].keys() & sides[1].keys())  # sums of log-probabilities up to a common end
    return [torch.stack([side[end] for end in ends]).diff(prepend=torch.zeros(1).double()) for side in sides]


def jensen_shannon(logprobs, beta):
    """Of the text of each span and all others, by the definition."""
    q, p = logprobs[0].exp(), logprobs[1].exp().detach()
    found = torch.zeros_like(q)
    for own, theirs in ((q, p), (1 - q, 1 - p)):
        mixture = beta * theirs + (1 - beta) * own
        found = found + beta * theirs * (theirs / mixture).log() + (1 - beta) * own * (own / mixture).log()
    return found


@pytest.mark.parametrize("budget", [0, 100])
def test_probabilities_of_spans_and_gradients_are_those_of_whole_logits(models_and_tokenizers, budget):
    made, tokenizers = models_and_tokenizers
    parameters = list(made[0].parameters())
    expected = torch.stack([jensen_shannon(span_logprobs(row, made, tokenizers), 0.3).sum() for row in range(2)])
    gradients = torch.autograd.grad(expected.sum(), parameters)
    for model in made:
        pack_where_exact(model, TrainingOptions(tokens_per_micro_batch=budget))
    prompts = TeacherPrompts("{prompt}", ROWS, tokenizers[1])
    told = OtherTokensTeacher(made[1], 1.0, tokenizers, prompts, None)
    step = step_of(tokenizers[0])
    told.begin_step(step)
    part = step.sequences.rows(torch.tensor([1, 0]))
    (taught,) = told.read(part)
    found = response_divergences(made[0], [taught], part, 1.0, 0.3)
    torch.testing.assert_close(found.sum(1).double(), expected.flip(0), atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), parameters), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_spans_that_one_side_or_both_are_sure_of_have_finite_gradients():
    student = torch.tensor([0.0, 0.0, -1e-9, -200.0, -200.0], requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    told = SpanLogProbs(torch.tensor([0.0, -300.0, -1e-9, 0.0, -300.0]), SpanTokens(torch.arange(5), none, none, none))
    found = told.divergence(student, 0.5)
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]) * math.log(2), atol=1e-5, rtol=0)
    found.sum().backward()
    assert torch.isfinite(student.grad).all() and student.grad[1] > 0


def test_the_same_tokens_give_the_distance_at_every_token(models_and_tokenizers):
    _, (tokenizer, _) = models_and_tokenizers
    torch.manual_seed(5)
    other = build_small_llama(tokenizer, hidden_size=64, num_layers=1)
    step = step_of(tokenizer)
    told = OtherTokensTeacher(other, 1.0, (tokenizer, tokenizer), TeacherPrompts("{prompt}", ROWS, tokenizer), 12)
    told.begin_step(step)
    (taught,) = told.read(step.sequences)
    counts = [min(12 - len(step.answers.prompt_ids[row]), len(step.answers.response_ids[row])) for row in range(2)]
    assert len(taught.tokens) == sum(counts), "a longer answer loses its end"


@pytest.mark.parametrize(("divergence", "most"), [("span-jsd", 0.7), ("uld", 2)])
def test_a_run_learns_from_a_teacher_with_other_tokens_and_other_divergences_refuse_it(
    models_and_tokenizers, tmp_path, divergence, most
):
    for name, model, tokenizer in zip(("student", "teacher"), *models_and_tokenizers, strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    rows = ({"prompt": f"{n}+{n}=", "completion": f"{n}+{n};{2 * n}"} for n in range(80))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = distill.Config(
        model=str(tmp_path / "student"), teacher=str(tmp_path / "teacher"), divergence=divergence, reward=("regex:1",),
        dataset=str(tmp_path / "sums.jsonl"), on_policy_share=0.0, out=str(tmp_path / "run"), steps=2, rollout_size=16,
        minibatch_size=8, max_new_tokens=8, learning_rate=3e-3, eval_every=2, eval_prompts=2,
        eval_samples=1, save_every=0,
    )  # fmt: skip
    distill.run(config)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 2 and all(0 < line["divergence"] <= most and line["grad_norm"] > 0 for line in lines)
    assert not any("agreement" in line for line in lines)  # there are no tokens to compare
    with pytest.raises(ValueError, match=r"a divergence needs one vocabulary, .*--divergence span-jsd"):
        distill.run(replace(config, divergence="reverse-kl", out=str(tmp_path / "refused")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher_top_k": 4}, "--teacher-top-k=4 has no effect with --divergence uld"),
        ({"divergence": "span-jsd", "teacher_top_k": 4}, "has no effect with --divergence span-jsd"),
        ({"teacher_offload": True}, "--teacher-offload does not exist for --divergence uld"),
        ({"teacher_sharded": True}, "--teacher-sharded does not exist for --divergence uld"),
        ({"teacher": "self", "teacher_prompt": "{answer}{prompt}"}, "--divergence uld is for teachers that are models"),
    ],
)
def test_options_that_do_not_go_with_other_tokens_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        distill.Config(**{"teacher": "t", "divergence": "uld"} | options)
