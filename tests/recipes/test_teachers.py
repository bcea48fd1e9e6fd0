"""Kinds of teachers of `distill`: the actor itself, adapters, several, stored passes and addresses."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybrid_engine
from hybrid_engine.ops.linear_divergence import divergence
from hybrid_engine.recipes import distill, grpo
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.passes import RunPasses
from hybrid_engine.rlhf.batches.sequences import build_sequences, response_divergences
from hybrid_engine.rlhf.data.prompts import fill_prompt
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.policy import MovingAverage, playing
from hybrid_engine.rlhf.experience.teacher_loading import check_same_template, load_model_teacher, teacher_weights
from hybrid_engine.rlhf.experience.teachers import (
    ActorTeacher,
    AheadTeacher,
    ModelTeacher,
    SeveralTeachers,
    StepAnswers,
    TeacherPrompts,
    with_solutions,
)
from hybrid_engine.rlhf.options.shared import TrainingOptions
from hybrid_engine.rlhf.rewards.scores import Answers, Scores
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import build_small_llama
from tests.support.chat import PLAIN_TEMPLATE, build_chat_tokenizer
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after
from tests.support.small_actors import save_small_actor

SIZES = {
    "steps": 2, "rollout_size": 8, "minibatch_size": 8, "micro_batch_size": 4, "max_new_tokens": 6, "eval_samples": 1,
    "learning_rate": 3e-3, "eval_every": 0, "eval_prompts": 2, "save_every": 0,
}  # fmt: skip
ROWS = [PromptRow(prompt=f"{n}+{n}=", columns={"answer": str(2 * n)}) for n in (1, 23, 4, 567)]
RESPONSES = [[2, 3, 1], [9], [5, 5, 5, 5, 1], [7, 1]]
RECORDS = [2, 0, 3, 1]
"""The rows that the answers of a step belong to."""


def save_teacher(folder, seed):
    tokenizer = arithmetic.build_tokenizer()
    torch.manual_seed(seed)
    model = build_small_llama(tokenizer, hidden_size=128, num_layers=2)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)  # sure of its tokens
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A student, and sums with answers in `completion`."""
    folder = tmp_path_factory.mktemp("sources")
    rows = [
        {"prompt": f"{n}+{n}=", "answer": str(2 * n), "completion": f"{n};{2 * n}", "kind": "ab"[n % 2]}
        for n in range(80)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    student = save_small_actor(folder / "student", arithmetic.build_tokenizer())
    return {"model": student, "dataset": str(folder / "sums.jsonl")}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"), 1)


@pytest.fixture
def tiny(sources, tmp_path):
    return distill.Config(**SIZES, **sources, teacher="t", reward=("regex:^[0-4]",), out=str(tmp_path / "run"))


def figures(config, name, **options):
    """The figures of the steps of a run."""
    config = replace(config, out=str(Path(config.out).with_name(name)), **options)
    distill.run(config)
    return read_metrics(Path(config.out) / "metrics.jsonl")


def assert_planned(out):
    memory = json.loads((out / "result.json").read_text())["memory"]
    assert 0.85 <= memory["planned_for_lengths_bytes"] / memory["measured_bytes"] <= 1.3


def assert_equal(ours, theirs, rel=1e-4):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("divergence", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=rel), name


def step_of(tokenizer):
    """The answers of a step to rows of `ROWS`."""
    prompts = [tokenizer(ROWS[record].prompt)["input_ids"] for record in RECORDS]
    sequences = build_sequences(prompts, RESPONSES, 0, torch.device("cpu")).numbered()
    answers = Answers(
        prompts=[ROWS[record].prompt for record in RECORDS],
        responses=[""] * 4,
        prompt_ids=prompts,
        response_ids=RESPONSES,
        is_cut_off=[False] * 4,
    )
    return StepAnswers(sequences, answers, RECORDS, None)


def plain_logprobs(model, prompts):
    """`[N, V]` of every token of the answers after `prompts`, by transformers alone, a row at a time."""
    parts = []
    for prompt, response in zip(prompts, RESPONSES, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        parts.append(logits.double().log_softmax(-1))
    return torch.cat(parts)


def engine_of(model):
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 32, "print_latency": False},
    }
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    engine.train()
    return engine


