"""Data as it is found: public layouts by detection, other names of columns, what is put around prompts, mixtures."""

import json
import math
import re
from collections import Counter

import pytest
from datasets import Dataset
from transformers import LlamaConfig

from hybrid_engine.recipes import dpo, evaluate, generate, grpo, sft
from hybrid_engine.rlhf.data.encoding import encode_completion, encode_prompt
from hybrid_engine.rlhf.data.parts import is_held_out, load_parts, prompt_key
from hybrid_engine.rlhf.data.reading import (
    read_labelled_rows,
    read_learned_rows,
    read_preference_rows,
    read_prompt_rows,
)
from hybrid_engine.rlhf.data.rows import ConversationRow, PromptRow
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.tasks.corpus import load_corpus
from tests.support.chat import CALL_TEMPLATES, PLAIN_TEMPLATE, build_chat_tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_as(kind, folder, row, count=2):
    """The row, several times, as a file of one kind."""
    path = folder / f"data.{kind}"
    if kind == "parquet":
        Dataset.from_list([row] * count).to_parquet(path)
    elif kind == "json":
        path.write_text(json.dumps([row] * count))
    else:
        write(path, [row] * count)
    return str(path)


def source_of(*paths, **options):
    return DataSource(datasets=paths, **options)


SHARE = [{"from": "human", "value": "sky?"}, {"from": "gpt", "value": "blue"}]
ASKED, TOLD = [user("sky?")], [assistant("blue")]
GSM8K = {"question": "3 boxes of 6?", "answer": "3 * 6 = <<3*6=18>>18\n#### 18"}
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [user("3 boxes of 6?")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {"split": "train", "index": 0, "answer": "3 * 6 = 18", "question": "3 boxes of 6?"},
}
ULTRAFEEDBACK = {
    "instruction": "sky?",
    "completions": [
        {"model": "a", "response": "fair", "overall_score": 6.0},
        {"model": "b", "response": "best", "overall_score": 9.5},
        {"model": "c", "response": "worst", "overall_score": 2.0},
    ],
}
BINARIZED = {
    "prompt": "sky?",
    "prompt_id": "0",
    "chosen": ASKED + TOLD,
    "rejected": [*ASKED, assistant("green")],
    "messages": ASKED + TOLD,
    "score_chosen": 9.0,
    "score_rejected": 3.0,
}
CALL = {"name": "look", "arguments": {"at": "sky"}}
SHARE_TOOLS = {
    "conversations": [
        {"from": "human", "value": "sky?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "It is blue."},
    ],
    "system": "Look.",
    "tools": json.dumps([{"name": "look", "description": "", "parameters": {"type": "object"}}]),
}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
LEARNED = [
    (GSM8K, {"prompt": GSM8K["question"], "completion": GSM8K["answer"]}),
    ({"problem": "1 + 1?", "solution": "so 2", "answer": "2"}, {"prompt": "1 + 1?", "completion": "so 2"}),
    ({"problem": "1 + 1?", "answer": "2"}, {"prompt": "1 + 1?", "completion": "2"}),
    (ALPACA, {"prompt": "Add.\n\n1 and 2", "completion": "3"}),
    (ALPACA | {"input": "", "text": "Below is"}, {"prompt": "Add.", "completion": "3"}),
    (
        ALPACA | {"system": "Count."},
        {"prompt": [system("Count."), user("Add.\n\n1 and 2")], "completion": [assistant("3")]},
    ),
    (
        {"instruction": "b?", "output": "B", "history": [["a?", "A"]], "system": ""},
        {"prompt": [user("a?"), assistant("A"), user("b?")], "completion": [assistant("B")]},
    ),
    (
        {"instruction": "Sum up.", "context": "Long.", "response": "Short."},
        {"prompt": "Sum up.\n\nLong.", "completion": "Short."},
    ),
    (
        {"system_prompt": "Be kind.", "question": "sky?", "response": "blue"},
        {"prompt": [system("Be kind."), *ASKED], "completion": TOLD},
    ),
    ({"conversations": SHARE}, {"messages": ASKED + TOLD}),
    ({"conversations": SHARE, "system": "Be kind."}, {"messages": [system("Be kind."), *ASKED, *TOLD]}),
    ({"conversations": ASKED + TOLD}, {"messages": ASKED + TOLD}),
    (
        SHARE_TOOLS,
        {"messages": [system("Look."), *ASKED, CALLED, {"role": "tool", "content": "blue"}, assistant("It is blue.")]},
    ),
    ({"messages": ASKED + TOLD}, {"messages": ASKED + TOLD}),
    (ULTRAFEEDBACK, {"prompt": "sky?", "completion": "best"}),
    (BINARIZED, {"messages": ASKED + TOLD}),
    (VERL, {"prompt": VERL["prompt"], "completion": [assistant("3 * 6 = 18")]}),
]
PROMPTS = [
    (GSM8K, GSM8K["question"], {"answer": GSM8K["answer"]}),
    ({"problem": "1 + 1?", "solution": "so 2"}, "1 + 1?", {"answer": "so 2"}),
    (ALPACA, "Add.\n\n1 and 2", {}),
    ({"conversations": SHARE}, ASKED, {}),
    ({"messages": ASKED + TOLD, "answer": "blue"}, ASKED, {"answer": "blue"}),
    ({"messages": ASKED, "answer": "blue"}, ASKED, {"answer": "blue"}),
    (ULTRAFEEDBACK, "sky?", {}),
    (BINARIZED, "sky?", {}),
    (VERL, VERL["prompt"], {"answer": "18", "data_source": "openai/gsm8k"}),
    (
        VERL | {"reward_model": {"style": "rule", "ground_truth": ["18", "18.0"]}},
        VERL["prompt"],
        {"answer": ["18", "18.0"]},
    ),
    (VERL | {"answer": "mine"}, VERL["prompt"], {"answer": "mine"}),
]
COMPARED = [
    (BINARIZED, (ASKED, TOLD, [assistant("green")])),
    (ULTRAFEEDBACK, ("sky?", "best", "worst")),
    ({"instruction": "sky?", "chosen_response": "blue", "rejected_response": "green"}, ("sky?", "blue", "green")),
    (
        {"conversations": SHARE[:1], "chosen": SHARE[1], "rejected": {"from": "gpt", "value": "green"}},
        (ASKED, TOLD, [assistant("green")]),
    ),
    (
        {
            "input": {"messages": ASKED, "tools": []},
            "preferred_output": TOLD,
            "non_preferred_output": [assistant("green")],
        },
        (ASKED, TOLD, [assistant("green")]),
    ),
    ({"question": "sky?", "chosen": "blue", "rejected": "green"}, ("sky?", "blue", "green")),
    (
        {"system": "Be kind.", "question": "sky?", "chosen": "blue", "rejected": "green"},
        ([system("Be kind."), *ASKED], TOLD, [assistant("green")]),
    ),
]
KINDS = ["jsonl", "json", "parquet"]


@pytest.mark.parametrize(("row", "expected"), LEARNED)
def test_a_public_layout_is_learned_from_as_it_is(tmp_path, row, expected):
    for kind in KINDS:
        for found in read_learned_rows(write_as(kind, tmp_path, row)):
            assert {name: getattr(found, name, None) for name in expected} == expected


@pytest.mark.parametrize(("row", "prompt", "columns"), PROMPTS)
def test_a_public_layout_gives_prompts_and_what_rewards_read(tmp_path, row, prompt, columns):
    for kind in KINDS:
        for found in read_prompt_rows(write_as(kind, tmp_path, row)):
            assert found.prompt == prompt and {name: found.columns.get(name) for name in columns} == columns


@pytest.mark.parametrize(("row", "expected"), COMPARED)
def test_a_public_layout_of_preferences_gives_pairs_and_labelled_answers(tmp_path, row, expected):
    for kind in KINDS:
        path = write_as(kind, tmp_path, row, count=1)
        (found,) = read_preference_rows(path)
        assert (found.prompt, found.chosen, found.rejected) == expected
        assert [(row.completion, row.label) for row in read_labelled_rows(path)] == [
            (expected[1], True),
            (expected[2], False),
        ]


def test_a_conversation_of_sharegpts_is_what_trl_makes_of_it(tmp_path):
    from trl.data_utils import maybe_convert_to_chatml

    (row,) = read_learned_rows(write(tmp_path / "data.jsonl", [{"conversations": SHARE}]))
    renamed = [{"from": {"human": "user", "gpt": "assistant"}[turn["from"]], "value": turn["value"]} for turn in SHARE]
    assert row.messages == maybe_convert_to_chatml({"conversations": renamed})["messages"]


def test_the_layout_that_was_found_is_said_once(tmp_path, capsys):
    path = write(tmp_path / "data.jsonl", [GSM8K] * 3)
    read_prompt_rows(path)
    assert capsys.readouterr().out.replace("\n", " ").count("is read in the layout of GSM8K") == 1


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (
            read_learned_rows,
            {"conversations": [{"from": "he", "value": "a"}]},
            "has conversations[0]['from']='he'; it must",
        ),
        (read_learned_rows, {"conversations": []}, "has conversations=[]; it must be a non-empty list of turns"),
        (read_learned_rows, {"conversations": [{"from": "human"}]}, 'a turn must be like {"from": "human", "value"'),
        (
            read_learned_rows,
            {"conversations": [{"from": "function_call", "value": "{"}]},
            "a function_call must be JSON",
        ),
        (read_learned_rows, GSM8K | {"answer": ""}, "has completion=''; it must be text"),
        (
            read_learned_rows,
            ALPACA | {"history": ["a"]},
            "has history=['a']; it must be a list of [question, answer] pairs",
        ),
        (
            read_learned_rows,
            {"messages": [*ASKED, {**TOLD[0], "weight": 0}]},
            "has a turn with weight=0, but all assistant turns are learned",
        ),
        (
            read_preference_rows,
            {"instruction": "a", "completions": []},
            "has no two completions with different overall_score",
        ),
        (read_prompt_rows, {"prompt": "a", "tools": "{"}, "has tools='{', which is not JSON"),
        (read_prompt_rows, {"prompt": "a", "tools": ["5"]}, "has tools=['5']; it must be a list of objects such as"),
    ],
)
def test_a_row_that_is_not_written_in_its_layout_is_named(tmp_path, read, row, message):
    path = write(tmp_path / "data.jsonl", [row])
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        read(path)
    assert str(raised.value).startswith(f"--dataset={path!r}: line 1 ")


