"""Functions of the user's as rewards: what they are given, and what is said of those that fail."""

import asyncio
import re
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
from trl.rewards import get_repetition_penalty_reward, think_format_reward

from hybrid_engine.rlhf.rewards.loading import call_function, columns_needed
from hybrid_engine.rlhf.rewards.rewards import OutOfTime, Rewards, within
from hybrid_engine.rlhf.rewards.scores import Reward, RewardError
from tests.support.answers import answers_of
from tests.support.distributed import run_distributed

CHAT = [{"role": "user", "content": "hello"}]
ANSWERS = answers_of(["one", "two", "three"], ["a", "bb", "ccc"], answer=["x", "y", "z"], level=[1, 2, 3])


def rewards_of(*functions, seconds=30.0):
    """Rewards of plain functions, without a module to find them in."""
    return Rewards(
        rewards=tuple(
            Reward(
                spec=f"m:{function.__name__}",
                name=function.__name__,
                weight=1.0,
                judge=lambda a, f=function: call_function(f, a),
            )
            for function in functions
        ),
        time_limit_seconds=seconds,
    )


def test_a_function_is_given_what_its_signature_asks_for():
    seen = {}

    def score(response_ids, prompts, level, *, is_cut_off, missing=7):
        seen.update(locals())
        return [0] * 3

    call_function(score, ANSWERS)
    assert seen["prompts"] == ["one", "two", "three"] and seen["level"] == [1, 2, 3]
    assert seen["response_ids"][1] == [98, 98, 0] and seen["is_cut_off"] == [False] * 3 and seen["missing"] == 7
    assert columns_needed(score) == {"level"}


@pytest.mark.parametrize("function", [lambda p, r: [*p, *r], lambda p, r, *more, level=0: [*p, *r]])
def test_a_function_with_names_of_its_own_gets_prompts_and_responses(function):
    assert call_function(function, ANSWERS) == ["one", "two", "three", "a", "bb", "ccc"]
    assert columns_needed(function) == frozenset()


def test_a_function_of_trl_runs_as_it_is():
    def accuracy(completions, answer, **kwargs):
        assert set(kwargs) >= {"prompts", "completion_ids", "prompt_ids", "level"}
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    def chat_length(completions, **kwargs):
        return [float(len(completion[0]["content"])) for completion in completions]

    assert rewards_of(accuracy)(answers_of(["p"], ["x"], answer=["x"], level=[1])).total == [1.0]
    assert rewards_of(chat_length)(answers_of([CHAT], ["four"])).total == [4.0]


def test_rewards_of_trl_give_what_trl_makes_of_them():
    texts = ["<think>\na\n</think>\nb", "b b b b"]
    answers = answers_of([CHAT, CHAT], texts)
    repeats = get_repetition_penalty_reward(ngram_size=2)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert call_function(think_format_reward, answers) == think_format_reward(completions) == [1.0, 0.0]
    assert call_function(repeats, answers) == repeats(completion_ids=answers.response_ids) != [0.0, 0.0]


def test_an_object_an_iterator_a_tensor_and_a_coroutine_serve_as_well():
    class Judge:
        def __call__(self, responses):
            return (len(text) for text in responses)

    async def asynchronous(responses):
        return [float(len(text)) for text in responses]

    def tensor(responses):
        return torch.tensor([len(text) for text in responses])

    def rows(response_ids):
        return [torch.ones(len(ids)) for ids in response_ids]

    for function in (Judge(), asynchronous, tensor):
        assert [float(value) for value in call_function(function, ANSWERS)] == [1.0, 2.0, 3.0]
    assert rewards_of(asynchronous, tensor).__call__(ANSWERS).total == [2.0, 4.0, 6.0]
    assert rewards_of(rows)(ANSWERS).per_token == [[1.0] * 2, [1.0] * 3, [1.0] * 4]


def test_a_coroutine_runs_where_a_loop_runs_already():
    async def asynchronous(responses):
        await asyncio.sleep(0)
        return [1.0 for _ in responses]

    async def notebook():
        return rewards_of(asynchronous)(ANSWERS).total

    assert asyncio.run(notebook()) == [1.0] * 3


