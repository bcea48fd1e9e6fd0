"""Questions of reasoning-gym as a dataset and its scores as a reward, beside the library itself."""

import importlib.util
import inspect
import re

import pytest

from hybrid_engine.rlhf.data.data_files import QuestionOptions, make_entries, read_questions
from hybrid_engine.rlhf.data.prompts import load_prompt_rows
from hybrid_engine.rlhf.data.reading import read_prompt_rows
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.rewards.built_in import EVALUATING
from hybrid_engine.rlhf.rewards.loading import load_rewards
from tests.support.answers import answers_of

DATASETS = pytest.importorskip("reasoning_gym.factory", reason="pip install 'hybrid-engine[real]'").DATASETS
library = pytest.importorskip("reasoning_gym", reason="pip install 'hybrid-engine[real]'")
WORDS = {"min_words": 3, "max_words": 5}
FIRST_HELD_OUT = 1_000_000_000


def questions(seed, size, name="letter_counting", **config):
    made = library.create_dataset(name, seed=seed, size=size, **config)
    return [(made[index]["question"], made[index]["answer"]) for index in range(size)]


def asked(rows):
    """The last turn and the answer of each row."""
    return [(row.prompt[-1]["content"], row.columns["answer"]) for row in rows]


def test_rows_are_the_questions_of_the_library_in_two_parts_of_other_seeds():
    name = "reasoning_gym:letter_counting:min_words=3,max_words=5,size=12,seed=40,held_out=6,shots=2"
    train, held_out = load_prompt_rows(name)
    assert asked(train) == questions(40, 12, **WORDS)
    assert asked(held_out) == questions(FIRST_HELD_OUT, 6, **WORDS)
    shots = questions(FIRST_HELD_OUT + 6, 2, **WORDS)
    for row in (*train, *held_out):
        before = [
            (row.prompt[0]["content"], row.prompt[1]["content"]),
            (row.prompt[2]["content"], row.prompt[3]["content"]),
        ]
        assert before == shots and [turn["role"] for turn in row.prompt] == ["user", "assistant"] * 2 + ["user"]
    rewards = load_rewards(["reasoning_gym"])
    rewards.check_columns([*train, *held_out])
    for row in (*train, *held_out):
        rewards.check_row(row)
    right = answers_of(["?"] * 2, [f" {held_out[0].columns['answer']}\n", "none"], **columns_of(held_out[0], 2))
    assert rewards(right).total == [1.0, 0.0]


def columns_of(row, number):
    return {name: [value] * number for name, value in row.columns.items()}


def test_equal_questions_are_never_in_both_parts_and_held_out_ones_differ():
    few = "reasoning_gym:chain_sum:max_terms=2,min_digits=1,max_digits=1,size=300,held_out=20,chat=false"
    train, held_out = load_prompt_rows(few)
    kept = {row.prompt for row in held_out}
    assert 0 < len(held_out) == len(kept) <= 20 and kept.isdisjoint(row.prompt for row in train)
    assert len(train) < 300 and all(row.prompt.endswith(" =\n") for row in train)
    everything = few.replace("held_out=20", "held_out=3000")
    with pytest.raises(ValueError, match="each of its 300 questions equals a held-out one"):
        load_prompt_rows(everything)