def test_columns_are_renamed_and_found_inside_of_others(tmp_path):
    row = {"ask": "1 + 1?", "meta": {"truth": ["2"], "turns": [{"text": "two"}]}, "a.b": "dots", "prompt": "old"}
    for kind in KINDS:
        path = write_as(kind, tmp_path, row)
        names = ("ask=prompt", "meta.truth=answer", "meta.turns.0.text=completion", "a.b=dotted")
        found = read_prompt_rows(source_of(path, columns=names))[1]
        assert found.prompt == "1 + 1?" and found.columns["answer"] == ["2"] and found.columns["dotted"] == "dots"
        assert {"ask", "a.b"}.isdisjoint(found.columns) and found.columns["meta"] == row["meta"]
        (learned, _) = read_learned_rows(source_of(path, columns=names))
        assert (learned.prompt, learned.completion) == ("1 + 1?", "two")
        with pytest.raises(ValueError, match=re.escape("--columns='question=prompt': --dataset=")) as raised:
            read_prompt_rows(source_of(path, columns=("question=prompt",)))
        assert "has no column 'question', only 'a.b', 'ask', 'meta', 'prompt'" in str(raised.value)


def test_names_may_change_places(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompt": "a", "completion": "b"}])
    (row,) = read_learned_rows(source_of(path, columns=("prompt=completion", "completion=prompt")))
    assert (row.prompt, row.completion) == ("b", "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ("question",)}, "--columns='question' must have the form THEIRS=OURS"),
        ({"columns": ("a=prompt", "b=prompt")}, "names a column of 'b=prompt' twice"),
        ({"prompt_template": "Think."}, "--prompt-template='Think.' names no column, so all prompts"),
        ({"prompt_template": "{prompt} {"}, "has '{', which names no column"),
        ({"prompt_template": "{}"}, "has '{}', which names no column"),
        ({"prompt_template": "{prompt}\\n"}, "contains a backslash and an n, which the shell does not convert"),
        ({"dataset_weights": (1.0, 2.0)}, "--dataset-weights='1 2' must be 1 numbers above 0"),
        ({"dataset_weights": (0.0,)}, "--dataset-weights=0.0 must be above 0"),
        (
            {"dataset": ("a.jsonl", "b.jsonl"), "held_out_split": "test"},
            "--held-out-split='test' does not say which of several datasets",
        ),
        ({"dataset": None, "system_prompt": "a"}, "--system-prompt='a' needs --dataset; give one"),
        ({"dataset": None, "row_key": ("a",)}, "--row-key='a' needs --dataset; give one"),
    ],
)
def test_an_option_of_the_data_that_says_nothing_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        sft.Config(**({"dataset": "data.jsonl"} | options))