@pytest.mark.parametrize(
    ("returned", "rule"),
    [
        (None, "must return a list of numbers and returned None"),
        ("abc", "must return a list of numbers and returned 'abc'"),
        (["1", "2", "3"], "gave the answer to the prompt 'one' the score '1'; a score must be a number from"),
        (
            [1.0, 1e300, 1.0],
            r"gave the answer to the prompt 'two' the score 1e\+300; a score must be a",
        ),
        (
            lambda: None,
            "returns a reward function, not rewards: it returned .*; call it in your own module, such as score = score",
        ),
        ([1.0, float("nan"), 1.0], "gave the answer to the prompt 'two' the score nan"),
        ([1.0, 2.0, [0.5, float("-inf")]], "gave the answer to the prompt 'three' the score -inf"),
        ([1.0, {}, 1.0], "gave the answer to the prompt 'two' the score {}"),
        ([1.0], r"returned 1 scores for 3 responses; .*alone it fails at none; the first prompt is 'one'"),
    ],
)
def test_what_is_no_score_is_named_with_reward_and_prompt(returned, rule):
    def score(responses):
        return returned

    with pytest.raises(ValueError, match=f"--reward='m:score' {rule}"):
        rewards_of(score)(ANSWERS)


def test_a_wrong_number_of_scores_is_traced_to_a_prompt():
    def score(responses):
        return [1.0 for text in responses if text != "bb"]

    with pytest.raises(ValueError, match=r"returned 2 scores for 3 .* fails first \(WrongCount\) at the prompt 'two'"):
        rewards_of(score)(ANSWERS)


def test_an_error_is_the_cause_of_one_that_names_reward_and_prompt():
    def score(responses):
        return [1 / (len(text) - 3) for text in responses]

    with pytest.raises(RewardError, match=r"m:score' raised ZeroDivisionError: .* at the prompt 'three'") as raised:
        rewards_of(score)(ANSWERS)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(RewardError, match=r"raised ZeroDivisionError: .*; the prompt is 'three'"):
        rewards_of(score)(ANSWERS.choose([2]))


def test_ctrl_c_in_a_function_is_ctrl_c():
    def score(responses):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewards_of(score)(ANSWERS)


def loop(text):
    while True:
        pass


def swallow(text):
    while True:
        with suppress(Exception):
            time.sleep(60)


def backtrack(text):
    return re.match("(a+)+$", "a" * 60 + "b")


def wait_for_a_lock(text):
    threading.Lock().acquire() and threading.Event().wait()


@pytest.mark.parametrize("hang", [loop, swallow, backtrack, wait_for_a_lock])
def test_a_function_that_does_not_end_is_interrupted_and_named(hang):
    def score(responses):
        return [hang(text) if text == "bb" else 1.0 for text in responses]

    with pytest.raises(
        RewardError, match=r"m:score' did not finish within 0.05 s .*\(out of time\) at the prompt 'two'"
    ):
        rewards_of(score, seconds=0.05)(ANSWERS)


def test_a_coroutine_that_does_not_end_is_interrupted():
    async def score(responses):
        await asyncio.sleep(60)

    with pytest.raises(RewardError, match=r"did not finish within 0\.05 s"):
        rewards_of(score, seconds=0.05)(ANSWERS)


def test_what_swallows_one_interruption_meets_the_next(monkeypatch):
    monkeypatch.setattr("hybrid_engine.rlhf.rewards.rewards.SECONDS_TO_NEXT_TRY", 0.02)
    tries = []

    def stubborn():
        while len(tries) < 3:
            try:
                time.sleep(60)
            except BaseException as error:
                tries.append(error)
        time.sleep(60)

    with pytest.raises(OutOfTime):
        within(0.02, stubborn)
    assert len(tries) == 3


def test_limits_stand_in_one_another_and_a_timer_of_the_users_goes_on():
    rang = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rang.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(OutOfTime):
            within(30, lambda: within(0.01, lambda: time.sleep(60)))
        with pytest.raises(OutOfTime):
            within(0.01, lambda: within(30, lambda: time.sleep(60)))
        assert not rang and 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        threading.Event().wait(0.3)
        assert rang == [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_outside_of_the_main_thread_a_function_is_given_up_on():
    outcomes, release = [], threading.Event()

    def run():
        for action in (lambda: 7, release.wait, lambda: [][0]):
            try:
                outcomes.append(within(0.05, action))
            except (OutOfTime, IndexError) as error:
                outcomes.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    release.set()
    assert outcomes == [7, OutOfTime, IndexError]


def score_where_one_rank_raises(rank, world_size):
    def score(responses):
        return [1 / (len(text) - 3) for text in responses]

    try:
        rewards_of(score)(answers_of(["mine"], ["ccc" if rank == 1 else "c"]))
    except RewardError as error:
        return str(error)


def test_an_error_of_one_process_is_that_of_all():
    alone, raising = run_distributed(score_where_one_rank_raises, 2)
    assert raising.startswith("--reward='m:score' raised ZeroDivisionError") and raising.endswith("is 'mine'")
    assert alone == f"rank 1: {raising}"
