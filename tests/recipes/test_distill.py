"""On-policy distillation end to end with tiny models: the loss on whole logits, packing, going on, two processes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDTrainer

import hybrid_engine
from hybrid_engine.cli import cli
from hybrid_engine.ops.linear_divergence import TopTokens, divergence, top_tokens
from hybrid_engine.ops.linear_log_prob import LogitShape
from hybrid_engine.recipes import distill
from hybrid_engine.rlhf.batches.head_log_probs import StatesOfSameHead, Taught, WholeLogProbs
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.packing import Layout, set_layout
from hybrid_engine.rlhf.batches.sequences import build_sequences, response_comparison, response_divergences
from hybrid_engine.rlhf.data.encoding import encode_completion
from hybrid_engine.rlhf.data.rows import CompletionRow, PromptRow
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, given_answers
from hybrid_engine.rlhf.experience.teachers import ModelTeacher
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.reports import build_page, read_run
from hybrid_engine.rlhf.runs.run_folder import read_metrics, read_teacher_figures
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import build_small_llama
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after
from tests.support.small_actors import save_small_actor, save_sums

SIZES = {
    "steps": 4, "rollout_size": 8, "minibatch_size": 8, "micro_batch_size": 4, "max_new_tokens": 6, "eval_samples": 1,
    "learning_rate": 3e-3, "eval_every": 2, "eval_prompts": 4, "save_every": 0,
}  # fmt: skip
SAME = ("agreement", "teacher_entropy", "on_policy", "score", "length", "divergence", "grad_norm", "held_out_score")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A student and a teacher that has other weights, and sums."""
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = arithmetic.build_tokenizer()
    student = save_small_actor(folder / "student", tokenizer)
    torch.manual_seed(1)
    teacher = build_small_llama(tokenizer, hidden_size=128, num_layers=2)
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(8)  # sure of its tokens
    teacher.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    return {"model": student, "teacher": str(folder / "teacher"), "dataset": save_sums(folder)}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Sums with their answers."""
    path = tmp_path_factory.mktemp("answered") / "answered.jsonl"
    rows = ({"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(80))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tiny(sources, tmp_path):
    return distill.Config(**SIZES, **sources, reward=("regex:^[0-4]",), out=str(tmp_path / "run"))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(("kind", "top"), [("forward-kl", 0), ("reverse-kl", 0), ("jsd", 0), ("reverse-kl", 4)])
def test_a_run_comes_nearer_to_its_teacher(tiny, tmp_path, kind, top):
    config = replace(tiny, divergence=kind, steps=12, learning_rate=1e-2, eval_every=0, rollout_size=16)
    config = replace(config, teacher_top_k=top)
    distill.run(replace(config, minibatch_size=8))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 12 and lines[-1]["divergence"] < 0.7 * lines[0]["divergence"]
    assert {"score", "reward_regex", "length", "grad_norm", "learning_rate", "generate_seconds"} <= lines[0].keys()
    assert load(tmp_path / "run" / "actor").config.hidden_size == 64


def divergences_of(student, teacher, batch, beta, temperatures=(1.0, 1.0), num_top=0):
    own, taught = temperatures
    stated = ModelTeacher(model=teacher, temperature=taught).read(batch)
    return response_divergences(student, stated, batch, own, beta, num_top)


def batch_of(pad=0):
    prompts, responses = [[5, 6, 7], [8, 9], [5], [6, 7]], [[10, 11, 12, 4], [6, 4], [9, 9, 9], [4]]
    return build_sequences(prompts, responses, pad, torch.device("cpu"))


@pytest.mark.parametrize("layouts", [*((layout,) * 2 for layout in Layout), (Layout.SPANS, Layout.PADDED)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergences_are_those_of_whole_logits_in_every_layout(sources, layouts, beta):
    student, teacher = load(sources["model"]), load(sources["teacher"]).requires_grad_(False)
    batch = batch_of()
    width = batch.response_mask.shape[1]
    logits = [
        model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids).logits
        for model in (student, teacher)
    ]
    logprobs = [(x[:, -width - 1 : -1] / t).log_softmax(-1) for x, t in zip(logits, (0.8, 1.2), strict=True)]
    expected = torch.where(batch.response_mask, divergence(*logprobs, beta), 0.0)
    gradients = torch.autograd.grad(expected.sum(), list(student.parameters()))
    for model, layout in zip((student, teacher), layouts, strict=True):
        pack_where_exact(model, TrainingOptions(tokens_per_micro_batch=600))
        set_layout(model, layout)
    found = divergences_of(student, teacher, batch, beta, (0.8, 1.2))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), list(student.parameters())), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_loss_and_gradients_are_those_of_trls_trainer_on_the_same_batch(sources, beta):
    student, teacher = load(sources["model"]), load(sources["teacher"])
    batch = batch_of()
    divergence = ("forward-kl", "jsd", "reverse-kl")[round(2 * beta)]
    config = distill.Config(**sources, divergence=divergence)
    stated = ModelTeacher(model=teacher, temperature=1.0)
    num_tokens = int(batch.response_mask.sum())
    losses = [
        distill.micro_batch_loss(student, stated, batch, config, num_tokens, rows)[0] for rows in ([0, 3], [1, 2])
    ]
    gradients = torch.autograd.grad(sum(losses), list(student.parameters()))

    learned = pad(batch.response_mask, (batch.input_ids.shape[1] - batch.response_mask.shape[1], 0))
    order = batch.attention_mask.argsort(dim=1, descending=True, stable=True)  # TRL's rows are padded on the right
    inputs = {
        "input_ids": batch.input_ids.gather(1, order),
        "attention_mask": batch.attention_mask.gather(1, order),
        "labels": torch.where(learned, batch.input_ids, -100).gather(1, order),
    }
    trainer = SimpleNamespace(teacher_model=teacher, beta=beta, generalized_jsd_loss=GKDTrainer.generalized_jsd_loss)
    expected = GKDTrainer.compute_loss(trainer, student, inputs)
    torch.testing.assert_close(sum(losses), expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(student.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layouts", [(Layout.PADDED, Layout.PADDED), (Layout.SPANS, Layout.ROWS)])
def test_rows_may_have_several_teachers_with_weights_and_top_tokens(sources, layouts):
    """Two teachers on parts of the tokens, which overlap, give the weighted sum of what each gives alone."""
    student, teacher = load(sources["model"]), load(sources["teacher"])
    for model, layout in zip((student, teacher), layouts, strict=True):
        pack_where_exact(model, TrainingOptions(tokens_per_micro_batch=600))
        set_layout(model, layout)
    batch, cells = batch_of(), batch_of().response_mask
    (whole,) = ModelTeacher(model=teacher, temperature=1.0).read(batch)
    states = whole.statement
    first, second = torch.arange(6), torch.arange(4, len(states.hidden))
    top = top_tokens(states, 5)
    parts = [
        Taught(states._replace(hidden=states.hidden[first]), first, 0.25),
        Taught(TopTokens(*(column[second] for column in top)), second, 2.0),
    ]
    found = response_divergences(student, parts, batch, 1.0, 0.5)[cells]
    by_states, by_top = (response_divergences(student, [whole], batch, 1.0, 0.5, k)[cells] for k in (0, 5))
    expected = torch.zeros_like(found).index_add(0, first, 0.25 * by_states[first])
    torch.testing.assert_close(found, expected.index_add(0, second, 2.0 * by_top[second]))
    same_head = Taught(StatesOfSameHead(student_states(student, batch), LogitShape()))
    torch.testing.assert_close(
        response_divergences(student, [same_head], batch, 1.0, 0.5), torch.zeros(cells.shape), atol=1e-6, rtol=0
    )


def student_states(student, batch):
    return ModelTeacher(model=student, temperature=1.0).read(batch)[0].statement.hidden


@pytest.mark.parametrize("num_top", [0, 5])
def test_a_teacher_whose_logits_are_needed_gives_the_same_divergences(sources, num_top):
    student, teacher, batch = load(sources["model"]), load(sources["teacher"]), batch_of()
    (whole,) = ModelTeacher(model=teacher, temperature=1.3).read(batch)
    states = whole.statement
    logits = states.hidden @ states.weight.t()
    in_memory = Taught(WholeLogProbs((logits / 1.3).log_softmax(1)))
    found = response_divergences(student, [in_memory], batch, 1.0, 1.0, num_top)
    torch.testing.assert_close(found, response_divergences(student, [whole], batch, 1.0, 1.0, num_top))


@pytest.mark.parametrize("layouts", [(Layout.PADDED, Layout.PADDED), (Layout.SPANS, Layout.ROWS)])
def test_the_comparison_with_a_teacher_is_that_of_whole_logits(sources, layouts):
    student, teacher = load(sources["model"]), load(sources["teacher"])
    batch = batch_of()
    width, mask = batch.response_mask.shape[1], batch.response_mask
    logits = [
        model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids).logits
        for model in (student, teacher)
    ]
    own, theirs = (x[:, -width - 1 : -1].detach().log_softmax(-1) for x in logits)
    expected = {
        "divergence": divergence(own, theirs, 1.0),
        "top": own.argmax(-1).float(),
        "teacher_top": theirs.argmax(-1).float(),
        "entropy": -(own.exp() * own).sum(-1),
        "teacher_entropy": -(theirs.exp() * theirs).sum(-1),
    }
    for model, layout in zip((student, teacher), layouts, strict=True):
        pack_where_exact(model, TrainingOptions(tokens_per_micro_batch=600))
        set_layout(model, layout)
    whole = ModelTeacher(model=teacher, temperature=1.0).read(batch)
    in_memory = [Taught(WholeLogProbs(theirs[mask]))]
    in_ids = theirs[mask].topk(theirs.shape[2])
    as_tokens = [Taught(TopTokens(in_ids.indices, in_ids.values))]
    for stated in (whole, in_memory, as_tokens):
        found = response_comparison(student, stated, batch, 1.0, 1.0)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(found[name], torch.where(mask, values, 0.0), atol=1e-4, rtol=1e-4)


def test_a_run_says_where_it_and_its_teacher_differ(tiny, tmp_path):
    distill.run(replace(tiny, eval_every=2))
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    compared = read_teacher_figures(tmp_path / "run" / "teacher.jsonl")
    assert [entry["step"] for entry in compared] == [0, 1, 3]
    for entry in compared:
        line, positions = lines[entry["step"]], entry["positions"]
        num_tokens = sum(position["tokens"] for position in positions)
        assert num_tokens == pytest.approx(line["length"] * tiny.rollout_size)
        for name in ("agreement", "entropy", "teacher_entropy", "divergence"):
            mean = sum(position[name] * position["tokens"] for position in positions) / num_tokens
            assert mean == pytest.approx(line[name], rel=1e-4), name
        divergences = [token["divergence"] for token in entry["tokens"]]
        assert divergences == sorted(divergences, reverse=True) and divergences[0] >= line["divergence"]
        assert entry["tokens"][0]["before"].count("=") == 1
    page = build_page([read_run(str(tmp_path / "run"))], 4)
    assert '"teacher_top"' in page and "teacher-section" in page


def test_rows_of_a_batch_keep_their_numbers():
    batch = batch_of().numbered()
    chosen = batch.rows(torch.tensor([3, 1, 2])).rows(torch.tensor([2, 0]))
    assert chosen.numbers.tolist() == [2, 3]
    assert batch_of().rows(torch.tensor([1])).numbers is None


def test_heads_of_other_sizes_are_cut_to_the_common_tokens(sources):
    student, teacher = load(sources["model"]), load(sources["teacher"])
    batch = batch_of()
    expected = divergences_of(student, teacher, batch, 1.0)
    teacher.resize_token_embeddings(teacher.config.vocab_size + 64, mean_resizing=False)
    torch.testing.assert_close(divergences_of(student, teacher, batch, 1.0), expected)


def test_an_engine_in_exact_mode_has_its_divergences_from_logits(sources):
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW"},
        "hybrid_engine": {"enabled": True, "exact": True, "max_out_tokens": 16, "print_latency": False},
    }
    engine, *_ = hybrid_engine.initialize(model=load(sources["model"]), config=config)
    teacher, batch = load(sources["teacher"]), batch_of()
    expected = divergences_of(load(sources["model"]), teacher, batch, 0.5)
    torch.testing.assert_close(divergences_of(engine, teacher, batch, 0.5), expected)


def test_the_share_says_how_many_steps_learn_from_the_models_own_answers(tiny, answered, tmp_path):
    config = replace(tiny, dataset=answered, steps=8, eval_every=0, learning_rate=1e-2, rollout_size=16)
    for share in (0.0, 0.5, 1.0):
        distill.run(replace(config, on_policy_share=share, out=str(tmp_path / f"{share}")))
    lines = {share: read_metrics(tmp_path / f"{share}" / "metrics.jsonl") for share in (0.0, 0.5, 1.0)}
    drawn = {share: [line["on_policy"] for line in lines[share]] for share in lines}
    assert drawn[0.0] == [0.0] * 8 and drawn[1.0] == [1.0] * 8 and {*drawn[0.5]} == {0.0, 1.0}
    assert not any("generate_seconds" in line or "score" in line for line in lines[0.0])
    assert all(("generate_seconds" in line) == (line["on_policy"] == 1) for line in lines[0.5])
    assert lines[0.0][-1]["divergence"] < 0.8 * lines[0.0][0]["divergence"]
    assert all(2 <= line["length"] <= 4 for line in lines[0.0])  # digits of a sum, and the end of the sequence
    assert sum(distill.draw_on_policy(0.3, seed) for seed in range(2000)) == pytest.approx(600, abs=60)


def test_answers_of_the_data_set_become_the_tokens_that_sft_learns(tiny, answered):
    tokenizer = arithmetic.build_tokenizer()
    row = PromptRow(prompt="7+8=", columns={"completion": "15"})
    learned = encode_completion(tokenizer, CompletionRow(prompt="7+8=", completion="15"))
    actor = SimpleNamespace(module=load(tiny.model), device=torch.device("cpu"))
    for most, is_cut in ((8, False), (2, True)):
        options = AnswerSampling(max_prompt_tokens=3, max_new_tokens=most, temperature=1.0)
        answers, sequences = given_answers(actor, tokenizer, [row], options)
        assert answers.prompt_ids == [learned.prompt_ids[-3:]] and answers.is_cut_off == [is_cut]
        assert answers.response_ids == [learned.response_ids[:most]] and answers.responses == ["15"]
        assert sequences.input_ids.tolist() == [learned.prompt_ids[-3:] + learned.response_ids[:most]]
        assert sequences.response_mask.all()


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tiny, answered, tmp_path):
    tiny = replace(tiny, dataset=answered, on_policy_share=0.5, seed=1)
    whole, torn = (replace(tiny, save_every=1, out=str(tmp_path / name)) for name in ("whole", "torn"))
    distill.run(whole)
    with stopped_after(2):
        distill.run(torn)
    distill.run(replace(torn, resume=True))
    lines = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole")]
    assert {line["on_policy"] for part in (lines[1][:2], lines[1][2:]) for line in part} == {0.0, 1.0}
    for ours, theirs in zip(*lines, strict=True):
        assert all(ours.get(name) == theirs.get(name) for name in SAME)
    actors = [load(tmp_path / name / "actor") for name in ("torn", "whole")]
    assert all(map(torch.equal, *(actor.state_dict().values() for actor in actors)))


def test_packed_rows_are_learned_as_padded_ones_are(tiny, tmp_path):
    for name, budget in (("padded", 0), ("packed", 2048)):
        out = str(tmp_path / name)
        distill.run(replace(tiny, steps=2, eval_every=0, tokens_per_micro_batch=budget, out=out))
    padded, packed = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("padded", "packed"))
    for one, other in zip(padded, packed, strict=True):
        for name in ("divergence", "length", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name


def run_all(rank, world_size, configs):
    for config in configs:
        distill.run(config)


def test_two_processes_under_zero_1_to_3_learn_what_one_does_under_zero_0(tiny, tmp_path):
    config = replace(tiny, steps=2, eval_every=2)
    distill.run(config)
    stages = {f"zero{stage}": stage for stage in (1, 2, 3)}
    run_distributed(run_all, 2, [replace(config, out=str(tmp_path / n), zero_stage=stages[n]) for n in stages])
    expected = read_metrics(tmp_path / "run" / "metrics.jsonl")
    compared = read_teacher_figures(tmp_path / "run" / "teacher.jsonl")
    for folder in stages:
        for one, two in zip(expected, read_metrics(tmp_path / folder / "metrics.jsonl"), strict=True):
            for name in ("divergence", "length", "grad_norm", "agreement", "entropy", "teacher_entropy"):
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), (folder, name)
        for one, two in zip(compared, read_teacher_figures(tmp_path / folder / "teacher.jsonl"), strict=True):
            assert [line["tokens"] for line in two["positions"]] == [line["tokens"] for line in one["positions"]]
            assert [token["before"] for token in two["tokens"][:3]] == [token["before"] for token in one["tokens"][:3]]


def test_an_adapter_learns_and_the_plan_counts_the_teacher(tiny, tmp_path):
    options = "--lora-rank 2 --steps 2 --rollout-size 4 --minibatch-size 4 --eval-every 0 --eval-prompts 2"
    sources = f"--model {tiny.model} --teacher {tiny.teacher} --dataset {tiny.dataset} --reward regex:^[0-4]"
    command = f"distill {sources} {options} --max-new-tokens 4 --divergence jsd --beta 0.2 --out {tmp_path / 'lora'}"
    assert cli.main(command.split()) == 0
    memory = json.loads((tmp_path / "lora" / "result.json").read_text())["memory"]
    assert 0.85 <= memory["planned_for_lengths_bytes"] / memory["measured_bytes"] <= 1.3
    load(tmp_path / "lora" / "actor")
    assert cli.main(["plan", *command.split(), "--json"]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"divergence": "kl"}, "--divergence=kl must be one of"),
        ({"beta": 0.5}, "--beta=0.5 applies to --divergence jsd and span-jsd, not reverse-kl"),
        ({"divergence": "jsd", "beta": 0.0}, "--beta=0 is --divergence forward-kl"),
        ({"divergence": "jsd", "beta": 2.0}, "beta=2"),
        ({"teacher_temperature": 0.0}, "teacher.temperature=0"),
        ({"teacher_top_k": -1}, "teacher.top.k=-1"),
        ({"on_policy_share": 1.5}, "--on-policy-share=1.5 must be from 0 to 1"),
        ({"on_policy_share": 0.5}, "--on-policy-share=0.5 learns from a dataset's answers; give --dataset"),
        ({"on_policy_share": 0.0, "dataset": "d", "group_size": 2}, "--group-size=2 applies to the model's own"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        distill.Config(teacher="t", **options)


def test_answers_and_top_tokens_that_do_not_exist_are_refused_before_training(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"--dataset=.* has no column 'completion'"):
        distill.run(replace(tiny, on_policy_share=0.5))
    with pytest.raises(ValueError, match=r"--teacher-top-k=1000 must not exceed the \d+ tokens of --teacher="):
        distill.run(replace(tiny, teacher_top_k=1000))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_teacher_that_is_missing_or_has_other_tokens_is_refused_before_training(tiny, tmp_path):
    with pytest.raises(ValueError, match="--teacher is missing"):
        distill.run(replace(tiny, teacher=None))
    with pytest.raises(ValueError, match="--teacher="):
        distill.run(replace(tiny, teacher=str(tmp_path / "nothing")))
    tokenizer = arithmetic.build_tokenizer()
    tokenizer.add_tokens(["other"])
    other = save_small_actor(tmp_path / "other", tokenizer)
    with pytest.raises(ValueError, match="has other tokens than the actor"):
        distill.run(replace(tiny, teacher=other))
    short = load(tiny.teacher)
    short.config.max_position_embeddings = 8
    short.save_pretrained(tmp_path / "short")
    arithmetic.build_tokenizer().save_pretrained(tmp_path / "short")
    with pytest.raises(ValueError, match=r"more than the 8 positions of --teacher="):
        distill.run(replace(tiny, teacher=str(tmp_path / "short")))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_answers_of_the_teacher_are_what_sft_and_distill_learn_from(tiny, tmp_path):
    """The commands of docs/distillation.md: sequence-level distillation."""
    answers = tmp_path / "answers.jsonl"
    generate = f"generate --model {tiny.teacher} --prompts {tiny.dataset} --out {answers} --max-new-tokens 5"
    assert cli.main(generate.split()) == 0
    rows = f"--dataset {answers} --columns responses.0=completion --skip-bad-rows"
    given = f"{rows} --model {tiny.model} --out {tmp_path / 'run'}"
    assert cli.main(f"sft {given} --epochs 1 --batch-size 8 --micro-batch-size 8".split()) == 0
    sizes = "--steps 2 --rollout-size 8 --eval-every 0 --eval-prompts 2 --eval-samples 1 --max-new-tokens 6"
    learn = f"distill {given} --teacher {tiny.teacher} --on-policy-share 0 --reward regex:1 {sizes}"
    assert cli.main(learn.split()) == 0
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    lengths = {len(row["responses"][0]) + 1 for row in rows}
    assert all(min(lengths) <= line["length"] <= 6 for line in read_metrics(tmp_path / "run" / "metrics.jsonl"))