def test_templates_and_system_prompts_stand_around_prompts_of_every_format(tmp_path):
    template = "Q: {prompt} {{{level}}}\nA:"
    text = write(tmp_path / "text.jsonl", [{"prompt": "sky?", "completion": "blue", "level": 3}])
    (row,) = read_learned_rows(source_of(text, prompt_template=template))
    assert (row.prompt, row.completion) == ("Q: sky? {3}\nA:", "blue")
    (row,) = read_learned_rows(source_of(text, prompt_template=template, system_prompt="Be kind."))
    assert row.prompt == [system("Be kind."), user("Q: sky? {3}\nA:")] and row.completion == TOLD
    (row,) = read_prompt_rows(source_of(text, is_conversation=True))
    assert row.prompt == ASKED
    chat = write(tmp_path / "chat.jsonl", [{"messages": [user("a"), assistant("b"), *ASKED, *TOLD], "level": 3}])
    (row,) = read_learned_rows(source_of(chat, prompt_template=template, system_prompt="Be kind."))
    asked = [user("a"), assistant("b"), user("Q: sky? {3}\nA:")]
    assert row.messages == [system("Be kind."), *asked, *TOLD]
    own = write(tmp_path / "own.jsonl", [{"prompt": [system("Mine."), *ASKED]}])
    assert read_prompt_rows(source_of(own, system_prompt="Be kind."))[0].prompt == [system("Mine."), *ASKED]
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "sky?", "chosen": "blue", "rejected": "green"}])
    (row,) = read_preference_rows(source_of(pairs, system_prompt="Be kind."))
    assert (row.prompt, row.chosen, row.rejected) == ([system("Be kind."), *ASKED], TOLD, [assistant("green")])
    plain = write(tmp_path / "plain.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match="line 1 is plain text, to which --prompt-template"):
        read_learned_rows(source_of(plain, system_prompt="Be kind."))
    with pytest.raises(ValueError, match=r"line 1 has no value in 'levle', which --prompt-template names"):
        read_learned_rows(source_of(text, prompt_template="{prompt} {levle}"))


def test_a_template_of_other_columns_makes_the_prompts(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"context": "Long.", "ask": "Short?", "meta": {"id": 7}, "answer": "Yes."}])
    source = source_of(path, prompt_template="{context} {ask} ({meta.id})", columns=("answer=completion",))
    assert read_prompt_rows(source)[0].prompt == "Long. Short? (7)"
    (row,) = read_learned_rows(source)
    assert (row.prompt, row.completion) == ("Long. Short? (7)", "Yes.")


