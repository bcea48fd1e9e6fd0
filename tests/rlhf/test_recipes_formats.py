"""The field's data formats: rows read from every kind of file, checked, and turned into token ids."""

import csv
import json
import re
from dataclasses import replace

import pytest
from datasets import Dataset
from transformers import LlamaConfig

from hybrid_engine.config.notices import say_once
from hybrid_engine.recipes import grpo, sft
from hybrid_engine.rlhf.data.encoding import Encoded, encode_completion, encode_pair, encode_prompt
from hybrid_engine.rlhf.data.parts import load_parts, prompt_key
from hybrid_engine.rlhf.data.prompts import keep_fitting, limit_of, load_prompt_rows
from hybrid_engine.rlhf.data.reading import (
    read_labelled_rows,
    read_learned_rows,
    read_preference_rows,
    read_prompt_rows,
)
from hybrid_engine.rlhf.data.rows import (
    CompletionRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    PromptRow,
    TextRow,
    detect_format,
)
from hybrid_engine.rlhf.experience.start import SUMS, load_usable_prompts
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.tasks.corpus import load_corpus
from tests.support.chat import MARKED_TEMPLATE, PLAIN_TEMPLATE, build_chat_tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


QUESTION, YES, NO = [user("sky?")], [assistant("blue")], [assistant("green")]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (["prompt"], "prompts"),
        (["prompt", "answer"], "prompts"),
        (["prompt", "completion"], "prompts with answers"),
        (["messages", "prompt"], "conversations"),
        (["chosen", "rejected"], "preference pairs"),
        (["chosen", "rejected", "prompt", "margin"], "preference pairs"),
        (["completion", "label", "prompt"], "labelled answers"),
        (["text"], "plain text"),
        (["question", "label"], None),
    ],
)
def test_a_format_is_told_by_its_columns(columns, name):
    assert detect_format(columns) == name


READ = [
    (read_prompt_rows, {"prompt": "a", "answer": 3}, PromptRow(prompt="a", columns={"answer": 3})),
    (read_prompt_rows, {"prompt": QUESTION}, PromptRow(prompt=QUESTION)),
    (read_learned_rows, {"prompt": "a", "completion": "b"}, CompletionRow(prompt="a", completion="b")),
    (read_learned_rows, {"prompt": QUESTION, "completion": YES}, CompletionRow(prompt=QUESTION, completion=YES)),
    (
        read_learned_rows,
        {"prompt": "sky?", "messages": QUESTION + YES},
        ConversationRow(messages=QUESTION + YES, columns={"prompt": "sky?"}),
    ),
    (read_learned_rows, {"text": "a b"}, TextRow(text="a b")),
    (
        read_preference_rows,
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5, "from": "x"},
        PreferenceRow(prompt="a", chosen="b", rejected="c", margin=0.5, columns={"from": "x"}),
    ),
    (
        read_preference_rows,
        {"prompt": QUESTION, "chosen": YES, "rejected": NO},
        PreferenceRow(prompt=QUESTION, chosen=YES, rejected=NO),
    ),
    (
        read_preference_rows,  # the prompt implicit, in conversations
        {"chosen": QUESTION + YES, "rejected": QUESTION + NO},
        PreferenceRow(prompt=QUESTION, chosen=YES, rejected=NO),
    ),
    (
        read_preference_rows,  # ... and held by them beside a column of it, as ultrafeedback has it
        {"prompt": "sky?", "chosen": QUESTION + YES, "rejected": QUESTION + NO},
        PreferenceRow(prompt=QUESTION, chosen=YES, rejected=NO),
    ),
    (
        read_preference_rows,  # ... and in text, whose words stay whole
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
        PreferenceRow(prompt="The sky is", chosen=" blue.", rejected=" black."),
    ),
    (
        read_labelled_rows,
        {"prompt": "a", "completion": "b", "label": False},
        LabelledRow(prompt="a", completion="b", label=False),
    ),
    (
        read_labelled_rows,
        {"prompt": QUESTION, "completion": YES, "label": 1},
        LabelledRow(prompt=QUESTION, completion=YES, label=True),
    ),
]


def fields(row):
    return {name: value for name, value in vars(row).items() if name not in ("place", "columns")}


KINDS = ["jsonl", "json", "csv", "parquet", "saved", "folder"]


def is_text(columns):
    """Whether a CSV file can hold them."""
    return not any(isinstance(value, list) for value in columns.values())