@pytest.mark.parametrize("budget", [0, 200])
@pytest.mark.parametrize("is_separate", [False, True])
def test_a_teacher_reads_answers_after_its_own_prompts(sources, teacher, budget, is_separate):
    tokenizer = AutoTokenizer.from_pretrained(sources["model"])
    student, plain = (AutoModelForCausalLM.from_pretrained(sources["model"]) for _ in range(2))
    prompts = TeacherPrompts("={answer};{prompt}", ROWS, tokenizer)
    engine = engine_of(student)
    pack_where_exact(engine, TrainingOptions(tokens_per_micro_batch=budget))
    if is_separate:
        plain = AutoModelForCausalLM.from_pretrained(teacher)
        separate = AutoModelForCausalLM.from_pretrained(teacher)
        pack_where_exact(separate, TrainingOptions(tokens_per_micro_batch=budget))
        told = ModelTeacher(model=separate, temperature=1.0, prompts=prompts)
    else:
        told = ActorTeacher(actor=engine, play=nullcontext, temperature=1.0, prompts=prompts)
    step = step_of(tokenizer)
    told.begin_step(step)
    assert engine.module.training
    seen = [tokenizer(f"={ROWS[r].columns['answer']};{ROWS[r].prompt}")["input_ids"] for r in RECORDS]
    own = [tokenizer(ROWS[record].prompt)["input_ids"] for record in RECORDS]
    original = AutoModelForCausalLM.from_pretrained(sources["model"])
    expected = divergence(plain_logprobs(original, own), plain_logprobs(plain, seen), 1.0)
    order = torch.tensor([3, 1, 0, 2])  # a micro-batch has rows in any order
    part = step.sequences.rows(order)
    found = response_divergences(engine, told.read(part), part, 1.0, 1.0)
    counts = [len(response) for response in RESPONSES]
    wanted = torch.cat([expected.split(counts)[row] for row in order.tolist()])
    torch.testing.assert_close(found[part.response_mask].double(), wanted, atol=1e-5, rtol=1e-4)
    found.sum().backward()
    assert all(p.grad is not None for p in engine.module.parameters())


def adapted(source, seed):
    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(source),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_the_base_below_an_adapter_is_a_teacher_without_a_copy(sources):
    tokenizer, base = AutoTokenizer.from_pretrained(sources["model"]), AutoModelForCausalLM.from_pretrained
    engine, step = engine_of(adapted(sources["model"], 0)), step_of(tokenizer)
    told = ActorTeacher(actor=engine, play=partial(playing, engine.module, None), temperature=0.7)
    part = step.sequences.rows(torch.tensor([1, 0]))
    found = response_divergences(engine, told.read(part), part, 1.0, 0.5)
    separate = ModelTeacher(model=base(sources["model"]), temperature=0.7)
    expected = response_divergences(engine, separate.read(part), part, 1.0, 0.5)
    assert not told.modules and expected.sum() > 0.01
    torch.testing.assert_close(found, expected)