def test_what_is_put_around_prompts_changes_nothing_in_what_is_held_out(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompt": f"p{n}", "completion": "a"} for n in range(60)])
    plain = load_parts(source_of(path), read_prompt_rows)
    wrapped = load_parts(source_of(path, prompt_template="Q: {prompt}", system_prompt="Be kind."), read_learned_rows)
    for part, other in zip(plain, wrapped, strict=True):
        assert [[system("Be kind."), user(f"Q: {row.prompt}")] for row in part] == [row.prompt for row in other]


def test_a_held_out_data_set_or_split_takes_the_place_of_a_share(tmp_path, capsys):
    rows = [{"prompt": f"p{n}"} for n in range(20)]
    train_path = write(tmp_path / "train.jsonl", rows)
    test_path = write(tmp_path / "test.jsonl", [*rows[:3], {"prompt": "new"}])
    train, held_out = load_parts(source_of(train_path, held_out_dataset=test_path), read_prompt_rows)
    assert [row.prompt for row in held_out] == ["p0", "p1", "p2", "new"]
    assert [row.prompt for row in train] == [f"p{n}" for n in range(3, 20)]
    assert "3 rows have a prompt of --held-out-dataset=" in capsys.readouterr().out
    folder = tmp_path / "splits"
    folder.mkdir()
    write(folder / "train.jsonl", rows)
    write(folder / "test.jsonl", [{"prompt": "new"}])
    train, held_out = load_parts(source_of(str(folder), held_out_split="test"), read_prompt_rows)
    assert [row.prompt for row in held_out] == ["new"] and len(train) == 20
    with pytest.raises(ValueError, match=r"^--held-out-dataset='.*nowhere.jsonl' must be an existing file"):
        load_parts(source_of(train_path, held_out_dataset=str(tmp_path / "nowhere.jsonl")), read_prompt_rows)
    with pytest.raises(ValueError, match=r"holds out 20 rows and leaves 0 of --dataset='.*' to train on"):
        load_parts(source_of(train_path, held_out_dataset=train_path), read_prompt_rows)


def test_mixtures_have_the_shares_that_their_weights_say_and_hold_out_of_each(tmp_path, capsys):
    paths = [
        write(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{n}"} for n in range(count)])
        for name, count in (("a", 60), ("b", 20))
    ]
    train, held_out = load_parts(source_of(*paths), read_prompt_rows)
    assert sorted(row.prompt for row in [*train, *held_out]) == sorted(
        [f"a{n}" for n in range(60)] + [f"b{n}" for n in range(20)]
    )
    assert {row.prompt[0] for row in train[:20]} == {"a", "b"}
    weighted, same = load_parts(source_of(*paths, weights=(1, 3)), read_prompt_rows)
    assert (
        same == held_out
        and len(weighted) == len(train)
        and {row.prompt for row in weighted} <= {row.prompt for row in train}
    )
    counts = Counter(row.prompt for row in weighted)
    shares = Counter(row.prompt[0] for row in weighted)
    assert shares["b"] == round(len(train) * 3 / 4) and shares["a"] == round(len(train) / 4)
    assert max(counts[name] for name in counts if name[0] == "a") == 1
    often = [counts[row.prompt] for row in set_of(train, "b")]
    assert max(often) - min(often) <= 1
    assert "--dataset-weights: an epoch has" in capsys.readouterr().out
    assert load_parts(source_of(*paths, weights=(1, 3)), read_prompt_rows) == (weighted, same)


@pytest.mark.parametrize("weights", [(), (1, 3)])
@pytest.mark.parametrize("held_out", [{"held_out_share": 0.1}, {"held_out_dataset": "b.jsonl"}])
def test_a_data_set_of_a_mixture_without_rows_to_train_on_is_refused(tmp_path, monkeypatch, held_out, weights):
    monkeypatch.chdir(tmp_path)
    asked = next(prompt for prompt in map(str, range(99)) if is_held_out(prompt))
    write(tmp_path / "a.jsonl", [{"prompt": f"a{n}"} for n in range(60)])
    write(tmp_path / "b.jsonl", [{"prompt": asked}])
    source = source_of("a.jsonl", "b.jsonl", weights=weights, **held_out)
    with pytest.raises(ValueError, match=r"^--dataset='a.jsonl' 'b.jsonl': 'b.jsonl' has no rows to train on"):
        load_parts(source, read_prompt_rows)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], {}, "has no rows"),
        ([{"prompt": ""}], {}, "has prompt=''"),
        ([{"prompt": ""}, {"prompt": 3}], {"skips_bad_rows": True}, "--skip-bad-rows leaves none of 2 rows"),
    ],
)
def test_an_empty_data_set_of_a_mixture_is_an_error_that_names_it(tmp_path, monkeypatch, rows, options, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [{"prompt": f"a{n}"} for n in range(60)])
    write(tmp_path / "b.jsonl", rows)
    with pytest.raises(ValueError, match=r"--dataset='b\.jsonl'") as error:
        load_parts(source_of("a.jsonl", "b.jsonl", **options), read_prompt_rows)
    assert words in str(error.value)


