"""The examples of docs/rewards.md run as they stand, and its tables name what there is."""

import doctest
import re
import sys

import pytest

from hybrid_engine.rlhf.rewards.judges import RULES
from hybrid_engine.rlhf.rewards.loading import GIVEN, load_rewards
from tests.support.answers import answers_of
from tests.support.paths import DOCS

PAGE = (DOCS / "rewards.md").read_text()


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The page's module of reward functions, in the present folder."""
    module, session = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return session


def test_the_session_prints_what_the_page_says(example):
    test = doctest.DocTestParser().get_doctest(example, {}, "docs/rewards.md", None, 0)
    report = []
    assert len(test.examples) == 7
    assert doctest.DocTestRunner(verbose=False).run(test, out=report.append).failed == 0, "".join(report)


def test_the_process_reward_of_the_page_puts_its_numbers_at_the_ends_of_lines(example):
    scores = load_rewards(["my_rewards:lines"])(answers_of(["p"], ["1+1\n=2"]))
    assert scores.total == [1.0] and scores.per_token[0].index(1.0) == 5


def test_the_tables_name_every_rule_and_every_list_that_a_function_gets():
    for name in RULES:
        assert re.search(rf"^\| `{name}[`:]", PAGE, re.MULTILINE), name
    for name in GIVEN:
        assert re.search(rf"^\| .*`{name}`", PAGE, re.MULTILINE), name