def test_an_adapter_teaches_what_its_merged_model_teaches(tiny, tmp_path):
    model = adapted(tiny.model, 1)
    model.save_pretrained(tmp_path / "adapter")
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny.model).save_pretrained(tmp_path / "merged")
    config = replace(tiny, lora_rank=2, learning_rate=1e-2)
    ours = figures(config, "ours", teacher=f"adapter:{tmp_path / 'adapter'}")
    assert_equal(ours, figures(config, "theirs", teacher=str(tmp_path / "merged")))
    assert ours[0]["divergence"] > 0.01
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "actor")
    assert not any("lora" in name for name, _ in saved.named_parameters())
    other = save_small_actor(tmp_path / "other", arithmetic.build_tokenizer())
    with pytest.raises(ValueError, match=r"adapter:.* belongs to the base .*, but the actor's base is --model="):
        distill.run(replace(config, model=other, teacher=f"adapter:{tmp_path / 'adapter'}"))
    with pytest.raises(ValueError, match=r"--teacher=adapter:.* has no adapter"):
        distill.run(replace(config, teacher=f"adapter:{tmp_path / 'merged'}"))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_first_weights_teach_what_a_copy_of_the_model_teaches(tiny, lora_rank):
    config = replace(tiny, lora_rank=lora_rank, teacher_prompt="={answer};{prompt}")
    assert_equal(figures(config, "ours", teacher="base"), figures(config, "theirs", teacher=tiny.model))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_teacher_has_the_moving_average_of_the_actors_weights(tiny, tmp_path, monkeypatch, dtype, lora_rank):
    """Compares with a plain loop over the state dicts of actor and teacher, in fp64."""
    followed, follow = [], MovingAverage.follow

    def recorded(average):
        theta = {name: value.double() for name, value in average.actor.module.state_dict().items()}
        phi = {name: value.double() for name, value in average.teacher.state_dict().items()}
        follow(average)
        taught = {name: value.double() for name, value in average.teacher.state_dict().items()}
        followed.append((theta, phi, taught, average.names))

    monkeypatch.setattr(MovingAverage, "follow", recorded)
    config = replace(tiny, teacher="base", teacher_average=0.3, teacher_prompt="={answer};{prompt}", minibatch_size=4)
    figures(config, "run", dtype=dtype, lora_rank=lora_rank, steps=3, learning_rate=1e-2)
    assert_planned(tmp_path / "run")
    _, expected, _, names = followed[0]
    first = AutoModelForCausalLM.from_pretrained(tiny.model).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    assert len(followed) == 6
    if lora_rank:
        assert {*names} | {*names.values()} == {name for name in expected if "lora_" in name}
    else:
        assert {*names} == {name for name, _ in first.named_parameters()}
        assert all(torch.equal(expected[name], value.double()) for name, value in first.state_dict().items())
    rounding = {"atol": 1e-6, "rtol": 1e-6} if dtype == "fp32" else {"atol": 1e-6, "rtol": 2**-8}
    for theta, _, taught, _ in followed:
        for ours, theirs in names.items():
            expected[theirs] = 0.3 * theta[ours] + 0.7 * expected[theirs]
            torch.testing.assert_close(taught[theirs], expected[theirs], **rounding)
        if lora_rank:
            assert all(torch.equal(taught[name], theta[name]) for name in taught.keys() - {*names.values()})
    assert any(not torch.equal(theta[ours], taught[theirs]) for ours, theirs in names.items())


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_average_of_the_present_weights_alone_teaches_as_the_actor_itself(tiny, lora_rank):
    config = replace(tiny, lora_rank=lora_rank, teacher_prompt="={answer};{prompt}", minibatch_size=4, steps=3)
    ours = figures(config, "ours", teacher="base", teacher_average=1.0)
    assert_equal(ours, figures(config, "theirs", teacher="self"))
    assert ours[2]["divergence"] != pytest.approx(figures(config, "first", teacher="base")[2]["divergence"], rel=1e-3)


@pytest.mark.parametrize(("dtype", "lora_rank"), [("fp32", 0), ("bf16", 0), ("bf16", 2)])
def test_an_interrupted_run_goes_on_with_its_average_to_the_bit(tiny, tmp_path, dtype, lora_rank):
    config = replace(tiny, teacher="base", teacher_average=0.3, teacher_prompt="={answer};{prompt}", dtype=dtype)
    config = replace(config, lora_rank=lora_rank, steps=4, save_every=1, learning_rate=1e-2, minibatch_size=4)
    whole = figures(config, "whole")
    torn = replace(config, out=str(tmp_path / "torn"))
    with stopped_after(2):
        distill.run(torn)
    ours = figures(torn, "torn", resume=True)
    for name in ("divergence", "grad_norm", "score"):
        assert [line[name] for line in ours] == [line[name] for line in whole], name
    actors = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "actor") for name in ("torn", "whole")]
    assert all(map(torch.equal, *(actor.state_dict().values() for actor in actors)))


@pytest.mark.parametrize(("stage", "lora_rank"), [(3, 0), (3, 2), (1, 2)])
def test_an_average_on_two_processes_teaches_as_on_one(tiny, tmp_path, stage, lora_rank):
    config = replace(tiny, teacher="base", teacher_average=0.3, teacher_prompt="={answer};{prompt}")
    config = replace(config, lora_rank=lora_rank, steps=3, learning_rate=1e-2)
    plain = figures(config, "plain")
    run_distributed(run_it, 2, replace(config, out=str(tmp_path / "two"), zero_stage=stage))
    assert_equal(read_metrics(tmp_path / "two" / "metrics.jsonl"), plain, rel=1e-3)
    if not lora_rank:
        assert_planned(tmp_path / "two")


def run_it(rank, world_size, config):
    distill.run(config)