@pytest.mark.parametrize("option", ["skip_bad_rows", "skip_too_long"])
def test_a_data_set_whose_rows_are_all_left_out_as_tokens_is_named(tmp_path, monkeypatch, capsys, option):
    """What tokens say of rows is known only after datasets are mixed."""
    monkeypatch.chdir(tmp_path)
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    bad, length = ({"tools": [tool]}, 1) if option == "skip_bad_rows" else ({}, 200)
    answer = {"role": "assistant", "content": "b" * length}
    write(tmp_path / "a.jsonl", [{"prompt": f"a{n}", "completion": "a"} for n in range(60)])
    write(
        tmp_path / "b.jsonl", [{"messages": [{"role": "user", "content": f"b{n}"}, answer], **bad} for n in range(60)]
    )
    tokenizer = build_chat_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE  # without tools
    tokenizer.save_pretrained("model")
    LlamaConfig().save_pretrained("model")
    config = sft.Config(model="model", dataset=("a.jsonl", "b.jsonl"), max_tokens=100, **{option: True})
    _, corpus = load_corpus(config)
    said = capsys.readouterr().out
    assert "--dataset='b.jsonl': none of its " in said and "--dataset='a.jsonl': none" not in said
    assert len(corpus.train) + len(corpus.held_out) == 60


