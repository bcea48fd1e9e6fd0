"""The pupil's additions: the written form is right, the forgotten carry is what makes a sum wrong, nothing leaks."""

import itertools
import random
import re

from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.rewards.scores import Answers
from hybrid_engine.rlhf.tasks import arithmetic


def test_a_sum_without_a_mistake_is_right_and_every_column_is_written():
    for problem in itertools.islice(arithmetic.problems(False, 1), 300):
        columns, result = arithmetic.right_sum(problem).split(";")
        assert int(result) == problem.first + problem.second
        for column in columns.split(","):
            terms, total = column.split("=")
            assert sum(map(int, terms.split("+"))) == int(total)
        assert problem.answer == result


def test_the_pupil_is_right_in_a_third_of_his_sums_and_his_likeliest_work_in_hardly_any():
    generator, drawn = random.Random(0), list(itertools.islice(arithmetic.problems(False, 2), 2000))
    is_right = [arithmetic.pupils_work(problem, generator).split(";")[1] == problem.answer for problem in drawn]
    likeliest = [arithmetic.written_sum(problem, [True] * problem.num_digits).split(";")[1] for problem in drawn]
    is_easy = [work == problem.answer for work, problem in zip(likeliest, drawn, strict=True)]
    assert 0.3 < sum(is_right) / len(drawn) < 0.37
    assert sum(is_easy) / len(drawn) < 0.1


def test_held_out_problems_are_the_same_for_every_seed_and_in_no_training_row():
    (train, held_out), (_, again) = arithmetic.prompt_rows(0), arithmetic.prompt_rows(7)
    assert [row.prompt for row in held_out] == [row.prompt for row in again]
    kept = {row.prompt for row in held_out}
    shown = [*arithmetic.training_rows(3), *train]
    assert len(kept) == arithmetic.NUM_HELD_OUT and not kept & {row.prompt for row in shown}
    assert {row.prompt for row in arithmetic.held_out_work()} == kept


def test_every_character_of_the_task_is_in_its_alphabet():
    texts = [row.prompt + row.completion for row in arithmetic.training_rows(0)[:2000]]
    assert set("".join(texts)) == set(arithmetic.ALPHABET)
    tokenizer = arithmetic.build_tokenizer()
    encoded = tokenizer(texts)["input_ids"]
    assert [len(ids) for ids in encoded] == [len(text) for text in texts]
    assert tokenizer.pad_token_id not in {token for ids in encoded for token in ids}
    assert tokenizer.batch_decode(encoded, skip_special_tokens=True) == texts
    assert all(re.fullmatch(r"\d{3}\+\d{3}=(\d\+\d(\+1)?=\d+,?){3};\d{3,4}", text) for text in texts)


def test_the_reward_of_the_task_is_whether_the_sum_is_right():
    (row,) = arithmetic.prompt_rows(0)[0][:1]
    responses = [f"1+1=2;{row.columns['answer']}", f"1+1=2;{int(row.columns['answer']) + 1}", row.columns["answer"]]
    scores = load_rewards([arithmetic.REWARD])(
        Answers(
            prompts=[row.prompt] * 3,
            responses=responses,
            prompt_ids=[[1]] * 3,
            response_ids=[[1]] * 3,
            is_cut_off=[False] * 3,
            columns={"answer": [row.columns["answer"]] * 3},
        )
    )
    assert scores.total == [1.0, 0.0, 0.0]