def test_self_distillation_is_the_same_packed_and_on_two_processes_under_zero_3(tiny, tmp_path):
    config = replace(tiny, teacher="self", teacher_prompt="={answer};{prompt}")
    plain = figures(config, "plain")
    assert plain[0]["divergence"] > 1e-4
    assert_equal(figures(config, "packed", tokens_per_micro_batch=512), plain, rel=1e-3)
    run_distributed(run_it, 2, replace(config, out=str(tmp_path / "two"), zero_stage=3))
    assert_equal(read_metrics(tmp_path / "two" / "metrics.jsonl"), plain, rel=1e-3)


def test_each_row_has_the_teachers_of_its_weights(sources, teacher, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(sources["model"])
    student = AutoModelForCausalLM.from_pretrained(sources["model"])
    folders = [teacher, save_teacher(tmp_path / "second", 2)]
    teachers = [ModelTeacher(model=AutoModelForCausalLM.from_pretrained(folder), temperature=1.0) for folder in folders]
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75], [0.0, 1.0], [1.0, 0.0]])  # of the training rows
    step = step_of(tokenizer)
    several = SeveralTeachers(teachers, weights, reads_always=False)
    several.begin_step(step)
    for rows in ([0, 1, 2, 3], [2, 0], [1]):
        part = step.sequences.rows(torch.tensor(rows))
        found = response_divergences(student, several.read(part), part, 1.0, 1.0)
        apart = torch.stack([response_divergences(student, told.read(part), part, 1.0, 1.0) for told in teachers])
        of_rows = weights[torch.tensor(RECORDS)[torch.tensor(rows)]].T[:, :, None]
        torch.testing.assert_close(found, (apart * of_rows).sum(0))


def test_a_column_names_the_teacher_of_a_row_and_weights_mix_them(tiny, teacher, tmp_path):
    second = save_teacher(tmp_path / "second", 2)
    config = replace(tiny, steps=1)
    of_both = figures(config, "both", teacher=(teacher, second), teacher_weights=(1.0, 3.0))
    apart = [figures(config, name, teacher=source) for name, source in (("first", teacher), ("other", second))]
    mixed = 0.25 * apart[0][0]["divergence"] + 0.75 * apart[1][0]["divergence"]
    assert of_both[0]["divergence"] == pytest.approx(mixed, rel=1e-4)
    # Each row has one teacher; with both exchanged it has the other one.
    pairs = [(f"a={one}", f"b={other}") for one, other in ((teacher, second), (second, teacher))]
    named = [figures(config, f"named{n}", teacher=pair, teacher_column="kind") for n, pair in enumerate(pairs)]
    total = sum(part[0]["divergence"] for part in apart)
    assert sum(part[0]["divergence"] for part in named) == pytest.approx(total, rel=1e-4)
    assert named[0][0]["divergence"] != pytest.approx(named[1][0]["divergence"], rel=1e-2)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("c", "'c' in the column 'kind' of --teacher-column; write the name of a teacher.*are a, b"),
        (None, "None in the column 'kind'"),
        ({"a": 0.0, "b": 0.0}, "sum to more than 0"),
        ({"a": -1.0, "b": 2.0}, "at least 0"),
        ({"a": 1.0, "z": 2.0}, "weights by names, which are a, b"),
    ],
)
def test_a_row_without_a_teacher_is_refused_by_name(value, words):
    config = distill.Config(teacher=("a=x", "b=y"), teacher_column="kind")
    with pytest.raises(ValueError, match=rf"row 7 has .*{words}"):
        teacher_weights(config, [PromptRow(prompt="1", place="row 7", columns={"kind": value})])


def test_weights_of_a_row_are_relative():
    config = distill.Config(teacher=("a=x", "b=y"), teacher_column="kind")
    rows = [PromptRow(prompt="1", columns={"kind": value}) for value in ("b", {"a": 1, "b": 3}, {"a": 2, "b": None})]
    assert teacher_weights(config, rows).tolist() == [[0.0, 1.0], [0.25, 0.75], [1.0, 0.0]]