def set_of(rows, letter):
    return [row for row in rows if row.prompt[0] == letter]


def test_each_data_set_of_a_mixture_has_its_own_layout_and_columns(tmp_path):
    first = write(tmp_path / "gsm8k.jsonl", [GSM8K | {"question": f"{n} boxes?"} for n in range(30)])
    second = write(tmp_path / "own.jsonl", [{"ask": f"{n} bags?", "answer": str(n)} for n in range(30)])
    train, held_out = load_parts(source_of(first, second, columns=("ask=prompt",)), read_prompt_rows)
    assert len(train) + len(held_out) == 60 and all("answer" in row.columns for row in train)


def test_recipes_take_one_data_set_or_several_from_the_command_or_a_config():
    assert sft.Config(dataset="a.jsonl").dataset == sft.Config(dataset=("a.jsonl",)).dataset == "a.jsonl"
    config = grpo.Config(dataset=("a.jsonl", "b.jsonl"), dataset_weights=(1.0, 2.0), model="m", reward=("exact",))
    assert config.source.datasets == ("a.jsonl", "b.jsonl") and config.source.weights == (1.0, 2.0)
    assert config.source.shown == "--dataset='a.jsonl' 'b.jsonl'"
    assert evaluate.Config(dataset=("a.jsonl", "b.jsonl"), model="m", reward=("exact",)).source.datasets[1] == "b.jsonl"
    assert (
        generate.Config(prompts="a.jsonl", model="m", out="o", columns=("question=prompt",)).source.option == "prompts"
    )
    assert dpo.Config(dataset=()).dataset is None


def test_a_share_beside_rows_that_take_its_place_is_refused():
    for place in ({"held_out_dataset": "b.jsonl"}, {"held_out_split": "test"}):
        with pytest.raises(ValueError, match=r"--held-out-share=0.3 of --dataset is replaced by --held-out-\w+='"):
            sft.Config(dataset="a.jsonl", held_out_share=0.3, **place)
        sft.Config(dataset="a.jsonl", **place)


def test_a_column_of_the_row_key_that_no_row_has_is_refused(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"prompt": "Play.", "seed": number} for number in range(40)])
    for names, given in ((("sed",), "'sed'"), (("seed", "completion"), "'seed completion'")):
        source = DataSource(datasets=(path,), row_key=names)
        with pytest.raises(
            ValueError,
            match=f"^--row-key={given}: {names[-1]!r} is not a column that distinguishes rows of .*'prompt', 'seed'$",
        ):
            load_parts(source, read_prompt_rows)
    assert all(load_parts(DataSource(datasets=(path,), row_key=("seed",)), read_prompt_rows))


TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN_TEMPLATE.replace(
    "message['content']", "(message['tool_calls'] | tojson if message['tool_calls'] else message['content'])"
)
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
OTHER = {"type": "function", "function": {"name": "go", "parameters": {"properties": {"to": {"enum": ["a", None]}}}}}


def test_tools_are_objects_or_json_text_and_what_arrow_fills_in_is_not_learned(tmp_path):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    other_call = {"type": "function", "function": {"name": "go", "arguments": {"to": "a"}}}
    rows = [
        {
            "messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}, *TOLD],
            "tools": [TOOL],
        },
        {
            "messages": [
                user("go"),
                {"role": "assistant", "tool_calls": [other_call]},
                {"role": "tool", "content": "y"},
                *TOLD,
            ],
            "tools": [OTHER],
        },
    ]
    tokenizer = build_chat_tokenizer(TOOLS_TEMPLATE)
    expected = [tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in rows]
    assert "null" not in expected[0]
    Dataset.from_list(rows).to_parquet(tmp_path / "arrow.parquet")
    as_text = [row | {"tools": json.dumps(row["tools"])} for row in rows]
    as_texts = [row | {"tools": [json.dumps(tool) for tool in row["tools"]]} for row in rows]
    Dataset.from_list(as_text).to_parquet(tmp_path / "text.parquet")
    write(tmp_path / "text.jsonl", as_text)
    write(tmp_path / "texts.jsonl", as_texts)
    written = json.loads(json.dumps(rows))
    for row in written:
        for turn in row["messages"]:
            for one in turn.get("tool_calls", []):
                one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    write(tmp_path / "arguments.jsonl", written)
    for path in sorted(tmp_path.iterdir()):
        read = read_learned_rows(str(path))
        for row, text in zip(read, expected, strict=True):
            encoded = encode_completion(tokenizer, row)
            assert text.startswith(tokenizer.decode(encoded.prompt_ids + encoded.response_ids)), path


def test_parts_of_text_are_one_text_and_other_parts_are_refused_by_name(tmp_path):
    texts, image = [{"type": "text", "text": "sky"}, {"type": "text", "text": "?"}], {"type": "image", "url": "b"}
    Dataset.from_list([{"prompt": [user([texts[0], image])]}]).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(
        ValueError, match=r"row 1 has prompt\[0\]\['content'\] with the part \{'type': 'image', 'url': 'b'\}"
    ):
        read_prompt_rows(str(tmp_path / "data.parquet"))  # and not the keys that Arrow fills in
    (row,) = read_prompt_rows(write(tmp_path / "data.jsonl", [{"prompt": [user(texts)]}]))
    assert row.prompt == ASKED == [user("sky?")]
    assert prompt_key(row.prompt) == "sky?"  # held out together with the same prompt as text


def test_openais_older_calls_are_read_as_the_newer(tmp_path):
    old = [
        *ASKED,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "look", "arguments": '{"at": "sky", "by": null}'},
        },
        {"role": "function", "name": "look", "content": "blue"},
        {**TOLD[0], "weight": 1},
    ]
    (row,) = read_learned_rows(write(tmp_path / "d.jsonl", [{"messages": old, "functions": [{"name": "look"}]}]))
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky", "by": None}}}
    tool = {"role": "tool", "name": "look", "content": "blue"}
    assert row.messages == [*ASKED, {"role": "assistant", "tool_calls": [call]}, tool, *TOLD]
    assert row.columns["tools"] == [{"name": "look"}]


def test_a_template_that_does_not_render_tools_is_an_error_that_names_it():
    tokenizer = build_chat_tokenizer(PLAIN_TEMPLATE)
    tokenizer.name_or_path = "my-model"
    row = PromptRow(prompt=ASKED, columns={"tools": [TOOL]}, place="line 3")
    message = "line 3 has tools, but the chat template of the tokenizer of 'my-model' does not render them; use a model"
    with pytest.raises(ValueError, match=message):
        encode_prompt(tokenizer, row)
    with pytest.raises(ValueError, match="does not render them"):
        encode_completion(tokenizer, ConversationRow(messages=ASKED + TOLD, columns={"tools": [TOOL]}))
    assert encode_prompt(tokenizer, PromptRow(prompt=ASKED, columns={"tools": []}))


