"""The data of the main job: the judge, the standard library's summaries, preference pairs and users' datasets."""

import csv
import json
import re
from itertools import chain

import pytest
from datasets import Dataset, DatasetDict

from hybrid_engine.recipes import dpo
from hybrid_engine.rlhf.data.parts import is_held_out
from hybrid_engine.rlhf.data.prompts import Curriculum, fit_prompts, load_prompt_rows, select_prompts
from hybrid_engine.rlhf.data.reading import read_prompt_rows
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.tasks.stdlib_docs import (
    FAULTS,
    build_preferences,
    conforms,
    mend,
    pep257_violations,
    split,
    stdlib_examples,
)
from tests.support.chat import build_chat_tokenizer

pytestmark = pytest.mark.quick

SOURCE = '''
def shown(a, b=1, *args, **kwargs):
    """Return the sum of all arguments.

    More text that is not the summary.
    """

def _hidden(a):
    """Return something that is not public."""

def undocumented(a): ...

class Public:
    def __init__(self, size):
        """Create a public object of
        the given size."""

    async def wait_for(self, *, timeout: float = 3.0) -> bool:
        """Waits until the object is ready"""

class _Private:
    def method(self):
        """Return something in a private class."""
'''


@pytest.mark.parametrize(
    ("summary", "violations"),
    [
        ("Return the name of the file.", []),
        ("Recursively delete a directory tree.", []),
        ("Set the option, e.g. the width.", []),
        ("Returns the name of the file.", ["imperative mood"]),
        ("The name of the file.", ["imperative mood"]),
        ("return the name of the file.", ["capital letter"]),
        ("Return the name of the file", ["full stop"]),
        ("Return the name of the file...", ["full stop"]),
        ("Return the name. Raise an error without one.", ["one sentence"]),
        ("Return the name\nof the file.", ["one sentence"]),
        ("Return " + "a" * 64 + ".", []),  # 72 characters
        ("Return " + "a" * 65 + ".", ["72 characters"]),
        ("", ["capital letter", "full stop", "imperative mood"]),
    ],
)
def test_the_judge_names_exactly_the_rules_that_are_broken(summary, violations):
    assert pep257_violations(summary) == violations
    assert conforms(summary) == (not violations)


def test_examples_are_the_public_documented_functions_with_their_first_paragraph(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("print 'Python 2'")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "helper.py").write_text(SOURCE)
    assert [(example.prompt, example.summary) for example in stdlib_examples(tmp_path)] == [
        ("package.module.shown(a, b=1, *args, **kwargs)\n", "Return the sum of all arguments."),
        ("package.module.Public.__init__(self, size)\n", "Create a public object of the given size."),
        ("package.module.Public.wait_for(self, *, timeout: float=3.0)\n", "Waits until the object is ready"),
    ]


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(ValueError, match="installed with its sources"):
        stdlib_examples(tmp_path)


def test_the_split_of_the_standard_library_is_disjoint_and_does_not_depend_on_the_order():
    examples = stdlib_examples()
    train, held_out = split(examples)
    assert split(examples[::-1]) == (train, held_out)
    assert len(train) + len(held_out) == len(examples) > 1000
    assert 0.07 < len(held_out) / len(examples) < 0.13
    assert {example.prompt for example in train}.isdisjoint(example.prompt for example in held_out)
    assert {example.summary for example in train}.isdisjoint(example.summary for example in held_out)


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("no capital", "capital letter"),
        ("no full stop", "full stop"),
        ("third person", "imperative mood"),
        ("description", "imperative mood"),
        ("two sentences", "one sentence"),
        ("too long", "72 characters"),
    ],
)
def test_each_fault_breaks_its_rule(fault, rule):
    for summary in ("Return the name.", "Copy the file to a folder.", "Process all events."):
        assert rule in pep257_violations(FAULTS[fault](summary, "Open a socket."))
    assert set(FAULTS) == {"no capital", "no full stop", "third person", "description", "two sentences", "too long"}


def test_chosen_conforms_and_differs_from_rejected_in_every_pair():
    train, _ = split(stdlib_examples())
    pairs = build_preferences(train[:500], seed=3)
    assert pairs == build_preferences(train[:500], seed=3) != build_preferences(train[:500], seed=4)
    assert {pair.columns["kind"] for pair in pairs} == {*FAULTS, "original", "other function", "shuffled"}
    for pair in pairs:
        assert conforms(pair.chosen) and pair.chosen != pair.rejected
        assert pair.columns["kind"] in ("other function", "shuffled") or not conforms(pair.rejected), pair