@pytest.mark.parametrize(
    ("kind", "read", "columns", "expected"),
    [(kind, *case) for kind in KINDS for case in READ if kind != "csv" or is_text(case[1])],
)
def test_every_format_is_read_alike_from_every_kind_of_file(tmp_path, kind, read, columns, expected):
    rows, path = [columns] * 2, tmp_path / f"data.{kind}"
    if kind == "jsonl":
        write(path, rows)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([columns, *(row.values() for row in rows)])
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif kind == "saved":
        Dataset.from_list(rows).save_to_disk(path)
    else:
        path.mkdir()
        write(path / "train.jsonl", rows)
    found = read(str(path))
    assert [type(row) for row in found] == [type(expected)] * 2
    assert [fields(row) for row in found] == [fields(expected)] * 2
    assert found[1].place.startswith(f"--dataset={str(path)!r}: ") and found[1].place[-1] in "23"
    assert {name: str(value) for name, value in found[0].columns.items()} == {
        name: str(value) for name, value in expected.columns.items()
    }


def test_preference_pairs_give_a_good_and_a_bad_answer_each(tmp_path):
    path = write(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert [fields(row) for row in read_labelled_rows(path)] == [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "completion": "c", "label": False},
    ]


def test_a_text_that_answers_a_conversation_is_a_turn_of_the_assistant(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompt": QUESTION, "responses": ["yes", "no"]}])
    (row,) = read_learned_rows(DataSource(datasets=(path,), columns=("responses.0=completion",)))
    assert (row.prompt, row.completion) == (QUESTION, [assistant("yes")])


def test_keys_that_datasets_adds_to_messages_are_dropped(tmp_path):
    turns = [user("a"), {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, assistant("b")]
    Dataset.from_list([{"messages": turns}]).to_parquet(tmp_path / "data.parquet")
    (row,) = read_learned_rows(str(tmp_path / "data.parquet"))
    assert row.messages == [turns[0], {"role": "assistant", "tool_calls": [{"name": "f"}]}, turns[2]]


BAD = [
    (read_prompt_rows, {"prompt": 5}, "line 2 has prompt=5; it must be text or a list of messages, not empty"),
    (read_prompt_rows, {"prompt": []}, "line 2 has prompt=[]; it must be text or a list of messages, not empty"),
    (read_prompt_rows, {"prompt": ["a"]}, "line 2 has prompt[0]='a'; a message must be like"),
    (read_prompt_rows, {"prompt": [{"role": "user"}]}, "line 2 has prompt[0]={'role': 'user'}; a message must be like"),
    (read_prompt_rows, {"prompt": [{"role": "user", "content": 3}]}, "line 2 has prompt[0]['content']=3; it must be"),
    (read_prompt_rows, {}, "line 2 has prompt=None"),
    (read_learned_rows, {"prompt": "a", "completion": ""}, "line 2 has completion=''; it must be text"),
    (
        read_learned_rows,
        {"prompt": "a", "completion": YES},
        "text in prompt and a conversation in completion; use the same",
    ),
    (
        read_preference_rows,
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        "line 2 has equal chosen and rejected answers",
    ),
    (read_preference_rows, {"prompt": "a", "chosen": "b", "rejected": 3}, "line 2 has rejected=3; it must be text"),
    (read_preference_rows, {"prompt": "a", "chosen": "b", "rejected": NO}, "text in one of chosen and rejected"),
    (read_preference_rows, {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "line 2 has margin='x'; it"),
    (read_preference_rows, {"prompt": "a", "chosen": "b", "rejected": "c", "margin": None}, "has margin=None; it must"),
    (
        read_preference_rows,
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e300},
        "finite number from -1e+12 to 1e+12",
    ),
    (read_labelled_rows, {"prompt": "a", "completion": "b", "label": "good"}, "line 2 has label='good'; it must be"),
    (read_labelled_rows, {"prompt": "a", "completion": "b", "label": 2}, "line 2 has label=2; it must be true for"),
    (read_labelled_rows, {"prompt": "a", "completion": "b"}, "line 2 has label=None; it must be true"),
]
GOOD = {
    read_prompt_rows: {"prompt": "a"},
    read_learned_rows: {"prompt": "a", "completion": "b"},
    read_preference_rows: {"prompt": "a", "chosen": "b", "rejected": "c"},
    read_labelled_rows: {"prompt": "a", "completion": "b", "label": True},
}


@pytest.mark.parametrize(("read", "columns", "message"), BAD)
def test_a_bad_value_is_named_with_its_row_and_column(tmp_path, read, columns, message):
    path = write(tmp_path / "data.jsonl", [GOOD[read], columns])
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read(path)
    assert str(raised.value).startswith(f"--dataset={path!r}: line 2")


@pytest.mark.parametrize(
    ("read", "columns", "message"),
    [
        (read_prompt_rows, {"question": "a"}, "has the columns 'question' and must have 'prompt'; rename"),
        (
            read_learned_rows,
            {"prompt": "a"},
            "has the columns 'prompt' (prompts) and must have 'completion'; or 'messages', or 'text': rename",
        ),
        (
            read_preference_rows,
            {"prompt": "a", "completion": "b"},
            "(prompts with answers) and must have 'chosen' and 'rejected'; rename",
        ),
        (read_labelled_rows, {"prompt": "a", "completion": "b"}, "(prompts with answers) and must have 'label'"),
        (read_learned_rows, {"messages": "hello"}, "line 1 has text in messages; it must be a list of messages"),
        (read_learned_rows, {"messages": QUESTION}, "line 1 has messages without an assistant turn"),
        (read_preference_rows, {"chosen": "a b", "rejected": "c d"}, "line 1: chosen and rejected have no common"),
        (read_preference_rows, {"chosen": QUESTION, "rejected": QUESTION + NO}, "differ only after the end of one"),
    ],
)
def test_a_data_set_of_another_format_is_refused_with_the_remedy(tmp_path, read, columns, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(write(tmp_path / "data.jsonl", [columns]))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "prompt,answer\na,1\nb,2,3\n",
            "line 3 has 3 values for 2 columns; fix it, with double quotes around values",
        ),
        ("a.csv", "prompt,answer\na\n", "line 2 has 1 values for 2 columns"),
        ("a.csv", "prompt,prompt\na,b\n", "line 1 names the column 'prompt' 2 times; rename the others"),
        ("a.csv", "prompt,answer\n", "has no rows; give a dataset that has some"),
        ("a.jsonl", "\n\n", "has no rows; give a dataset that has some"),
        ("a.json", "[]", "has no rows; give a dataset that has some"),
    ],
)
def test_a_file_whose_rows_are_not_what_they_seem_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"^--dataset='.*{name}'.*{re.escape(message)}"):
        read_prompt_rows(str(tmp_path / name))