@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": "Let me see."}])
def test_a_template_that_does_not_render_calls_is_an_error_that_names_it(content):
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look"}}], **content}
    row = ConversationRow(messages=[*ASKED, called], place="line 3")
    tokenizer = build_chat_tokenizer(PLAIN_TEMPLATE)
    tokenizer.name_or_path = "my-model"
    with pytest.raises(
        ValueError, match="line 3 has calls of tools, but the chat template of the tokenizer of 'my-mod"
    ):
        encode_completion(tokenizer, row)
    shown = encode_completion(build_chat_tokenizer(TOOLS_TEMPLATE), row)
    assert '"look"' in tokenizer.decode(shown.response_ids)


@pytest.mark.parametrize("name", CALL_TEMPLATES)
@pytest.mark.parametrize("content", [{}, {"content": ""}])
def test_calls_are_learned_with_templates_of_all_families(name, content):
    tokenizer = build_chat_tokenizer(CALL_TEMPLATES[name])
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": [1, None]}}}
    called, answer = {"role": "assistant", **content, "tool_calls": [call]}, {"role": "assistant", "content": "4"}
    row = ConversationRow(messages=[*ASKED, called])
    assert tokenizer.decode(encode_completion(tokenizer, row).response_ids) == 'f:{"a": [1, null]}<eos>'
    row = ConversationRow(messages=[*ASKED, called, {"role": "tool", "content": "3"}, answer])
    learned = encode_completion(tokenizer, row)
    assert 'f:{"a": [1, null]}<eos>' in tokenizer.decode(learned.prompt_ids)
    assert tokenizer.decode(learned.response_ids) == "4<eos>"


def test_a_call_without_content_is_learned_where_the_template_concatenates_contents():
    calls = "(message.tool_calls | tojson if message.tool_calls else '')"
    tokenizer = build_chat_tokenizer(PLAIN_TEMPLATE.replace("message['content']", f"message['content'] + {calls}"))
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look"}}]}
    filled = [*ASKED, {**called, "content": ""}]
    expected = tokenizer.apply_chat_template(filled, tokenize=False).removesuffix("\n")
    learned = encode_completion(tokenizer, ConversationRow(messages=[*ASKED, called]))
    assert tokenizer.decode([*learned.prompt_ids, *learned.response_ids]) == expected


@pytest.mark.parametrize(
    ("read", "good", "bad", "words"),
    [
        (
            read_learned_rows,
            ALPACA,
            {"history": 5},
            r"line 2 has history=5; it must be a list of \[question, answer\] pairs",
        ),
        (read_preference_rows, ULTRAFEEDBACK, {"completions": 3}, "line 2 has completions=3; it must be a list of obj"),
        (
            read_preference_rows,
            ULTRAFEEDBACK,
            {"completions": [{"response": "a", "overall_score": score} for score in (math.nan, 1.0, math.inf)]},
            "line 2 has no two completions with different overall_score values",
        ),
        (
            read_learned_rows,
            {"conversations": SHARE},
            {"conversations": [{"from": ["gpt"], "value": "blue"}]},
            r"line 2 has conversations\[0\]={'from': \['gpt'\], .* a turn must be like",
        ),
        (
            read_learned_rows,
            {"conversations": SHARE},
            {"conversations": [SHARE[0], {"from": "function_call", "value": "[" * 10**5}]},
            r"line 2 has conversations\[1\]='\[\[.*; a function_call must be JSON: maximum recursion depth",
        ),
        (
            read_learned_rows,
            {"conversations": SHARE},
            {"tools": "[" * 10**5},
            r"line 2 has tools='\[\[.*, which is not JSON \(maximum recursion depth",
        ),
    ],
)
def test_values_of_a_wrong_type_are_bad_rows(read, good, bad, words, tmp_path, capsys):
    path = write(tmp_path / "data.jsonl", [good, good | bad])
    with pytest.raises(ValueError, match=words):
        read(source_of(path))
    assert len(read(source_of(path, skips_bad_rows=True))) == 1
    assert "1 of 2 rows are left out" in capsys.readouterr().out