def test_mending_repairs_what_it_can_and_gives_up_otherwise():
    assert mend("Returns the name") == "Return the name."
    assert mend("copies a file") == "Copy a file."
    assert mend("Processes all events.") == "Process all events."
    assert mend("The name of a file") is None


def write_prompts(path, column, count=60):
    path.write_text("".join(json.dumps({column: f"prompt {n}", "id": n}) + "\n" for n in range(count)))
    return str(path)


def test_prompts_of_a_jsonl_file_and_of_a_saved_dataset_are_split_by_their_hash(tmp_path):
    train, held_out = load_prompt_rows(write_prompts(tmp_path / "prompts.jsonl", "prompt"))
    train_texts, held_out_texts = ([row.prompt for row in rows] for rows in (train, held_out))
    assert sorted(train_texts + held_out_texts) == sorted(f"prompt {n}" for n in range(60))
    assert held_out_texts == [text for text in sorted(held_out_texts, key=lambda p: int(p[7:])) if is_held_out(text)]
    assert [row.columns["id"] for row in held_out] == [int(text[7:]) for text in held_out_texts]
    Dataset.from_dict({"prompt": [f"prompt {n}" for n in range(60)]}).save_to_disk(tmp_path / "saved")
    saved = load_prompt_rows(str(tmp_path / "saved"))
    assert [[row.prompt for row in rows] for rows in saved] == [train_texts, held_out_texts]


def read_part(dataset, split=None, configuration=None):
    return read_prompt_rows(DataSource(datasets=(dataset,), split=split, configuration=configuration))