def test_a_stored_pass_teaches_what_its_teacher_teaches(tiny, teacher, tmp_path):
    config = replace(tiny, teacher=teacher, teacher_top_k=4, on_policy_share=0.0)
    plain = figures(config, "plain")
    cached = replace(config, teacher_cache=str(tmp_path / "cache"))
    for name in ("writes", "reads"):
        assert_equal(figures(cached, name), plain)
    run_distributed(run_it, 2, replace(cached, out=str(tmp_path / "two"), teacher_cache=str(tmp_path / "of_two")))
    assert len(list((tmp_path / "of_two").glob("part-*"))) == 2
    assert_equal(figures(replace(config, teacher_cache=str(tmp_path / "of_two")), "again"), plain)
    other = save_teacher(tmp_path / "other", 3)
    with pytest.raises(ValueError, match=rf"--teacher-cache=.* is of the teacher '{teacher}', not '{other}'"):
        distill.run(replace(cached, teacher=other, out=str(tmp_path / "refused")))
    with pytest.raises(ValueError, match=r"is of --teacher-top-k=4, not 3"):
        distill.run(replace(cached, teacher_top_k=3, out=str(tmp_path / "refused")))
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()


def test_a_server_teaches_what_its_model_teaches(tiny, teacher):
    config = replace(tiny, teacher_top_k=4)
    plain = figures(config, "plain", teacher=teacher)
    tokenizer, model = AutoTokenizer.from_pretrained(teacher), AutoModelForCausalLM.from_pretrained(teacher)
    with hybrid_engine.init_inference(model).serving(tokenizer, model_name="tiny") as server:
        assert_equal(figures(config, "served", teacher=server.url), plain, rel=1e-3)
        stored = replace(config, teacher=server.url, on_policy_share=0.0, teacher_cache=config.out + "-cache")
        first = figures(stored, "stored")
    assert_equal(figures(stored, "without_server"), first)
    assert_equal(first, figures(replace(config, on_policy_share=0.0), "local", teacher=teacher), rel=1e-3)


def test_a_teacher_that_waits_or_is_sharded_teaches_the_same(tiny, teacher, tmp_path):
    config = replace(tiny, teacher=teacher)
    plain = figures(config, "plain")
    assert_equal(figures(config, "waiting", teacher_offload=True), plain)
    prompted = {"teacher_prompt": "={answer};{prompt}", "tokens_per_micro_batch": 512}
    assert_equal(figures(config, "prompted", teacher_offload=True, **prompted), figures(config, "own", **prompted))
    for stage in (0, 3):
        out = tmp_path / f"two{stage}"
        run_distributed(run_it, 2, replace(config, out=str(out), zero_stage=stage, teacher_sharded=True))
        assert_equal(read_metrics(out / "metrics.jsonl"), plain, rel=1e-3)


def test_a_waiting_teacher_is_on_the_device_only_while_it_reads(sources, teacher):
    moves, model = [], AutoModelForCausalLM.from_pretrained(teacher)
    move = model.to
    model.to = lambda device: moves.append(torch.device(device).type) or move("cpu")
    told = AheadTeacher(model, 1.0, RunPasses(), waits_on=torch.device("meta"))
    step = step_of(AutoTokenizer.from_pretrained(sources["model"]))
    told.begin_step(step)
    assert moves == ["cpu", "meta"]
    for rows in ([0, 1, 2, 3], [3, 1]):
        part = step.sequences.rows(torch.tensor(rows))
        (stated,), (expected,) = told.read(part), ModelTeacher(model=model, temperature=1.0).read(part)
        torch.testing.assert_close(stated.statement.hidden, expected.statement.hidden)
        assert torch.equal(stated.statement.weight, expected.statement.weight)
    assert len(moves) == 2


def test_prompts_are_filled_with_columns():
    row = PromptRow(prompt="1+1=", columns={"answer": 2, "list": [1]}, place="row 7")
    assert fill_prompt(row, "{{{answer}}} {prompt}{list}").prompt == "{2} 1+1=[1]"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "{x}?"}]
    filled = fill_prompt(replace(row, prompt=turns), "{prompt} ({answer})").prompt
    assert filled == [turns[0], {"role": "user", "content": "{x}? (2)"}] and turns[1]["content"] == "{x}?"
    with pytest.raises(ValueError, match=r"row 7 has no value in the column 'feedback'.* are prompt, answer, list"):
        fill_prompt(row, "{feedback}")


