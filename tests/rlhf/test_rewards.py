"""The rules that rewards know by name, how several are added, what they measure, and what of them is refused."""

import math
import re
import sys
from dataclasses import replace

import pytest
import torch

from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.roles import reward_tokens
from hybrid_engine.rlhf.rewards.built_in import BUILT_IN, last_number
from hybrid_engine.rlhf.rewards.loading import load_rewards, names_of
from hybrid_engine.rlhf.rewards.scores import Answers, Scores, penalise_cut_off, replace_cut_off, reward_figures
from tests.support.answers import answers_of


def scores_of(spec, responses, **columns):
    """What one rule says of responses to any prompts."""
    answers = answers_of([f"prompt {n}" for n in range(len(responses))], responses, **columns)
    return load_rewards([spec])(answers).total


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of reward functions into the present folder and gives its name."""

    def write(source):
        (tmp_path / "tried_rewards.py").write_text(source)
        return "tried_rewards"

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tried_rewards", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return write


@pytest.mark.parametrize(
    ("spec", "responses", "references", "expected"),
    [
        ("exact", ["42", " 42\n", "42.", "the 42", ""], ["42"] * 5, [1, 1, 0, 0, 0]),
        ("exact:after=####", ["so #### 7", "7", "#### 1 #### 7", "####"], ["steps #### 7", 7, "7", "7"], [1, 0, 1, 0]),
        ("exact:after==", ["1+1=2", "2"], ["2", "2"], [1, 0]),
        ("number", ["it is 1,234.50 then", "-3", "3", "no", "1e3", "12,34"], [1234.5, "-3", "-3", 1, "1000", 34],
         [1, 1, 0, 0, 1, 1]),
        ("number:tolerance=0.01", ["3.14", "3.2", "314"], [3.1416, 3.1416, 315], [1, 0, 1]),
        ("number:after=so", ["so 5 or 6", "5 so"], [6, 5], [1, 0]),
        (r"regex:^\s*\d+$", ["12", "x 12", "12 x"], None, [1, 0, 0]),
        ("regex:a:b=c,d", ["a:b=c,d", "ab"], None, [1, 0]),
        ("length:target=4", ["abc", "abcdefg", "", "abcde"], None, [0, -1, -0.75, -0.5]),
        ("length:most=4,penalty=2", ["abc", "abcdefg", ""], None, [0, -2, 0]),
    ],
)  # fmt: skip
def test_a_rule_judges_by_its_definition(spec, responses, references, expected):
    columns = {} if references is None else {"answer": references}
    assert scores_of(spec, responses, **columns) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "number"),
    [("", None), ("v.", None), ("-", None), ("1.", 1.0), (".5", 0.5), ("$1,000,000", 1e6), ("3 of 4%", 4.0),
     ("2.5e-3", 0.0025), ("x2", 2.0), ("1,2", 2.0), ("e5", 5.0), ("3-5", 5.0), ("7-3", 3.0), ("x=-5", -5.0),
     ("2024-12", 12.0), ("f(2)-3", 3.0), ("(-3)", -3.0), ("It is \u22125.", -5.0), ("\u20135", -5.0), ("3\u20135", 5.0),
     ("-$1,234.50", -1234.5), ("$-2", -2.0), ("+4", 4.0), ("5.", 5.0), ("1,234.", 1234.0), ("1{,}234", 1234.0),
     (r"1,\!234", 1234.0), ("12,3456", 3456.0), ("1/2", 0.5), ("-3 / 4", -0.75), (r"-\frac{3}{4}", -0.75),
     (r"\dfrac{1,000}{8}", 125.0), ("5/0", 0.0), ("12/24/2024", 2024.0), ("10^-3", -3.0), ("2e3/4", 500.0),
     ("x = - 5", -5.0), ("= \u2212 5", -5.0), ("- 5", 5.0), ("8 - 5", 5.0), ("Answer: - 5", -5.0), ("7 = 12 - 5", 5.0),
     ("1 1/2", 1.5), ("-1 1/2", -1.5), (r"1\frac{1}{2}", 1.5), (r"-2\frac12", -2.5), (r"\frac34", 0.75), ("½", 0.5),
     ("2½", 2.5), ("\u22122¾", -2.75), (r"\frac{-3}{4}", -0.75), (r"\frac{3}{-4}", -0.75), (r"-\frac{-3}{4}", 0.75)],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("spec", "reference", "right", "wrong"),
    [
        ("exact", ["yes", "Yes"], ("yes", "Yes"), ("['yes', 'Yes']", "no")),
        ("exact", {"ground_truth": "yes", "style": "rule"}, ("yes",), ("ground_truth", "rule")),
        ("exact:column=answer,after=####", ["so #### 4", "four"], ("#### 4", "####four"), ("4", "#### 3")),
        ("number", {"ground_truth": ["4", 5]}, ("it is 4", "5.0"), ("45", "4, 6")),
        ("number", (18, "20"), ("18", "20"), ("1820",)),
        ("exact", '["yes", "Yes"]', ("yes", "Yes", '["yes", "Yes"]'), ("no", '["yes"]')),
        ("exact", '{"ground_truth": "yes"}', ("yes",), ("ground_truth",)),
        ("exact", '{"city": "Paris"}', ('{"city": "Paris"}',), ("Paris",)),
        ("number", '["4", "5.0"]', ("4", "5"), ("45",)),
        ("number", '{"ground_truth": ["18"], "style": "rule"}', ("18",), ("1",)),
        ("number", "[1, 2]", ("2",), ("1",)),
    ],
)
def test_a_reference_may_name_several_right_answers(spec, reference, right, wrong):
    assert scores_of(spec, list(right), answer=[reference] * len(right)) == [1] * len(right)
    assert scores_of(spec, list(wrong), answer=[reference] * len(wrong)) == [0] * len(wrong)


def test_the_reference_may_stand_in_another_column():
    assert scores_of("exact:column=solution", ["a", "b"], solution=["a", "a"], answer=["b", "b"]) == [1, 0]


@pytest.mark.parametrize(
    ("spec", "references", "rule"),
    [
        ("number", ["1", "none"], "answer='none' of the prompt 'prompt 1' has no number in it; fix the data"),
        ("number", [None, "1"], "answer=None of the prompt 'prompt 0' is no answer"),
        ("exact:after=####", ["#### 1", "1 ####"], "answer='1 ####' of the prompt 'prompt 1' is no answer"),
    ],
)
def test_a_reference_that_a_rule_cannot_read_is_named_with_its_prompt(spec, references, rule):
    with pytest.raises(ValueError, match=f"--reward='{spec}': {rule}"):
        scores_of(spec, ["#### 1", "#### 1"], answer=references)


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        (
            "number:tolerence=1",
            "'tolerence=1' is not one of its options; write name=value pairs, separated by commas, with the names "
            "column, after",
        ),
        ("number:tolerance", "'tolerance' is not one of its options"),
        ("number:tolerance=-1", "tolerance='-1' must be a number of at least 0; fix it"),
        ("number:tolerance=nan", "tolerance='nan' must be a number of at least 0"),
        ("length", "must set either target or most, in tokens; write length:target=200"),
        ("length:target=3,most=4", "must set either target or most"),
        ("length:target=x", "target='x' must be a number of at least 0"),
        ("regex:(", r"has an invalid pattern: .*; fix it"),
        ("regex", "has no pattern; write regex:PATTERN"),
        ("exactt", "is not a rule, a folder or module:function; did you mean 'exact'"),
        (":score", "has no module; write module:function"),
        ("json:", "has no function; write module:function"),
        ("nowhere:f", "no module 'nowhere' in this folder or on the Python path"),
        ("json:nothing", "json has no function 'nothing'"),
    ],
)
def test_a_spec_that_names_no_reward_is_refused(spec, rule):
    with pytest.raises(ValueError, match=f"--reward='{spec}'".replace("(", r"\(") + f":? {rule}"):
        load_rewards([spec])


@pytest.mark.parametrize(
    ("specs", "weights", "rule"),
    [
        ([], None, "--reward is missing; give one"),
        (["exact", "number"], [1.0], "--reward-weights='1' must be 2 numbers, one for each --reward"),
        (["exact"], [1.0, 2.0], "--reward-weights='1 2' must be 1 numbers"),
        (["exact"], [float("nan")], "--reward-weights='nan' must be finite and not all 0"),
        (["exact", "number"], [0.0, 0.0], "--reward-weights='0 0' must be finite and not all 0"),
    ],
)
def test_weights_that_do_not_fit_the_rewards_are_refused(specs, weights, rule):
    with pytest.raises(ValueError, match=rule):
        load_rewards(specs, weights)


def test_a_time_limit_must_be_above_0():
    with pytest.raises(ValueError, match="--reward-time-limit=0 must be above 0"):
        load_rewards(["exact"], None, 0)


def test_columns_that_a_reward_cannot_do_without_are_asked_for_before_any_work(module):
    name = module("def score(responses, level, bonus=0, *, kind, **others): return [0.0 for _ in responses]")
    rewards = load_rewards(["number:column=solution", f"{name}:score"])
    check_rows(rewards, rows_with(["solution", "level", "kind"]))
    with pytest.raises(ValueError, match=r"'number:column=solution' reads the column 'solution', but the data has 'an"):
        check_rows(rewards, rows_with(["answer"]))
    with pytest.raises(ValueError, match=r"score' reads the column 'kind', but the data has 'solution'"):
        check_rows(rewards, rows_with(["solution"]))
    with pytest.raises(
        ValueError, match=r"^line 2 has no 'level', which other rows have and --reward=.* reads; fix the row"
    ):
        check_rows(rewards, rows_with(["solution", "level", "kind"], ["solution", "kind"]))


@pytest.mark.parametrize(
    ("spec", "value", "rule"),
    [
        ("exact", None, "which is no answer"),
        ("exact:after=####", "steps ####", "which is no answer"),
        ("number", "none", "which has no number in it"),
        ("number", ["1", "none"], "which has no number in it"),
        ("exact", float("nan"), "which is no answer"),
        ("exact", [], "which is a list without an answer"),
        ("exact", ["a", None], "which is no answer"),
        ("exact", {"style": "rule"}, "which is an object without 'ground_truth'"),
        ("number", '{"target": 24, "numbers": [1, 2, 3]}', "which is an object without 'ground_truth'"),
    ],
)
def test_a_reference_that_a_rule_cannot_read_is_named_with_its_row_before_any_work(spec, value, rule):
    rows = [
        PromptRow(prompt="p", columns={"answer": answer}, place=f"line {n}") for n, answer in enumerate(("1", value))
    ]
    with pytest.raises(
        ValueError, match=f"^line 1 has {re.escape(f'answer={value!r}')}, {rule} for --reward={spec!r}; f"
    ):
        check_rows(load_rewards([spec]), rows)
    check_rows(load_rewards([spec]), rows[:1])


def check_rows(rewards, rows):
    """What a run asks of its rows before any work."""
    rewards.check_columns(rows)
    for row in rows:
        rewards.check_row(row)


def rows_with(*columns):
    """A row with each of these sets of columns."""
    return [
        PromptRow(prompt="p", columns=dict.fromkeys(names, "1"), place=f"line {number}")
        for number, names in enumerate(columns, start=1)
    ]


def test_several_rewards_are_added_by_their_weights():
    rewards = load_rewards(["exact", "length:target=2", "regex:a"], [1.0, 0.5, -2.0])
    scores = rewards(answers_of(["p", "q"], ["a", "bcd"], answer=["a", "x"]))
    assert scores.by_name == {"exact": [1.0, 0.0], "length": [0.0, -1.0], "regex": [1.0, 0.0]}
    assert scores.total == [1.0 - 2.0, -0.5]
    assert scores.per_token is None


def test_rewards_of_one_name_are_numbered():
    specs = ["regex:a", "m:score", "regex:b", "n:score", "exact", "some/where/reward"]
    assert names_of(specs) == ["regex_1", "score_1", "regex_2", "score_2", "exact", "reward"]


def test_none_leaves_a_reward_out_of_that_answers_sum(module):
    name = module("def even(responses): return [None if len(text) % 2 else 10.0 for text in responses]")
    scores = load_rewards([f"{name}:even", "exact"], [0.5, 1.0])(
        answers_of(["p", "q"], ["ab", "abc"], answer=["ab", "abc"])
    )
    assert scores.total == [6.0, 1.0] and scores.by_name["even"] == [10.0, None]
    assert reward_figures(scores) == {
        "reward_even": 10.0, "reward_even_deviation": 0.0, "reward_exact": 1.0, "reward_exact_deviation": 0.0,
        "unjudged_share": 0.0,
    }  # fmt: skip


def test_a_function_of_trl_reads_the_state_and_logs(module):
    name = module(
        "def score(completions, trainer_state, log_extra, log_metric, completions_ids, **kwargs):\n"
        "    log_extra('length', [len(ids) for ids in completions_ids])\n"
        "    log_metric('progress', trainer_state.global_step / trainer_state.max_steps)\n"
        "    log_metric('progress', 1.0)\n"
        "    return [None if text == 'a' else 1.0 for text in completions]\n"
        "async def short(completions, log_extra):\n"
        "    log_extra('length', [0])\n"
        "    return [0.0] * len(completions)\n"
    )
    answers = answers_of(["p"] * 3, ["a", "bb", "ccc"])
    rewards = load_rewards([f"{name}:score"])
    check_rows(rewards, [PromptRow(prompt="p")])
    assert rewards(answers).logged == {"progress": 0.5}
    rewards.begin_step(3, 4)
    scores = rewards(answers)
    assert scores.extra == {"length": [2, 3, 4]} and scores.total[1:] == [1.0, 1.0] and math.isnan(scores.total[0])
    assert reward_figures(scores)["logged_progress"] == 0.875
    with pytest.raises(ValueError, match=r"log_extra\('length', ...\) was given 1 values for 3 answers; give one for"):
        load_rewards([f"{name}:short"])(answers)


def test_an_answer_that_no_reward_judges_has_no_score_and_is_named_once(module, capsys):
    name = module("def even(responses): return [None if len(text) % 2 else 1.0 for text in responses]")
    rewards = load_rewards([f"{name}:even"])
    for prompts in (["first", "second"], ["third", "fourth"]):
        scores = rewards(answers_of(prompts, ["ab", "abc"]))
        assert scores.total[0] == 1.0 and math.isnan(scores.total[1])
        assert reward_figures(scores)["unjudged_share"] == 0.5
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("none of 'tried_rewards:even' scores the answer to the prompt 'second'") == 1
    assert "fourth" not in output


def test_mean_and_deviation_are_those_of_the_unweighted_values():
    scores = load_rewards(["length:target=1"], [5.0])(answers_of("pqr", ["", "a", "abc"]))
    figures = reward_figures(scores)
    assert figures["reward_length"] == pytest.approx(-4 / 3)  # of 0, -1 and -3
    assert figures["reward_length_deviation"] == pytest.approx((14 / 9) ** 0.5)


def test_no_answers_have_no_scores_and_call_nobody(module):
    name = module("def score(responses): raise RuntimeError")
    assert load_rewards([f"{name}:score"])(answers_of([], [])).total == []


def test_numbers_for_tokens_and_for_lines_stand_where_they_belong(module):
    name = module(
        "def tokens(response_ids): return [[float(t) for t in range(len(ids))] for ids in response_ids]\n"
        "def lines(responses): return [[float(len(line)) for line in r.split('\\n') if line] for r in responses]"
    )
    answers = answers_of(["p", "q"], ["a\n\nbcd\n", "ab"])
    rewards = load_rewards([f"{name}:tokens", f"{name}:lines", "length:target=1"], [0.1, 10.0, 1.0])
    scores = rewards(answers)
    assert scores.by_name == {"tokens": [28.0, 3.0], "lines": [4.0, 2.0], "length": [-7.0, -2.0]}
    #                      a               \n   \n   b    c    d           \n   end
    assert scores.per_token[0] == pytest.approx([0.0 + 10, 0.1, 0.2, 0.3, 0.4, 0.5 + 30, 0.6, 0.7 - 7])
    assert scores.per_token[1] == pytest.approx([0.0, 0.1 + 20, 0.2 - 2])
    assert scores.total == pytest.approx([sum(row) for row in scores.per_token])


def test_numbers_that_fit_neither_tokens_nor_lines_are_refused(module):
    name = module("def score(responses): return [[1.0, 2.0, 3.0] for _ in responses]")
    with pytest.raises(
        ValueError, match=r"score' returned 3 numbers for 2 tokens in 1 lines for the answer to the prompt"
    ):
        load_rewards([f"{name}:score"])(answers_of(["p"], ["a"]))


def test_a_line_is_a_step_also_with_the_number_0_and_a_token_only_with_another(module):
    name = module(
        "def tokens(response_ids): return [[float(t == 1) for t in range(len(ids))] for ids in response_ids]\n"
        "def lines(responses): return [[0.0 for line in r.split('\\n') if line] for r in responses]"
    )
    for reward, expected in (("tokens", [0, 1, 0, 0, 0]), ("lines", [0, 1, 0, 1, 0])):
        scores = load_rewards([f"{name}:{reward}"])(answers_of(["p"], ["ab\nc"]))
        assert scores.is_step is not None and list(map(int, scores.is_step[0])) == expected, scores


def test_an_answer_that_was_cut_off_has_the_score_of_those_and_keeps_its_rewards_own_numbers(module):
    name = module("def score(response_ids): return [[1.0 for _ in ids] for ids in response_ids]")
    answers = replace(answers_of(["p", "q"], ["a", "b"]), is_cut_off=[False, True])
    scores = replace_cut_off(load_rewards([f"{name}:score"])(answers), answers, -3.0)
    assert scores.total == [2.0, -3.0] and scores.per_token == [[1.0, 1.0], [0.0, -3.0]]
    assert scores.by_name == {"score": [2.0, 2.0]}


def test_a_penalty_is_taken_off_the_score_of_an_answer_that_was_cut_off_whatever_its_scale(module):
    name = module("def score(response_ids): return [[1.0 for _ in ids] for ids in response_ids]")
    answers = replace(answers_of(["p", "q", "r"], ["a", "b", ""]), is_cut_off=[False, True, True])
    judged = load_rewards([f"{name}:score", "length:target=1"], [1.0, -100.0])(answers)
    scores = penalise_cut_off(judged, answers, 3.0)
    assert scores.total == [judged.total[0], judged.total[1] - 3.0, judged.total[2] - 3.0]
    assert [sum(row) for row in scores.per_token] == scores.total and scores.by_name == judged.by_name
    assert scores.per_token[1] == [1.0, judged.per_token[1][1] - 3.0]
    whole = load_rewards(["length:target=1"])(answers)
    assert penalise_cut_off(whole, answers, 0.0) == whole
    unjudged = Scores(total=[math.nan] * 3, by_name={}, per_token=None)
    assert all(map(math.isnan, penalise_cut_off(unjudged, answers, 3.0).total))


def test_ppo_puts_a_process_rewards_numbers_on_their_tokens_beside_the_kl_penalty():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    kl = torch.tensor([[0.5, 1.0, 9.0], [0.0, 0.0, 2.0]])
    scores = Scores(total=[3.0, 4.0], by_name={}, per_token=[[1.0, 2.0], [4.0, 0.0, 0.0]])
    expected = torch.tensor([[0.95, 1.9, 0.0], [4.0, 0.0, -0.2]])
    torch.testing.assert_close(reward_tokens(scores, kl, mask, 0.1), expected)
    whole = Scores(total=[3.0, 4.0], by_name={}, per_token=None)
    expected = torch.tensor([[-0.05, 2.9, 0.0], [0.0, 0.0, 3.8]])
    torch.testing.assert_close(reward_tokens(whole, kl, mask, 0.1), expected)


def test_answers_are_chosen_and_joined():
    one, two = answers_of(["p", "q"], ["a", "b"], answer=[1, 2], left=[3, 4]), answers_of(["r"], ["c"], answer=[5])
    joined = Answers.join([one, two])
    chosen = joined.choose([2, 0])
    assert chosen.prompts == ["r", "p"] and chosen.response_ids == [[99, 0], [97, 0]] and len(joined) == 3
    assert joined.columns == {"answer": [1, 2, 5]} and chosen.columns == {"answer": [5, 1]}


def test_mathematics_is_compared_by_its_meaning():
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    responses = ["so \\boxed{0.5}", "$\\frac{2}{4}$", "2", "\\boxed{x+1}", "nothing"]
    assert scores_of("math", responses, answer=["1/2", "\\frac12", "1/2", "1+x", "3"]) == [1, 1, 0, 1, 0]


class FakeMath:
    """math-verify, as far as the reward uses it, on texts; `verify` counts for ever where the response says so."""

    @staticmethod
    def parse(text, parsing_timeout):
        assert parsing_timeout is None  # a limit of its own would take the system's timer away
        return [text.strip("$")] if text.strip("$") != "?" else []

    @staticmethod
    def verify(gold, target, timeout_seconds):
        assert timeout_seconds is None
        while target == ["slow"]:
            pass
        return gold == target


def test_mathematics_that_takes_too_long_is_wrong_and_references_must_be_mathematics(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", FakeMath)
    assert scores_of("math:seconds=0.05", ["slow", "1", "2"], answer=["1", "1", "1"]) == [0, 1, 0]
    with pytest.raises(ValueError, match=r"answer='\?' of the prompt 'prompt 0' contains no mathematics"):
        scores_of("math", ["1"], answer=["?"])


def test_mathematics_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"--reward='math' needs the library math-verify.*hybrid-engine\[math\]"):
        load_rewards(["math"])


def test_the_docstring_of_the_rules_names_each_of_them():
    text = sys.modules[BUILT_IN["exact"].__module__].__doc__
    assert all(f"\n    {name}" in text for name in BUILT_IN)