def test_of_several_splits_the_chosen_one_is_read_and_those_that_there_are_are_named(tmp_path):
    splits = {name: Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / "both")
    (tmp_path / "files").mkdir()
    for name in splits:
        (tmp_path / "files" / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    for folder in ("both", "files"):
        path = str(tmp_path / folder)
        assert [[row.prompt for row in read_part(path, split)] for split in (None, "test")] == [
            ["train"],
            ["test"],
        ]
        with pytest.raises(ValueError, match=r"^--split='tset': --dataset=.* has the splits 'train', 'test'; choose"):
            read_part(path, "tset")
    DatasetDict(test=splits["test"]).save_to_disk(tmp_path / "test only")
    with pytest.raises(ValueError, match=r"^--dataset=.*test only' has the splits 'test'; choose one with --split"):
        read_prompt_rows(str(tmp_path / "test only"))
    splits["test"].save_to_disk(tmp_path / "plain")
    for name, rule in (("plain", "has no splits; leave the option out"), ("files/test.jsonl", "is a file, which has")):
        with pytest.raises(ValueError, match=f"^--split='test': --dataset='.*{name}' {rule}"):
            read_part(str(tmp_path / name), "test")
    held_out = DataSource(datasets=("train.jsonl",), held_out_dataset=path, held_out_split="tset").held_out_source
    with pytest.raises(
        ValueError, match=r"^--held-out-split='tset': --held-out-dataset=.*; choose one with --held-out-s"
    ):
        read_prompt_rows(held_out)
    with pytest.raises(ValueError, match="--split='test' needs --dataset; give one, or leave it out"):
        dpo.Config(split="test")


@pytest.fixture
def configured(tmp_path):
    """A folder of data files with two configurations, as the hub's datasets name theirs."""
    folder = tmp_path / "configured"
    lines = ["---", "configs:"]
    for name in ("main", "socratic"):
        (folder / name).mkdir(parents=True)
        for part in ("train", "test"):
            (folder / name / f"{part}.jsonl").write_text(json.dumps({"prompt": f"{name} {part}"}) + "\n")
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [f"  - {{split: {part}, path: {name}/{part}.jsonl}}" for part in ("train", "test")]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return str(folder)


def test_of_several_configurations_the_chosen_one_is_read_and_those_that_there_are_are_named(configured, tmp_path):
    for name, part in (("main", None), ("socratic", "test")):
        (row,) = read_part(configured, part, name)
        assert row.prompt == f"{name} {part or 'train'}"
    names = "has the configurations 'main', 'socratic'; choose one with --dataset-config$"
    with pytest.raises(ValueError, match=f"^--dataset='.*configured' {names}"):
        read_prompt_rows(configured)
    with pytest.raises(ValueError, match=f"^--dataset-config='mian': --dataset='.*configured' {names}"):
        read_part(configured, None, "mian")
    with pytest.raises(ValueError, match=r"^--split='tset': .* has the splits 'train', 'test'"):
        read_part(configured, "tset", "main")


def test_what_has_no_configurations_refuses_the_option(tmp_path):
    path = write_prompts(tmp_path / "prompts.jsonl", "prompt")
    Dataset.from_dict({"prompt": ["a"]}).save_to_disk(tmp_path / "saved")
    for name, rule in ((path, "is a file, which has no"), (str(tmp_path / "saved"), "was saved without")):
        with pytest.raises(ValueError, match=f"^--dataset-config='main': --dataset='{name}' {rule} configurations"):
            read_part(name, None, "main")
    with pytest.raises(ValueError, match=r"^--dataset-config='main' needs --dataset; give one"):
        dpo.Config(dataset_config="main")


def test_prompts_that_are_too_long_are_counted_and_left_out_only_if_asked(capsys):
    tokenizer = build_chat_tokenizer(None)
    rows = [PromptRow(prompt="a" * length) for length in (3, 5, 4)]
    assert fit_prompts(rows, tokenizer, 5, skips=True) == fit_prompts(rows, tokenizer, 5, skips=False) == rows
    assert capsys.readouterr().out == ""
    assert fit_prompts(rows, tokenizer, 4, skips=False) == rows
    assert capsys.readouterr().out.startswith(
        "1 of 3 prompts have more tokens than --max-prompt-tokens=4 and lose their beginning; raise it, or leave them"
    )
    assert fit_prompts(rows, tokenizer, 4, skips=True) == [rows[0], rows[2]]
    assert capsys.readouterr().out == "1 of 3 prompts have more tokens than --max-prompt-tokens=4 and are left out\n"
    with pytest.raises(ValueError, match="--skip-too-long: 3 of 3 prompts have more tokens than --max-prompt-tokens=2"):
        fit_prompts(rows, tokenizer, 2, skips=True)


def test_a_dataset_without_prompts_is_refused_with_the_columns_that_it_has(tmp_path):
    with pytest.raises(ValueError, match=r"has the columns 'id', 'question' and must have 'prompt'"):
        load_prompt_rows(write_prompts(tmp_path / "other.jsonl", "question"))
    Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"has the columns 'text' \(plain text\) and must have 'prompt'"):
        load_prompt_rows(str(tmp_path / "saved"))
    (tmp_path / "empty.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    with pytest.raises(ValueError, match="line 2 has prompt=''"):
        load_prompt_rows(str(tmp_path / "empty.jsonl"))
    (tmp_path / "torn.jsonl").write_text('{"prompt": "a"}\n{"prom')
    with pytest.raises(ValueError, match=r"must be a file \(.jsonl, .json, .csv, .parquet\), a folder or a hub name"):
        load_prompt_rows(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        load_prompt_rows(str(tmp_path / "torn.jsonl"))


TEXTS = [f"prompt {n}" for n in range(60)] + ["a\u2028b", "c\u0085d", "e\x0cf", 'ä, "g"', "12", "NA"]


def test_prompts_of_every_kind_of_file_are_the_same(tmp_path):
    rows = [{"prompt": text} for text in TEXTS]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "plain.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "windows.jsonl").write_bytes(lines.replace("\n", "\r\n").encode("utf-8-sig"))
    (tmp_path / "wide.jsonl").write_text(lines, encoding="utf-16")
    (tmp_path / "lines.json").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8-sig")
    Dataset.from_list(rows).to_parquet(tmp_path / "table.parquet")
    for encoding in ("utf-8", "utf-8-sig"):
        with open(tmp_path / f"{encoding}.csv", "w", newline="", encoding=encoding) as file:
            csv.writer(file).writerows([["id", "prompt"], *enumerate(TEXTS)])
    found = {path.name: [row.prompt for row in read_prompt_rows(str(path))] for path in sorted(tmp_path.iterdir())}
    assert len(found) == 8 and all(texts == TEXTS for texts in found.values()), found.keys()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe4"}\n', "line 2 is not UTF-8"),
        ("a.csv", b"prompt\na\n\xe4\n", "line 3 is not UTF-8"),
        ("a.json", b'[{"prompt": "a"},\n{"prompt": "\xe4"}]', "line 2 is not UTF-8"),
        ("a.jsonl", b'{"prompt": "a"}\n\n["b"]\n', "line 3 must be a JSON object"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": 5}\n', "line 2 has prompt=5; it must be text"),
        ("a.jsonl", b'{"prompt": "\\ud800"}\n', "line 1 has a prompt that is not text"),
        ("a.json", b'[{"prompt": "a"}, {"prompt": null}]', "entry 2 has prompt=None"),
        ("a.json", b'[{"prompt": "a"}, 5]', "entry 2 must be a JSON object"),
        ("a.json", b'[{"prompt": "a"}', "is not JSON"),
        ("a.csv", b'prompt\na\n"b\n', "is not CSV"),
        ("a.csv", b"prompt;id\na;1\n", "has the columns 'prompt;id' and must have 'prompt'"),
        ("a.csv", b"", "has no rows; give a dataset that has some"),
        ("a.parquet", b"not one", "must be a file"),
        ("a.txt", b"prompt", "ends in '.txt'; a file must end in .jsonl, .json, .csv, .parquet"),
        ("a.jsonl", None, "must be an existing file"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path, name, content, message):
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read_prompt_rows(str(tmp_path / name))
    assert str(tmp_path / name) in str(raised.value) and "\n" not in str(raised.value)


def test_prompts_are_chosen_without_repetition_and_alike_however_they_are_asked_for():
    series = select_prompts(10, 0, 30, seed=1)
    assert [sorted(series[start : start + 10]) for start in (0, 10, 20)] == [list(range(10))] * 3
    assert series[:10] != series[10:20]
    assert series == [index for first in range(0, 30, 6) for index in select_prompts(10, first, 6, seed=1)]


def drawn_by(curriculum, count, num_draws, first=0):
    """The prompts of each draw of `count` prompts, and the position after the last."""
    draws = []
    for _ in range(num_draws):
        draw = curriculum.select(first, count, seed=1)
        first = draw.position
        draws.append(draw.indices)
    return draws, first


def test_without_pass_rates_a_curriculum_draws_the_series():
    draws, position = drawn_by(Curriculum(10, 0.2, 0.8, 0), 4, 6)
    assert [*chain(*draws)] == select_prompts(10, 0, 24, seed=1) and position == 24


def test_a_curriculum_skips_prompts_outside_its_window_in_the_order_of_the_series():
    curriculum = Curriculum(10, 0.25, 0.75, 0)
    curriculum.note([(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, float("nan")), (6, 0.2)])
    draws, position = drawn_by(curriculum, 7, 3)
    series = select_prompts(10, 0, position, seed=1)
    assert [*chain(*draws)] == [index for index in series if index not in (0, 4, 6)] and len([*chain(*draws)]) == 21


def test_a_prompt_is_drawn_again_after_it_was_skipped_as_often_as_allowed():
    curriculum = Curriculum(10, 0.25, 0.75, 2)
    curriculum.note([(3, 0.0)])
    draws, position = drawn_by(curriculum, 3, 12)
    series = select_prompts(10, 0, position, seed=1)
    skipped = [place for place, index in enumerate(series) if index == 3][:2]
    assert len(skipped) == 2 and [*chain(*draws)].count(3) >= 1
    assert [*chain(*draws)] == [index for place, index in enumerate(series) if place not in skipped]
    curriculum.note([(3, 1.0)])
    assert curriculum.skips[3] == 0


def test_where_too_few_prompts_are_left_the_first_that_were_skipped_are_drawn():
    curriculum = Curriculum(6, 0.5, 0.5, 0)
    curriculum.note((index, 1.0) for index in range(5))
    draw, order = curriculum.select(0, 4, seed=1), select_prompts(6, 0, 6, seed=1)
    assert draw.indices == [5, *[index for index in order if index != 5][:3]]
    assert (draw.position, draw.num_outside) == (6, 3)
    assert curriculum.skips.tolist() == [int(index not in draw.indices) for index in range(6)]
    assert len(curriculum.select(6, 20, seed=1).indices) == 20  # more than there are


def test_a_curriculum_continues_where_its_state_was_saved():
    curriculum, other = Curriculum(10, 0.25, 0.75, 2), Curriculum(10, 0.25, 0.75, 2)
    curriculum.note((index, index / 10) for index in range(10))
    _, position = drawn_by(curriculum, 3, 5)
    state = curriculum.state()
    expected = drawn_by(curriculum, 3, 5, position)
    other.load(state)
    assert drawn_by(other, 3, 5, position) == expected