def test_a_teacher_sees_the_first_other_right_answer_of_the_group_and_groups_without_one_are_not_learned_from():
    tokenizer = arithmetic.build_tokenizer()
    texts = ["3", "2", "2;", "45", "46", "47", "8", "8", "9"]  # groups of 3
    prompts, responses = ([tokenizer(text)["input_ids"] for text in part] for part in (["1+1="] * 9, texts))
    sequences = build_sequences(prompts, responses, 0, torch.device("cpu")).numbered()
    answers = Answers(
        prompts=["1+1="] * 9, responses=texts, prompt_ids=prompts, response_ids=responses, is_cut_off=[False] * 9
    )
    total = [0.0, 1.0, 2.0, 0.5, 1.0, float("nan"), 0.0, 0.9, 0.9]
    scores = Scores(total=total, by_name={}, per_token=None)
    step = with_solutions(StepAnswers(sequences, answers, [0] * 3 + [3] * 3 + [1] * 3, scores), 3, 1.0)
    shown = ["2", "2;", "2", "46", None, "46", None, None, None]
    assert step.answers.columns["solution_of_group"] == shown
    expected = sequences.response_mask & torch.tensor([text is not None for text in shown])[:, None]
    assert torch.equal(step.sequences.response_mask, expected)

    told = TeacherPrompts("={solution_of_group};{prompt}{answer}", ROWS, tokenizer, max_solution_tokens=2)
    filled = ["=2;1+1=2", "=2;;1+1=2", "=2;1+1=2", "=46;567+567=1134", "=;567+567=1134", "=46;567+567=1134"]
    filled += ["=;23+23=46"] * 3
    assert told.of_step(step) == [tokenizer(text)["input_ids"] for text in filled]
    assert told.longest == len(tokenizer("=;567+567=1134")["input_ids"]) + 2
    told.begin_step(step)
    seen = told.seen(step.sequences.rows(torch.tensor([4, 3])))
    assert seen.response_mask.sum(dim=1).tolist() == [0, len(responses[3])]

    row = replace(ROWS[0], columns={"answer": "2", "solution_of_group": "x"}, place="row 7")
    with pytest.raises(ValueError, match="row 7 has a column 'solution_of_group'"):
        TeacherPrompts("{solution_of_group}{prompt}", [row], tokenizer)


def test_a_run_that_learns_from_solutions_of_its_groups_continues_to_the_bit(tiny, tmp_path):
    template = "={solution_of_group};{prompt}"
    for options, what in (({"group_size": 1}, "--group-size=1"), ({"on_policy_share": 0.5}, "--on-policy-share=0.5")):
        with pytest.raises(ValueError, match=f"another answer to the same prompt, which {what} does not give"):
            replace(tiny, teacher="base", teacher_prompt=template, **({"group_size": 1} | options))
    config = replace(tiny, teacher="base", teacher_prompt=template, teacher_average=0.3, rollout_size=4, group_size=4)
    config = replace(config, steps=4, save_every=1, learning_rate=1e-2)
    whole = figures(config, "whole")
    shares = [line["shown_solutions"] for line in whole]
    assert all(0 <= share <= 1 for share in shares) and max(shares) > 0 and min(shares) < 1
    torn = replace(config, out=str(tmp_path / "torn"))
    with stopped_after(2):
        distill.run(torn)
    ours = figures(torn, "torn", resume=True)
    for name in ("divergence", "grad_norm", "score", "shown_solutions"):
        assert [line[name] for line in ours] == [line[name] for line in whole], name