def test_the_ending_of_a_file_may_be_in_capitals_and_an_empty_line_is_no_row(tmp_path):
    (tmp_path / "a.CSV").write_text("prompt,answer\n\na,1\n\n")
    assert [row.prompt for row in read_prompt_rows(str(tmp_path / "a.CSV"))] == ["a"]


def test_a_label_may_be_a_number(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (1.0, 0.0, 1, 0)]
    found = read_labelled_rows(write(tmp_path / "data.jsonl", rows))
    assert [row.label for row in found] == [True, False, True, False]


def test_a_data_set_without_rows_is_refused(tmp_path):
    Dataset.from_dict({"prompt": []}).save_to_disk(tmp_path / "data")
    with pytest.raises(ValueError, match=r"must be a file \(.jsonl.* or a hub name"):
        read_prompt_rows(str(tmp_path / "data"))


def test_held_out_rows_share_no_prompt_with_the_others_and_keep_their_columns(tmp_path):
    rows = [{"prompt": [user(f"{n // 2} + 1")], "answer": n // 2 + 1} for n in range(80)]
    path = write(tmp_path / "data.jsonl", rows)
    train, held_out = parts_of(path, read_prompt_rows, held_out_share=0.3)
    prompts = [{row.prompt[0]["content"] for row in part} for part in (train, held_out)]
    assert not prompts[0] & prompts[1] and len(train) + len(held_out) == 80 and 8 <= len(held_out) <= 40
    assert parts_of(path, read_prompt_rows, held_out_share=0)[1] == []
    train, held_out = load_prompt_rows(path)
    assert len(train) + len(held_out) == 80 and all(
        eval(row.prompt[0]["content"]) == row.columns["answer"] for row in train
    )


def parts_of(path, read, columns=(), **options):
    return load_parts(DataSource(datasets=(path,), **options), read, columns)


def test_conversations_with_one_prompt_and_several_answers_are_held_out_together(tmp_path):
    first = [[user(f"sum {n // 3}"), assistant("?"), user("so?")] for n in range(90)]
    chats = [{"messages": [*turns, assistant(f"answer {n}")]} for n, turns in enumerate(first)]
    pairs = [{"prompt": turns, "completion": [assistant(f"answer {n}")]} for n, turns in enumerate(first)]
    prompts = [{"prompt": turns} for turns in first]
    held_out_prompts = []
    for rows, read in ((chats, read_learned_rows), (pairs, read_learned_rows), (prompts, read_prompt_rows)):
        train, held_out = parts_of(write(tmp_path / "data.jsonl", rows), read)
        asked = [
            [json.dumps((row.messages if isinstance(row, ConversationRow) else row.prompt)[:3]) for row in part]
            for part in (train, held_out)
        ]
        assert len(train) + len(held_out) == 90 and 6 <= len(held_out) <= 45 and set(asked[0]).isdisjoint(asked[1])
        held_out_prompts.append(asked[1])
    assert held_out_prompts[0] == held_out_prompts[1] == held_out_prompts[2]


def test_a_prompt_is_the_same_as_text_as_a_conversation_and_below_a_system_turn():
    system = {"role": "system", "content": "Be brief."}
    assert prompt_key("2 + 2?") == prompt_key([user("2 + 2?")]) == prompt_key([system, user("2 + 2?")]) == "2 + 2?"
    keys = {prompt_key(turns) for turns in ("a", [user("a"), assistant("b")], [assistant("a")], [system], [user("b")])}
    assert len(keys) == 5


def test_a_conversation_that_answers_a_held_out_prompt_on_its_way_is_not_trained_on(tmp_path, capsys):
    single = [[user(f"q {n}"), assistant("a")] for n in range(40)]
    longer = [[user(f"q {n}"), assistant("b"), user(f"then {n}"), assistant("c")] for n in range(40)]
    path = write(tmp_path / "data.jsonl", [{"messages": turns} for turns in single + longer])
    train, held_out = parts_of(path, read_learned_rows, held_out_share=0.3)
    asked = {row.messages[0]["content"] for row in held_out if len(row.messages) == 2}
    assert asked and asked.isdisjoint(row.messages[0]["content"] for row in train)
    assert (
        f"{80 - len(train) - len(held_out)} conversations are left out because an earlier "
        "turn answers a held-out prompt"
    ) in capsys.readouterr().out


def test_a_held_out_prompt_with_another_answer_is_another_task_unless_the_row_key_is_the_prompt(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(9)])
    told = write(tmp_path / "told.jsonl", [{"prompt": "2+2=", "answer": "four"}, {"prompt": "3+2=", "answer": "5"}])
    for row_key, prompts in ((), ("2+2=", "4+2=")), (("prompt",), ("4+2=",)):
        options = {"held_out_dataset": told, "row_key": row_key}
        train, held_out = parts_of(path, read_prompt_rows, ["answer"], **options)
        trained = {row.prompt for row in train}
        assert [row.prompt for row in held_out] == ["2+2=", "3+2="] and trained.issuperset(prompts)
        assert len(trained) == 8 - len(row_key)
    mixed = [{"prompt": f"{n // 2}+2=", "answer": str(n)} for n in range(200)]
    path = write(tmp_path / "mixed.jsonl", mixed)
    parts = {key: parts_of(path, read_prompt_rows, ["answer"], row_key=key) for key in ((), ("prompt",))}
    in_both = {
        key: {row.prompt for row in train} & {row.prompt for row in held} for key, (train, held) in parts.items()
    }
    assert in_both[()] and not in_both[("prompt",)]


def test_a_question_with_two_written_solutions_is_one_task_and_others_are_told(tmp_path, capsys):
    rows = [{"prompt": f"{n}*2=", "answer": f"{how} #### {2 * n}"} for n in range(99) for how in ("double", "add")]
    path = write(tmp_path / "data.jsonl", rows)
    for rewards, is_one_task in ((["number"], True), (["exact:after=####", "length:most=9"], True), (None, False)):
        columns = load_rewards(rewards).task_columns if rewards else ["answer"]
        train, held_out = parts_of(path, read_prompt_rows, columns)
        in_both = {row.prompt for row in train} & {row.prompt for row in held_out}
        assert bool(in_both) != is_one_task
        assert ("are also trained on, with other values of 'answer'" in capsys.readouterr().out) != is_one_task


def test_one_prompt_with_many_seeds_is_many_rows_and_the_seeds_are_held_out(tmp_path):
    games = [{"prompt": "Play the game.", "seed": seed, "id": n} for n, seed in enumerate([*range(60), *range(60)])]
    path = write(tmp_path / "games.jsonl", [*games, *({"prompt": f"p{n}", "seed": 0} for n in range(60))])
    train, held_out = load_prompt_rows(path)
    assert len(train) + len(held_out) == 180
    others = [[row.prompt for row in part if row.prompt[0] == "p"] for part in (train, held_out)]
    for columns, options in ((["seed"], {}), ([], {"row_key": ("seed",)})):
        train, held_out = parts_of(path, read_prompt_rows, columns, **options)
        seeds = [{row.columns["seed"] for row in part if row.prompt[0] == "P"} for part in (train, held_out)]
        assert seeds[0] | seeds[1] == set(range(60)) and not seeds[0] & seeds[1] and 1 <= len(seeds[1]) <= 15
        assert len(train) + len(held_out) == 180
        # where one prompt is one task, what a reward reads changes nothing
        assert [[row.prompt for row in part if row.prompt[0] == "p"] for part in (train, held_out)] == others


def test_rows_that_say_the_same_are_left_out_only_if_asked(tmp_path, capsys):
    rows = [{"prompt": f"p{n // 2}", "completion": "a" if n % 4 else "b", "seed": n // 4} for n in range(80)]
    path = write(tmp_path / "data.jsonl", rows)
    assert sum(map(len, parts_of(path, read_learned_rows))) == 80
    assert sum(map(len, parts_of(path, read_learned_rows, deduplicates=True))) == 60  # the answers of half differ
    assert sum(map(len, parts_of(path, read_prompt_rows, deduplicates=True))) == 40
    assert "--deduplicate: 20 of 80 rows are duplicates and are left out" in capsys.readouterr().out
    games = write(tmp_path / "games.jsonl", [{"prompt": "Play.", "seed": n // 2} for n in range(80)])
    assert sum(map(len, parts_of(games, read_prompt_rows, ["seed"], deduplicates=True))) == 40


def test_bad_rows_are_told_together_or_left_out(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    bad = ['{"prompt": 5}', "torn", '{"prompt": ""}', "[]", '{"prompt": null}', '{"prompt": [{"role": "user"}]}']
    path.write_text("\n".join(['{"prompt": "a"}', *bad, '{"prompt": "b"}']))
    with pytest.raises(ValueError, match="6 of 8 rows cannot be used") as raised:
        read_prompt_rows(str(path))
    words = str(raised.value)
    assert words.startswith(f"--dataset={str(path)!r}: 6 of 8 rows cannot be used: line 2 has prompt=5; ")
    assert all(f"line {n} " in words for n in (2, 3, 4, 5, 6)) and "line 7" not in words and "| and 1 more;" in words
    assert words.endswith("--skip-bad-rows leaves them out") and "\n" not in words
    source = DataSource(datasets=(str(path),), skips_bad_rows=True)
    assert [row.prompt for row in read_prompt_rows(source)] == ["a", "b"]
    assert "6 of 8 rows are left out: line 2 has prompt=5;" in capsys.readouterr().out.replace("\n", " ")
    path.write_text("torn\n[]\n")
    with pytest.raises(ValueError, match=r"--skip-bad-rows leaves none of 2 rows of --dataset=.*line 1 is not JSON"):
        read_prompt_rows(source)


def test_an_object_that_names_a_key_twice_is_a_bad_row(tmp_path):
    twice = '{"prompt": "a", "answer": {"value": 1, "value": 2}}'
    (tmp_path / "data.jsonl").write_text(f'{{"prompt": "a"}}\n{{"prompt": "b", "prompt": "c"}}\n{twice}\n')
    with pytest.raises(
        ValueError, match=r"line 2 is not JSON .*names 'prompt' 2 times.*line 3 .*names 'value' 2 times"
    ):
        read_prompt_rows(str(tmp_path / "data.jsonl"))
    (tmp_path / "data.json").write_text(f"[{twice}]")
    with pytest.raises(ValueError, match=r"data.json' is not JSON .*names 'value' 2 times"):
        read_prompt_rows(str(tmp_path / "data.json"))


BAD_IN_STEPS = [  # as they are read, as a reward reads them, as they become tokens
    (0, {"prompt": 5, "answer": "1"}, "line 1 has prompt=5"),
    (300, {"prompt": QUESTION, "answer": "none"}, "line 301 has answer='none', which has no number in it"),
    (301, {"prompt": QUESTION}, "line 302 has no 'answer'"),
    (999, {"prompt": [{"role": "alien", "content": "a"}], "answer": "1"}, "line 1000: the chat template refuses"),
]


def test_rows_that_are_too_long_are_told_with_those_that_cannot_be_read_or_held_out(tmp_path, capsys):
    rows = [{"prompt": f"{n}?", "completion": "a" * (200 if n in (7, 8) else 1)} for n in range(100)]
    rows[3] = {"prompt": 5, "completion": "a"}
    build_chat_tokenizer().save_pretrained(tmp_path / "model")
    LlamaConfig().save_pretrained(tmp_path / "model")
    path, held_out = write(tmp_path / "data.jsonl", rows), write(tmp_path / "held_out.jsonl", rows[6:8])
    config = sft.Config(model=str(tmp_path / "model"), dataset=path, max_tokens=100, held_out_dataset=held_out)
    with pytest.raises(
        ValueError, match=r"3 of 102 rows cannot be used: line 4 has prompt=5.* line 9 has 203 .*line 2 has"
    ):
        load_corpus(config)
    _, corpus = load_corpus(replace(config, skip_bad_rows=True))
    assert (len(corpus.train), len(corpus.held_out)) == (96, 1)
    assert f"--skip-bad-rows: --held-out-dataset={held_out!r}: 1 of 2 rows are left out: " in capsys.readouterr().out


def test_rows_that_are_bad_for_several_reasons_are_told_in_one_error(tmp_path, capsys):
    rows = [{"prompt": [user(f"{n}?")], "answer": str(n)} for n in range(1000)]
    for index, row, _ in BAD_IN_STEPS:
        rows[index] = row
    path = write(tmp_path / "data.jsonl", rows)
    strict = "{% if messages[0].role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}" + PLAIN_TEMPLATE
    tokenizer, rewards = build_chat_tokenizer(strict), load_rewards(["number"])
    config = grpo.Config(model="m", dataset=path, reward=("number",))
    with pytest.raises(ValueError, match="4 of 1000 rows cannot be used") as raised:
        load_usable_prompts(config, SUMS, tokenizer, rewards)
    assert all(words in str(raised.value) for _, _, words in BAD_IN_STEPS)
    skipping = replace(config, skip_bad_rows=True)
    train, held_out, _ = load_usable_prompts(skipping, SUMS, tokenizer, rewards)
    assert len(train) + len(held_out) == 996
    few = write(tmp_path / "few.jsonl", rows[:2])  # nothing to hold out, which comes after what is bad
    with pytest.raises(ValueError, match="line 1 has prompt=5"):
        load_usable_prompts(replace(config, dataset=few), SUMS, tokenizer, rewards)


def texts(tokenizer, *parts):
    return tuple(tokenizer.decode(ids) for ids in parts)


def learned(tokenizer, encoded):
    """The text of the tokens that are learned."""
    mask = encoded.loss_mask or [True] * len(encoded.response_ids)
    assert len(mask) == len(encoded.response_ids) and mask[-1]
    return tokenizer.decode([token for token, kept in zip(encoded.response_ids, mask, strict=True) if kept])


def pair_texts(tokenizer, pair):
    """The prompt's text, which both answers have, and theirs."""
    assert pair.chosen.prompt_ids == pair.rejected.prompt_ids
    return texts(tokenizer, pair.chosen.prompt_ids, pair.chosen.response_ids, pair.rejected.response_ids)


def test_text_is_encoded_apart_and_ends_with_the_end_of_sequence_token():
    tokenizer = build_chat_tokenizer(None)
    encoded = encode_completion(tokenizer, CompletionRow(prompt="ab", completion="cd"))
    assert texts(tokenizer, encoded.prompt_ids, encoded.response_ids) == ("ab", "cd<eos>")
    assert encoded.loss_mask is None and len(encoded) == 5
    assert encoded.prompt_ids == encode_prompt(tokenizer, PromptRow(prompt="ab"))
    pair = encode_pair(tokenizer, PreferenceRow(prompt="ab", chosen="cd", rejected="e"))
    assert pair_texts(tokenizer, pair) == ("ab", "cd<eos>", "e<eos>")
    encoded = encode_completion(tokenizer, TextRow(text="abc"))
    assert texts(tokenizer, encoded.prompt_ids, encoded.response_ids) == ("a", "bc<eos>")


def test_a_prompt_has_the_token_that_begins_a_text_and_not_the_one_that_ends_it():
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_chat_tokenizer(None)
    specials = [("<start>", tokenizer.convert_tokens_to_ids("<start>")), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<start> $A <eos>", special_tokens=specials)
    encoded = encode_completion(tokenizer, CompletionRow(prompt="ab", completion="cd"))
    assert texts(tokenizer, encoded.prompt_ids, encoded.response_ids) == ("<start>ab", "cd<eos>")


def test_text_that_a_template_has_rendered_gets_no_second_beginning_and_end(caplog):
    from tokenizers.processors import TemplateProcessing

    say_once.cache_clear()
    tokenizer = build_chat_tokenizer("{{ '<start>' }}" + PLAIN_TEMPLATE)
    specials = [("<start>", tokenizer.convert_tokens_to_ids("<start>")), ("<eos>", tokenizer.eos_token_id)]
    for single in ("<start> $A", "<start> $A <eos>"):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=specials)
        turns = [user("a"), assistant("b")]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        completion = whole.removeprefix(prompt)
        assert completion == "b<eos>\n"
        rendered = encode_completion(tokenizer, CompletionRow(prompt=prompt, completion=completion))
        assert rendered == encode_completion(tokenizer, CompletionRow(prompt=turns[:1], completion=turns[1:]))
        assert encode_prompt(tokenizer, PromptRow(prompt=prompt)) == rendered.prompt_ids
        text = encode_completion(tokenizer, TextRow(text=whole))
        assert text.prompt_ids + text.response_ids == rendered.prompt_ids + rendered.response_ids
        pair = encode_pair(tokenizer, PreferenceRow(prompt=prompt, chosen=completion, rejected="c"))
        assert pair_texts(tokenizer, pair) == (prompt, "b<eos>", "c<eos>")
    assert caplog.messages == [
        "text already begins with <start>; the tokenizer adds no second one",
        "text already ends with <eos>; no <eos> is added after it",
    ]
    with pytest.raises(ValueError, match="this row has text of one token, '<eos>', which has no token before it"):
        encode_completion(build_chat_tokenizer(None), TextRow(text="<eos>"))


def test_what_a_chat_template_is_not_asked_or_does_not_say_is_said_in_one_line(caplog):
    say_once.cache_clear()
    unmarked, marked, none = (build_chat_tokenizer(template) for template in (PLAIN_TEMPLATE, MARKED_TEMPLATE, None))
    text = PromptRow(prompt="Hi")
    turns = CompletionRow(prompt=[user("a")], completion=TWO_TURNS[1:])
    for quiet, row in (
        (none, CompletionRow(prompt="a", completion="b")),
        (unmarked, CompletionRow(prompt="<start>user\nHi<eos>\n<start>assistant\n", completion="b")),
        (unmarked, TextRow(text="a b")),
        (unmarked, ConversationRow(messages=TWO_TURNS[:2])),
        (marked, ConversationRow(messages=TWO_TURNS)),
        (marked, turns),
    ):
        encode_completion(quiet, row)
    encode_prompt(none, text)
    assert caplog.messages == []
    for _ in range(2):
        encode_prompt(unmarked, text)
        encode_completion(unmarked, ConversationRow(messages=TWO_TURNS))
        encode_completion(unmarked, turns)
    begins = "the chat template does not mark the assistant's tokens ({% generation %}): "
    assert caplog.messages == [
        "prompts are text, so the model's chat template is not applied; --as-conversation makes them turns "
        'of a user, [{"role": "user", "content": ...}]',
        begins + "only the last turn of a conversation is learned",
        begins + "turns of other roles within an answer are learned too",
    ]


TWO_TURNS = [user("a"), assistant("b"), user("c"), assistant("d")]
OPENED = "<start>user\nsky?<eos>\n<start>assistant\n"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_a_conversation_is_rendered_by_the_chat_template_up_to_the_end_of_its_answer(template):
    tokenizer = build_chat_tokenizer(template)
    assert texts(tokenizer, encode_prompt(tokenizer, PromptRow(prompt=QUESTION))) == (OPENED,)
    encoded = encode_completion(tokenizer, CompletionRow(prompt=QUESTION, completion=YES))
    assert texts(tokenizer, encoded.prompt_ids, encoded.response_ids) == (OPENED, "blue<eos>")
    assert encoded.loss_mask is None
    pair = encode_pair(tokenizer, PreferenceRow(prompt=QUESTION, chosen=YES, rejected=NO))
    assert pair_texts(tokenizer, pair) == (OPENED, "blue<eos>", "green<eos>")


def test_where_the_template_marks_the_assistants_tokens_all_its_turns_and_nothing_else_are_learned():
    tokenizer = build_chat_tokenizer(MARKED_TEMPLATE)
    encoded = encode_completion(tokenizer, ConversationRow(messages=TWO_TURNS))
    assert learned(tokenizer, encoded) == "b<eos>d<eos>"
    assert tokenizer.decode(encoded.response_ids) == "b<eos>\n<start>user\nc<eos>\n<start>assistant\nd<eos>"
    encoded = encode_completion(tokenizer, CompletionRow(prompt=TWO_TURNS[:1], completion=TWO_TURNS[1:]))
    assert learned(tokenizer, encoded) == "b<eos>d<eos>"
    encoded = encode_completion(tokenizer, CompletionRow(prompt=TWO_TURNS[:3], completion=TWO_TURNS[3:]))
    assert learned(tokenizer, encoded) == "d<eos>"  # not the assistant's turn in the prompt


def test_of_a_pair_too_the_template_says_which_tokens_are_learned():
    tokenizer = build_chat_tokenizer(MARKED_TEMPLATE)
    other = [assistant("b"), user("c"), assistant("e")]
    pair = encode_pair(tokenizer, PreferenceRow(prompt=TWO_TURNS[:1], chosen=TWO_TURNS[1:], rejected=other))
    assert [learned(tokenizer, answer) for answer in pair] == ["b<eos>d<eos>", "b<eos>e<eos>"]
    assert pair_texts(tokenizer, pair)[1] == "b<eos>\n<start>user\nc<eos>\n<start>assistant\nd<eos>"


def test_two_answers_that_the_template_makes_equal_are_refused():
    tokenizer = build_chat_tokenizer(PLAIN_TEMPLATE.replace("message['content']", "message['content'] | trim"))
    row = PreferenceRow(prompt=QUESTION, chosen=YES, rejected=[assistant("blue ")], place="line 3")
    with pytest.raises(ValueError, match="line 3 has chosen and rejected answers that become the same tokens"):
        encode_pair(tokenizer, row)


def test_without_marks_the_completion_is_learned_and_of_messages_the_last_turn():
    tokenizer = build_chat_tokenizer(PLAIN_TEMPLATE)
    assert learned(tokenizer, encode_completion(tokenizer, ConversationRow(messages=TWO_TURNS))) == "d<eos>"
    encoded = encode_completion(tokenizer, CompletionRow(prompt=TWO_TURNS[:1], completion=TWO_TURNS[1:]))
    assert learned(tokenizer, encoded) == "b<eos>\n<start>user\nc<eos>\n<start>assistant\nd<eos>"


def test_a_prompt_that_ends_with_the_assistants_words_is_gone_on_from():
    tokenizer = build_chat_tokenizer()
    row = PromptRow(prompt=[user("sky?"), assistant("It is")])
    assert texts(tokenizer, encode_prompt(tokenizer, row)) == (OPENED + "It is",)


def test_the_prompt_of_a_pair_ends_where_a_template_opens_its_two_answers_otherwise():
    template = PLAIN_TEMPLATE.replace("+ message['content']", "+ message.get('thought', '') + message['content']")
    template = template.replace("{{ '<start>assistant\n' }}", "{{ '<start>assistant\n<think>' }}")
    tokenizer = build_chat_tokenizer(template)
    thinking = [{**YES[0], "thought": "<think>hm</think>"}]
    pair = encode_pair(tokenizer, PreferenceRow(prompt=QUESTION, chosen=thinking, rejected=NO))
    assert pair_texts(tokenizer, pair) == (OPENED, "<think>hm</think>blue<eos>", "green<eos>")


def variables(given):
    return PromptRow(prompt=QUESTION, columns={"chat_template_kwargs": given})


def test_tools_of_a_row_reach_the_template():
    tokenizer = build_chat_tokenizer("{% if tools %}{{ tools[0]['name'] }}{% endif %}" + PLAIN_TEMPLATE)
    row = PromptRow(prompt=QUESTION, columns={"tools": [{"name": "look"}]})
    assert texts(tokenizer, encode_prompt(tokenizer, row)) == ("look" + OPENED,)


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (
            None,
            PromptRow(prompt=QUESTION),
            "the tokenizer that is trained without --model has no chat template",
        ),
        ("{{ raise_exception('no such role') }}", PromptRow(prompt=QUESTION), "refuses the conversation: no such role"),
        (PLAIN_TEMPLATE, ConversationRow(messages=[*TWO_TURNS, user("e")]), "last turn is learned; it must be the"),
        (PLAIN_TEMPLATE, ConversationRow(messages=TWO_TURNS[1:2]), "it must be the assistant's and follow another"),
        (MARKED_TEMPLATE, CompletionRow(prompt=QUESTION, completion=[user("a")]), "no token that the chat template"),
        (
            "{{ messages|length }}" + PLAIN_TEMPLATE,
            CompletionRow(prompt=QUESTION, completion=YES),
            "renders the prompt differently when an answer follows",
        ),
        (PLAIN_TEMPLATE, PromptRow(prompt=""), "has text without tokens"),
        (PLAIN_TEMPLATE, variables("no"), "has chat_template_kwargs='no'; it must be an object of variables"),
        (
            PLAIN_TEMPLATE,
            variables({"tokenize": False}),
            "it must be an object of variables of the chat template, with",
        ),
    ],
)
def test_what_cannot_be_encoded_is_named_with_its_row(template, row, message):
    encode = encode_prompt if isinstance(row, PromptRow) else encode_completion
    with pytest.raises(ValueError, match=f"^this row.*{re.escape(message)}"):
        encode(build_chat_tokenizer(template), row)


def test_rows_too_long_are_counted_with_their_lengths_or_left_out(capsys):
    rows = [PromptRow(prompt="a", place=f"--dataset='d': line {n}") for n in range(4)]
    limit, config = limit_of(3, None, "--model='m'"), sft.Config(model="m", dataset="d")

    def tokens(*lengths):
        return [Encoded(prompt_ids=[0], response_ids=[0] * (length - 1)) for length in lengths]

    assert keep_fitting(config, rows, tokens(1, 2, 3, 3), limit) == (rows, tokens(1, 2, 3, 3))
    message = (
        "--dataset='d': 2 of 4 rows cannot be used: line 1 has 5 tokens, more than --max-tokens=3; raise it, or leave "
        "out longer rows with --skip-too-long | line 3 has 4 tokens, more than --max-tokens=3; --skip-bad-rows leaves "
        "them out"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        keep_fitting(config, rows, tokens(1, 5, 3, 4), limit)
    for option, said in (
        ("skip_too_long", "2 of 4 rows have more tokens than --max-tokens=3 and are left out\n"),
        ("skip_bad_rows", "--skip-bad-rows: --dataset='d': 2 of 4 rows are left out: line 1 has 5 tokens, more than"),
    ):
        kept = keep_fitting(replace(config, **{option: True}), rows, tokens(1, 5, 3, 4), limit)
        assert kept == ([rows[0], rows[2]], tokens(1, 3))
        assert capsys.readouterr().out.startswith(said)
    own = sft.Config(model="m", max_tokens=3)
    with pytest.raises(
        ValueError, match=r"^--dataset='d': line 1 has 5 tokens.*leave out longer rows with --skip-too-long$"
    ):
        keep_fitting(own, rows, tokens(1, 5, 3, 3), limit)