def test_questions_do_not_depend_on_the_order_of_sets_or_on_random_numbers_of_the_process(monkeypatch):
    made = []
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        made.append(
            [make_entries("", QuestionOptions(name=name), [(3, 2)]) for name in ("ransom_note", "list_functions")]
        )
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("name", "config"),
    [("decimal_arithmetic", {"max_num_decimal_places": 5}), ("chain_sum", {}), ("spell_backward", {}), ("gcd", {})],
)
def test_the_reward_is_the_score_of_the_library_with_the_options_of_the_data_set(name, config):
    made = library.create_dataset(name, seed=5, size=3, **config)
    entries = [made[index] for index in range(3)]
    tried = [entries[0]["answer"], entries[1]["answer"] + "1", f"The answer is {entries[2]['answer']}."]
    metadata = [entry["metadata"] | {"source_dataset": name, "source_config": config} for entry in entries]
    columns = {"answer": [entry["answer"] for entry in entries], "metadata": metadata}
    answers = answers_of(["?"] * 3, tried, **columns)
    expected = [made.score_answer(text, entry) for text, entry in zip(tried, entries, strict=True)]
    assert load_rewards(["reasoning_gym"])(answers).total == pytest.approx(expected) and expected[0] == 1.0
    tagged = [f"I think <answer>5</answer> no <answer> {text}\n</answer> so" for text in tried]
    answers = answers_of(["?"] * 3, tagged, **columns)
    assert load_rewards(["reasoning_gym:tag=answer"])(answers).total == pytest.approx(expected)
    answers = answers_of(["?"] * 3, [f"so #### {text}" for text in tried], **columns)
    assert load_rewards(["reasoning_gym:after=####"])(answers).total == pytest.approx(expected)
    answers = answers_of(["?"] * 3, tried, **columns)
    assert load_rewards(["reasoning_gym:after=####"])(answers).total == [0.0] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gym:composite", "'composite' has no questions of its own; give several --dataset"),
        ("reasoning_gym:chain_sum:held_out=0", "held_out=0 must be at least 1; raise it"),
        ("reasoning_gym:chain_sums", "no dataset 'chain_sums' in reasoning-gym; there are chain_sum"),
        ("reasoning_gym:chain_sum:max_term=2", r"refuses the options \(TypeError: .*max_term.*max_terms"),
        ("reasoning_gym:chain_sum:min_terms=4,max_terms=2", r"refuses the options \(AssertionError"),
        ("reasoning_gym:chain_sum:size=2.5", "size=2.5 must be a whole number"),
        ("reasoning_gym:chain_sum:chat=1", "chat=1 must be true or false"),
        ("reasoning_gym:chain_sum:size=0", "size=0 must be at least 1"),
        ("reasoning_gym:chain_sum:size", "'size' is not an option; write name=value"),
        (
            "reasoning_gym:chain_sum:held_out_seed=1999",
            "the seeds 0 to 1999 are trained on and those from 1999 to 2254",
        ),
        ("reasoning_gym:chain_sum:seed=4294967000", r"seeds must stay below 2\*\*32"),
        ("reasoning_gym:rush_hour:shots=1,size=1,held_out=1", "no single right answer to show"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(name, message):
    with pytest.raises(ValueError, match=message):
        list(read_questions(name))


def test_other_parts_and_a_missing_library_are_refused(monkeypatch):
    for part, message in (
        ({"split": "test"}, "the splits 'train' and 'held_out'"),
        ({"configuration": "main"}, "are part of its name"),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_questions("reasoning_gym:gcd", **part))
    source = DataSource(datasets=("reasoning_gym:gcd",), held_out_split="foo").held_out_source
    with pytest.raises(ValueError, match=r"^--held-out-split='foo': 'reasoning_gym:gcd' has the splits 'train' and"):
        read_prompt_rows(source)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'hybrid-engine\[real\]'"):
        make_entries("reasoning_gym:gcd", QuestionOptions(name="gcd"), [])
    with pytest.raises(ValueError, match=r"--reward='reasoning_gym' needs the library reasoning-gym"):
        load_rewards(["reasoning_gym"])


def test_rows_of_another_data_set_and_options_that_exclude_each_other_are_refused():
    check = load_rewards(["reasoning_gym"]).rewards[0].check
    with pytest.raises(ValueError, match="has metadata without the name of a reasoning-gym dataset"):
        check({"answer": "1", "metadata": {"source": "gsm8k"}})
    with pytest.raises(ValueError, match="comes from 'gsm8k', which reasoning-gym cannot judge"):
        check({"answer": "1", "metadata": {"source_dataset": "gsm8k"}})
    with pytest.raises(ValueError, match="only one of tag and after"):
        load_rewards(["reasoning_gym:tag=a,after=b"])


def test_data_sets_that_evaluate_what_a_model_wrote_are_refused_unless_allowed():
    row = {"answer": "1 + 1", "metadata": {"source_dataset": "countdown"}}
    with pytest.raises(ValueError, match="executes the model's answer as Python"):
        load_rewards(["reasoning_gym"]).rewards[0].check(row)
    load_rewards(["reasoning_gym:allow_eval=true"]).rewards[0].check(row)
    with pytest.raises(ValueError, match="allow_eval='yes' must be true or false"):
        load_rewards(["reasoning_gym:allow_eval=yes"])
    found = {
        name
        for name, (made_by, _) in DATASETS.items()
        if re.search(r"(eval|parse_expr)\((user_)?answer", inspect.getsource(made_by))
    }
    assert found == EVALUATING


def test_options_within_brackets_are_one_value():
    options = QuestionOptions.read('reasoning_gym:time_intervals:task_types=["time","date"],size=7')
    assert options.config == {"task_types": ["time", "date"]} and options.size == 7