def test_a_teacher_with_another_chat_template_is_refused(tmp_path):
    other = PLAIN_TEMPLATE.replace("<start>", "<start>the ")
    assert other != PLAIN_TEMPLATE
    ours, theirs, without = (build_chat_tokenizer(template) for template in (PLAIN_TEMPLATE, other, other))
    without.chat_template = None
    rows = [PromptRow(prompt="text"), PromptRow(prompt=[{"role": "user", "content": "hi"}], place="row 7")]
    for teacher, chosen in ((ours, rows), (without, rows), (theirs, rows[:1])):
        check_same_template("t", teacher, ours, chosen)
    with pytest.raises(ValueError, match="--teacher='t' has another chat template than the actor: of row 7 it makes"):
        check_same_template("t", theirs, ours, rows)
    build_small_llama(theirs, hidden_size=64, num_layers=1).save_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    start = SimpleNamespace(answered=SimpleNamespace(longest=8), train=rows)
    with pytest.raises(ValueError, match=rf"--teacher='{tmp_path}' has another chat template than the actor: of row 7"):
        load_model_teacher(grpo.Config(teacher=str(tmp_path)), SimpleNamespace(tokenizer=ours), start)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher": "self"}, "--teacher=self would teach the actor what it does already"),
        ({"teacher": "base"}, "--teacher=base would teach"),
        ({"teacher": ("base", "x", "self")}, "--teacher=self would teach"),
        ({"teacher": "adapter:x"}, "--teacher=adapter:x .*--lora-rank"),
        ({"teacher": "http://h/v1"}, "--teacher=http://h/v1 reports the likeliest tokens alone; give --teacher-top-k"),
        ({"teacher": "http://h/v1", "teacher_top_k": 5, "teacher_temperature": 2.0}, "--teacher-temperature=2.0"),
        ({"teacher_requests": 4}, "--teacher-requests=4 applies to a --teacher at an address"),
        ({"teacher_timeout": 4.0}, "--teacher-timeout=4.0 applies to a --teacher at an address"),
        ({"teacher_requests": 0}, "--teacher-requests=0 must be at least 1"),
        ({"teacher_prompt": "{answer"}, "--teacher-prompt='{answer' must have"),
        ({"teacher_prompt": "{answer.__class__}"}, "{answer.__class__} is not one"),
        ({"teacher_prompt": "{answer!r}"}, "--teacher-prompt="),
        ({"teacher_column": "kind"}, "--teacher-column=kind is for several teachers|needs a different name"),
        ({"teacher": ("a", "b"), "teacher_column": "kind"}, "write name=MODEL"),
        ({"teacher": ("a=x", "a=y"), "teacher_column": "kind"}, "needs a different name before each"),
        ({"teacher": ("a", "b", "a")}, "names a teacher twice"),
        ({"teacher_weights": (1.0,)}, "--teacher-weights=1 is for several teachers"),
        ({"teacher": ("a", "b"), "teacher_weights": (1.0,)}, "--teacher-weights='1' must be 2 numbers"),
        ({"teacher": ("a", "b"), "teacher_weights": (0.0, 0.0)}, "sum to more than 0"),
        ({"teacher": ("a", "b"), "teacher_weights": (2.0, -1.0)}, "must be at least 0"),
        ({"teacher_offload": True, "teacher_sharded": True}, "--teacher-offload and --teacher-sharded both"),
        ({"teacher": "self", "teacher_prompt": "{answer}", "teacher_offload": True}, "--teacher-offload is for"),
        ({"teacher_average": 0.1}, "--teacher-average=0.1 averages the weights of one --teacher=base, not of"),
        (
            {"teacher": "self", "teacher_prompt": "{a}", "teacher_average": 0.1},
            "not of --teacher=self; give --teacher base",
        ),
        (
            {"teacher": "base", "teacher_prompt": "{a}", "teacher_average": 1.5},
            "--teacher-average=1.5 must be from 0 to 1",
        ),
        (
            {"teacher": "base", "teacher_prompt": "{a}", "teacher_average": 0.1, "teacher_offload": True},
            "--teacher-average=0.1 changes the teacher in each optimizer step, and --teacher-offload",
        ),
        (
            {"teacher": "base", "teacher_prompt": "{a}", "teacher_average": 0.1, "divergence": "uld"},
            "--teacher-average does not exist for --divergence uld",
        ),
        ({"teacher_cache": "c"}, "--teacher-cache='c' keeps the likeliest tokens; give --teacher-top-k"),
        ({"teacher_cache": "c", "teacher_top_k": 4}, "--teacher-cache='c' has the answers of the dataset"),
        ({"teacher": "self", "teacher_prompt": "{answer}", "teacher_cache": "c"}, "keeps the pass of one model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        distill.Config(**{"teacher": "t"} | options)


def test_a_prompt_that_does_not_fit_or_lacks_a_column_is_refused_before_training(tiny, tmp_path):
    with pytest.raises(ValueError, match="has no value in the column 'feedback' of --teacher-prompt"):
        distill.run(replace(tiny, teacher="self", teacher_prompt="{feedback}{prompt}"))
    with pytest.raises(ValueError, match=r"--teacher-prompt makes prompts of up to .* positions of --teacher='self'"):
        distill.run(replace(tiny, teacher="self", teacher_prompt="{prompt}" * 400))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
