"""GRPO end to end with a tiny model: what it writes, how it goes on, what does not change it, what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_engine.cli import cli
from hybrid_engine.recipes import grpo, online_dpo
from hybrid_engine.rlhf import algorithms
from hybrid_engine.rlhf.data.prompts import select_prompts
from hybrid_engine.rlhf.experience.rollout import (
    AnswerSampling,
    BestAnswer,
    GroupSource,
    Replay,
    choose_groups,
    join,
    sample,
)
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.runs.run_folder import read_answers, read_metrics
from hybrid_engine.rlhf.tasks import arithmetic
from hybrid_engine.rlhf.tasks.corpus import build_small_llama
from tests.support.answers import check_followed
from tests.support.distributed import run_distributed
from tests.support.interrupted_runs import stopped_after
from tests.support.small_actors import save_small_actor, save_sums

SIZES = {
    "steps": 4,
    "rollout_size": 4,
    "group_size": 4,
    "minibatch_size": 16,
    "micro_batch_size": 8,
    "max_new_tokens": 6,
    "learning_rate": 3e-3,
    "eval_every": 2,
    "eval_prompts": 4,
    "eval_samples": 2,
    "save_every": 0,
}
TIMES = ("seconds", "per_second", "bytes")
FIGURES = {
    *("score", "reward_regex", "length", "kl_per_sequence", "entropy_estimate", "groups_without_variance"),
    *("policy_loss", "ratio", "clip_fraction", "grad_norm", "first_ratio", "cut_off_share"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_actor(tmp_path_factory.mktemp("model"), arithmetic.build_tokenizer())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return save_sums(tmp_path_factory.mktemp("data"))


@pytest.fixture
def tiny(model, dataset, tmp_path):
    def build(name="run", **options):
        given = {"out": str(tmp_path / name), "model": model, "dataset": dataset, "reward": ("regex:[0-4]$",)}
        return grpo.Config(**{**SIZES, **given, **options})

    return build


def weights_in(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def without_times(line):
    return {name: value for name, value in line.items() if not name.endswith(TIMES)}


def test_a_run_learns_and_leaves_metrics_plot_samples_result_and_the_best_and_the_last_actor(tiny, tmp_path):
    config = tiny(steps=12, learning_rate=1e-2)
    grpo.run(config)
    folder = tmp_path / "run"
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(12))
    assert all(line.keys() >= FIGURES for line in lines)
    assert ["held_out_pass_at_2" in line for line in lines[:4]] == [False, True, False, True]
    # Of the step itself, also where an evaluation follows.
    assert all(line["training_seconds"] > 0 and line["e2e_seconds"] > line["generate_seconds"] for line in lines)
    assert lines[0]["first_ratio"] == pytest.approx(1, abs=1e-5)
    assert lines[0]["learning_rate"] > lines[-1]["learning_rate"] > 0  # of the step itself, not of the next
    assert lines[0]["kl_per_sequence"] == pytest.approx(0, abs=1e-4)
    result = json.loads((folder / "result.json").read_text())
    assert result["after"]["score"] > result["before"]["score"] + 0.2
    assert result["best"]["score"] == max(line.get("held_out_score", 0) for line in lines)
    answers = read_answers(folder / "answers.jsonl")
    assert [line["step"] for line in answers] == [step for step in (0, 2, 4, 6, 8, 10, 12) for _ in range(4)]
    check_followed(answers, set(range(0, 13, 2)))
    assert "".join(answers[0]["tokens"][0]).removesuffix("<eos>") == answers[0]["responses"][0]
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert {row.keys() == {"prompt", "before", "after"} for row in json.loads((folder / "samples.json").read_text())}
    assert not all(map(torch.equal, weights_in(folder / "actor").values(), weights_in(config.model).values()))
    assert len(AutoTokenizer.from_pretrained(folder / "best")) == len(arithmetic.build_tokenizer())
    assert weights_in(folder / "best").keys() == weights_in(folder / "actor").keys()


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tiny, tmp_path):
    algorithm = Algorithm(
        dynamic_sampling=2,
        kl_place="loss",
        kl_coef=0.1,
        kl_target=0.5,
        kl_horizon=64.0,
        overlong_buffer=0.5,
        entropy_target=4.0,
        entropy_change=0.1,
        top_entropy=0.5,
        policy_loss="kl-cov",
    )
    whole, torn = (tiny(name, algorithm=algorithm, steps=5, save_every=1, epochs=2) for name in ("whole", "torn"))
    grpo.run(whole)
    with stopped_after(3):
        grpo.run(torn)
    with pytest.raises(ValueError, match=r"--resume: --group-size=2 but the interrupted run had 4"):
        grpo.run(replace(torn, resume=True, group_size=2, minibatch_size=8))
    with pytest.raises(ValueError, match=r"--resume: --clip-high=0.3 but the interrupted run had 0.2"):
        grpo.run(replace(torn, resume=True, algorithm=replace(algorithm, clip_high=0.3)))
    grpo.run(replace(torn, resume=True))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole"))
    assert list(map(without_times, ours)) == list(map(without_times, theirs))
    assert all(map(torch.equal, *(weights_in(tmp_path / name / "actor").values() for name in ("torn", "whole"))))


TWO_REWARDS = """
import zlib

def small(responses):
    return [float(text[-1:] in set("01234")) for text in responses]

def large(prompts, responses):
    noise = [zlib.crc32((prompt + text).encode()) % 1000 / 1000 - 0.5 for prompt, text in zip(prompts, responses)]
    return [100 * ((text[:1] in set("13579")) + 3 * number) for text, number in zip(responses, noise)]
"""


def test_of_rewards_of_scales_1_and_100_a_sum_learns_the_second_and_decoupled_ones_both(tiny, tmp_path, monkeypatch):
    # Half of the variance of the second reward is noise, which is 30 times as large as the first.
    (tmp_path / "two_rewards.py").write_text(TWO_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"steps": 20, "rollout_size": 8, "group_size": 8, "minibatch_size": 64, "micro_batch_size": 64}
    sizes |= {"max_new_tokens": 4, "learning_rate": 1e-2, "eval_every": 0}
    learned = {}
    for aggregation in ("sum-then-normalize", "normalize-then-sum"):
        algorithm, rewards = Algorithm(reward_aggregation=aggregation), ("two_rewards:small", "two_rewards:large")
        grpo.run(tiny(aggregation, algorithm=algorithm, reward=rewards, **sizes))
        last = read_metrics(tmp_path / aggregation / "metrics.jsonl")[-5:]
        learned[aggregation] = [sum(line[f"reward_{name}"] for line in last) / 5 for name in ("small", "large")]
    small, large = learned["sum-then-normalize"]
    assert small < 0.6 and large > 70
    small, large = learned["normalize-then-sum"]
    assert small > 0.9 and large > 70


def test_where_rewards_are_decoupled_a_group_teaches_if_any_of_them_varies(tiny, tmp_path, monkeypatch):
    # The weighted sum of both, 2 * length - 2 * length, never varies; normalized they are 2 * z - z.
    (tmp_path / "cancelling.py").write_text(
        "def one(responses): return [float(len(text)) for text in responses]\n"
        "def other(responses): return [-2.0 * len(text) for text in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rewards = ("cancelling:one", "cancelling:other")
    for aggregation, learns in (("sum-then-normalize", False), ("normalize-then-sum", True)):
        algorithm = Algorithm(reward_aggregation=aggregation, dynamic_sampling=1)
        given = {"algorithm": algorithm, "reward": rewards, "reward_weights": (2.0, 1.0), "steps": 1, "eval_every": 0}
        config = tiny(aggregation, **given)
        grpo.run(config)
        (line,) = read_metrics(tmp_path / aggregation / "metrics.jsonl")
        assert (line["groups_without_variance"] < 1) == learns
        assert (line["trained_share"] > 0) == learns


WINDOW = {
    "rollout_size": 40,
    "group_size": 2,
    "minibatch_size": 80,
    "steps": 4,
    "eval_every": 0,
    "pass_window": (0.5, 0.5),
    "revisit_after": 1,
    "save_every": 1,
}
"""Draws of 40 of the 80 prompts, many of which have a rate outside from the third step on."""


def test_a_window_of_pass_rates_skips_prompts_and_continues_after_an_interruption(tiny, tmp_path):
    whole, torn = (tiny(name, **WINDOW) for name in ("whole", "torn"))
    grpo.run(whole)
    with stopped_after(3):
        grpo.run(torn)
    grpo.run(replace(torn, resume=True))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole"))
    assert list(map(without_times, ours)) == list(map(without_times, theirs))
    assert ours[0]["prompts_skipped"] == 0 < ours[2]["prompts_skipped"]
    assert all(line["prompts_drawn"] == 40 for line in ours)


def stored(score, ids, logprobs):
    return BestAnswer(score, [score], "earlier", ids, logprobs, False)


def test_a_better_answer_of_an_earlier_step_takes_the_place_of_the_worst(actor):
    tokenizer = arithmetic.build_tokenizer()
    options = AnswerSampling(max_prompt_tokens=16, max_new_tokens=3, temperature=1.0, num_samples=3)
    rewards = load_rewards(["length:most=100"])  # 0 for every answer
    long, plain = [5, 6, 7, 8, 9, 10], GroupSource(
        actor=actor, tokenizer=tokenizer, rewards=rewards, rows=rows_of(8), options=options, seed=0
    )  # fmt: skip
    replay = Replay()
    (first, *_) = select_prompts(8, 0, 4, seed=0)
    replay.note([(first, stored(0.5, long, [-1.0] * 6)), (first, stored(0.25, [5], [-2.0]))])
    given = plain.draw(num_prompts=4, max_redraws=0, num_drawn=0, step=0)
    groups = replace(plain, replay=replay).draw(num_prompts=4, max_redraws=0, num_drawn=0, step=0)
    assert groups.is_replayed.tolist() == [True] + [False] * 11 and groups.scores.tolist() == [0.5] + [0.0] * 11
    assert groups.rewards[:, 0].tolist() == groups.scores.tolist() and groups.figures["replayed_share"] == 1 / 12
    mask = groups.rollout.sequences.response_mask
    assert groups.rollout.sequences.responses[0][mask[0]].tolist() == long == groups.rollout.answers.response_ids[0]
    assert groups.rollout.logprobs[0].tolist() == [-1.0] * 6 and groups.rollout.answers.responses[0] == "earlier"
    assert groups.figures["groups_without_variance"] == 3 / 4
    for row in range(1, 12):  # the others stay as they were sampled
        theirs = given.rollout.sequences.response_mask[row]
        assert groups.rollout.answers.response_ids[row] == given.rollout.answers.response_ids[row]
        assert torch.equal(groups.rollout.logprobs[row][mask[row]], given.rollout.logprobs[row][theirs])
    assert replay.answers.keys() == set(select_prompts(8, 0, 4, seed=0)) and replay.answers[first].score == 0.5
    other = Replay()
    other.load(replay.state())
    assert other.answers == replay.answers


def test_an_answer_that_is_no_better_is_not_replayed():
    replay = Replay()
    replay.note([(3, stored(0.5, [5], [-1.0])), (3, stored(0.5, [6], [-2.0]))])
    assert replay.answers[3].response_ids == [6]  # of two equally good ones the newer
    nan = float("nan")
    for scores, is_better in (([0.5, 0.0], False), ([nan, 0.25], True), ([nan, nan], False), ([1.0, 0.0], False)):
        assert (replay.better(3, torch.tensor(scores)) is not None) == is_better
    assert replay.better(4, torch.tensor([0.0])) is None


def test_a_run_that_replays_continues_after_an_interruption_and_corrects_by_the_ratio(tiny, tmp_path):
    given = {
        **WINDOW, "pass_window": (), "revisit_after": 4, "replay_best": True, "learning_rate": 1e-2, "steps": 5,
        "reward": ("regex:^[0-1]",),
    }  # fmt: skip
    whole, torn = (tiny(name, **given) for name in ("whole", "torn"))
    grpo.run(whole)
    with stopped_after(3):
        grpo.run(torn)
    grpo.run(replace(torn, resume=True))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole"))
    assert list(map(without_times, ours)) == list(map(without_times, theirs))
    assert ours[0]["replayed_share"] == 0 < ours[-1]["replayed_share"] < 0.5
    assert ours[0]["first_ratio"] == pytest.approx(1, abs=1e-5)
    assert abs(ours[-1]["first_ratio"] - 1) > 1e-3 > ours[-1]["logprob_difference_mean"]


PARTIAL = {"partial_rollouts": True, "steps": 5, "save_every": 1, "max_new_tokens": 12, "reward": ("length:most=4",)}


def test_partial_rollouts_train_whole_groups_and_continue_the_others_also_after_an_interruption(tiny, tmp_path):
    whole, torn = (tiny(name, **PARTIAL) for name in ("whole", "torn"))
    grpo.run(whole)
    with stopped_after(3):
        grpo.run(torn)
    grpo.run(replace(torn, resume=True))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole"))
    assert list(map(without_times, ours)) == list(map(without_times, theirs))
    assert all(map(torch.equal, *(weights_in(tmp_path / name / "actor").values() for name in ("torn", "whole"))))
    assert [line["prompts_drawn"] for line in ours] == [6, 4, 4, 4, 2], "half as many groups again are open"
    assert ours[0]["stale_share"] == ours[0]["staleness_max"] == 0
    assert all(0 < line["stale_share"] < 1 == line["staleness_max"] for line in ours[1:])
    assert ours[0]["first_ratio"] == pytest.approx(1, abs=1e-5)
    assert any(abs(line["first_ratio"] - 1) > 1e-5 for line in ours[1:]), "the ratio is to the sampler of that time"


def test_a_correction_weighs_for_the_age_of_answers_instead_of_the_ratio(tiny, tmp_path):
    algorithm = replace(Algorithm(), correction="truncated", correction_threshold=0.0)
    grpo.run(tiny(**PARTIAL | {"steps": 3, "algorithm": algorithm, "max_staleness": 2}))
    first, *others = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(line["first_ratio"] == pytest.approx(1, abs=1e-5) for line in (first, *others))
    assert all(abs(line["correction_weight"] - 1) > 1e-5 for line in others)
    assert max(line["staleness_max"] for line in others) in (1, 2)


def test_two_processes_skip_the_prompts_that_one_skips_and_replay_the_same_answers(tiny, tmp_path):
    config = tiny("one", **WINDOW | {"steps": 3, "replay_best": True})
    grpo.run(config)
    run_distributed(run_with_adapter_and_without, 2, [replace(config, out=str(tmp_path / "two"))])
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for ours, theirs in zip(one, two, strict=True):
        for name in ("prompts_skipped", "prompts_outside", "replayed_share", "score", "groups_without_variance"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name


def test_a_step_that_trains_nothing_logs_what_was_measured_last_also_after_an_interruption(tiny, tmp_path, monkeypatch):
    (tmp_path / "first_two.py").write_text(
        "def score(responses, trainer_state):\n"
        "    return [trainer_state.global_step < 2 and text[-1:] < '5' for text in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {"steps": 3, "save_every": 1, "eval_every": 0, "reward": ("first_two:score",)}
    whole, torn = (tiny(name, **given) for name in ("whole", "torn"))
    grpo.run(whole)
    with stopped_after(2):
        grpo.run(torn)
    grpo.run(replace(torn, resume=True))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "whole"))
    assert theirs[1]["trained_share"] > 0 and theirs[2]["trained_share"] == 0
    assert theirs[2]["logprob_difference_mean"] == theirs[1]["logprob_difference_mean"]
    assert list(map(without_times, ours)) == list(map(without_times, theirs))


def run_with_adapter_and_without(rank, world_size, configs):
    for config in configs:
        grpo.run(config)


def test_two_processes_under_zero_3_train_as_one_does(tiny, tmp_path):
    algorithm = Algorithm.from_options(
        {"preset": "dapo", "kl_place": "token-reward", "kl_coef": 0.05, "dynamic_sampling": 2}
    )
    whole = tiny("whole-1", steps=2, algorithm=algorithm)
    adapter = tiny("adapter-1", steps=2, lora_rank=2, algorithm=Algorithm(baseline="batch-mean", scale="batch-whiten"))
    choosing = Algorithm(
        reward_aggregation="normalize-then-sum",
        policy_loss="clip-cov",
        cov_share=0.1,
        cov_low=0.1,
        top_entropy=0.5,
        entropy_target=9.0,
    )
    chosen = tiny("chosen-1", steps=2, algorithm=choosing, reward=("regex:[0-4]$", "regex:^[13579]"))
    run_with_adapter_and_without(0, 1, [whole, adapter, chosen])
    sharded = [
        replace(config, out=f"{config.out[:-1]}2", zero_stage=stage)
        for config, stage in ((whole, 3), (adapter, 2), (chosen, 0))
    ]
    run_distributed(run_with_adapter_and_without, 2, sharded)
    assert {"counted_share", "covariant_share"} < read_metrics(tmp_path / "chosen-1" / "metrics.jsonl")[0].keys()
    for name in ("whole", "adapter", "chosen"):
        one, two = (read_metrics(tmp_path / f"{name}-{number}" / "metrics.jsonl") for number in (1, 2))
        for ours, theirs in zip(one, two, strict=True):
            for figure in (FIGURES | {"held_out_score", "counted_share", "covariant_share"}) & ours.keys():
                assert ours[figure] == pytest.approx(theirs[figure], rel=1e-3, abs=1e-4), (name, figure)


def test_the_micro_batches_packing_and_recomputation_do_not_change_the_training(tiny, tmp_path, capsys):
    ways = [
        {"micro_batch_size": 16},
        {"micro_batch_size": 3},
        {"tokens_per_micro_batch": 102},
        {"tokens_per_micro_batch": 110, "activation_checkpointing": True},
    ]
    for number, way in enumerate(ways):
        grpo.run(tiny(f"way-{number}", steps=2, eval_every=0, **way))
    assert "padded, not packed" not in capsys.readouterr().out
    first, *others = (weights_in(tmp_path / f"way-{number}/actor") for number in range(len(ways)))
    for other in others:
        for ours, theirs in zip(other.values(), first.values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_packed_or_recomputed_is_refused(tiny):
    with pytest.raises(
        ValueError, match=r"--tokens-per-micro-batch=101 must hold the longest sequence.* raise it to 102"
    ):
        tiny(tokens_per_micro_batch=101, max_prompt_tokens=96)
    with pytest.raises(ValueError, match="--exact uses its own forward pass"):
        tiny(exact=True, activation_checkpointing=True)


@pytest.fixture(scope="module")
def actor(model):
    import hybrid_engine

    engine, *_ = hybrid_engine.initialize(
        model=AutoModelForCausalLM.from_pretrained(model),
        config={"train_batch_size": 4, "hybrid_engine": {"enabled": True, "max_out_tokens": 64}},
    )
    return engine.eval()


def rows_of(count):
    return arithmetic.prompt_rows(0)[0][:count]


def test_groups_without_variance_are_drawn_again_from_the_next_prompts_and_no_more_often_than_allowed(
    actor, monkeypatch
):
    asked, options = [], AnswerSampling(max_prompt_tokens=16, max_new_tokens=3, temperature=1.0, num_samples=2)

    def judge(prompts, responses):
        """Only the answers to every third prompt differ."""
        asked.extend(prompts[::2])
        return [float(index % 2) if wanted[prompt] else 1.0 for index, prompt in enumerate(prompts)]

    rows = rows_of(40)
    wanted = {row.prompt: number % 3 == 0 for number, row in enumerate(rows)}
    rewards = load_rewards(["length:most=2"])
    monkeypatch.setattr(
        type(rewards), "__call__", lambda self, answers: scored(judge(answers.prompts, answers.responses))
    )
    source = GroupSource(
        actor=actor, tokenizer=arithmetic.build_tokenizer(), rewards=rewards, rows=rows, options=options, seed=0
    )
    groups = source.draw(num_prompts=4, max_redraws=20, num_drawn=0, step=0)
    assert len(set(asked)) == len(asked) == groups.num_drawn == groups.figures["prompts_drawn"]
    kept = groups.rollout.answers.prompts[::2]
    assert [wanted[prompt] for prompt in asked].count(True) == 4 and set(kept) == {p for p in asked if wanted[p]}
    assert groups.figures["groups_without_variance"] == pytest.approx(1 - 4 / len(asked))
    assert groups.scores.tolist() == [0.0, 1.0] * 4

    asked.clear()
    groups = source.draw(num_prompts=4, max_redraws=1, num_drawn=groups.num_drawn, step=1)
    assert len(groups.rollout.answers) == 8 and len(asked) == 4 + sum(not wanted[prompt] for prompt in asked[:4])


def scored(total):
    from hybrid_engine.rlhf.rewards.scores import Scores

    return Scores(total=total, by_name={"judge": total}, per_token=None)


def test_rollouts_that_are_chosen_from_and_joined_keep_every_answer_with_its_logprobs(actor):
    tokenizer, options = (
        arithmetic.build_tokenizer(),
        AnswerSampling(max_prompt_tokens=16, max_new_tokens=5, temperature=1.0, num_samples=2),
    )
    first, second = (sample(actor, tokenizer, rows, options, seed) for rows, seed in ((rows_of(3), 1), (rows_of(2), 2)))
    chosen = choose_groups(first, torch.tensor([True, False, True]))
    joined = join([chosen, second], tokenizer.pad_token_id)
    assert joined.answers.prompts == first.answers.prompts[:2] + first.answers.prompts[4:] + second.answers.prompts
    expected = [(part, row) for part, rows in ((first, (0, 1, 4, 5)), (second, range(4))) for row in rows]
    for index, (part, row) in enumerate(expected):
        mask, theirs = joined.sequences.response_mask[index], part.sequences.response_mask[row]
        assert joined.sequences.responses[index][mask].tolist() == part.answers.response_ids[row]
        assert torch.equal(joined.logprobs[index][mask], part.logprobs[row][theirs])
        assert joined.sequences.attention_mask[index].sum() == part.sequences.attention_mask[row].sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--group-size 1", "--group-size=1 leaves no other sample for"),
        ("--group-size 3 --minibatch-size 256", "--minibatch-size=256 must divide the 192 answers of a step"),
        ("--preset grpo", "--preset='grpo' must be one of deepseekmath, trl"),
        ("--preset dapo --kl-coef 0.1", "--kl-coef=0.1 has no effect with --kl-place=none"),
        ("--kl-place loss --kl-estimator k1 --kl-coef 0.1", "the expected gradient of k1 is zero"),
        ("--dataset prompts.jsonl", "has its own prompts"),
        ("--reward-weights 1 2", "--reward-weights need rewards; give as many --reward"),
        ("--reward exact --reward-weights 1 2", "must be 1 numbers, one for each --reward"),
        ("--reward exact --reward-weights nan", "--reward-weights='nan' must be finite and not all 0"),
        ("--reward number:column=solution", "reads the column 'solution'"),
        ("--learning-rate 0", "--learning-rate=0.0 must be above 0"),
        ("--pass-score nan", "--pass-score=nan must be finite"),
        ("--pass-window 0.9 0.1", "--pass-window=0.9 0.1 must be two rates from 0 to 1, the lower one first"),
        ("--pass-window 0.5", "--pass-window=0.5 must be two rates"),
        ("--preset rloo --replay-best", "--replay-best needs a policy loss with a ratio"),
        ("--revisit-after 1", "--revisit-after=1 needs prompts that are skipped; give --pass-window"),
        ("--max-staleness 2", "--max-staleness=2 applies to --partial-rollouts; give both"),
        ("--partial-rollouts --max-staleness 0", "--max-staleness=0 must be at least 1"),
        ("--partial-rollouts --top-p 0.9", "--partial-rollouts does not record the filters"),
        ("--partial-rollouts --dynamic-sampling 1", "does not wait; leave one of them out"),
        ("--partial-rollouts --preset rloo", "--policy-loss=reinforce has no ratio"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(options, message, tmp_path, capsys):
    assert cli.main(["grpo", "--out", str(tmp_path / "run"), *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_reward_that_tells_no_answers_apart_is_reported_and_changes_nothing(tiny, tmp_path, capsys):
    config = tiny(steps=1, reward=("regex:.*",), eval_every=0)
    grpo.run(config)
    assert "all answers to each of 4 prompts have the same score" in capsys.readouterr().out
    assert all(map(torch.equal, weights_in(tmp_path / "run/actor").values(), weights_in(config.model).values()))


def test_a_run_without_evaluations_has_no_best(tiny, tmp_path):
    grpo.run(tiny(steps=1, eval_every=0))
    result = json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=pytest.fail)
    assert "best" not in result and not (tmp_path / "run" / "best").exists()


def test_a_finished_run_is_made_longer_as_if_it_had_been_so_from_the_start(tiny, tmp_path):
    given = {"save_every": 50, "eval_every": 3, "lr_scheduler_type": "constant", "learning_rate": 1e-2}
    short, whole = tiny("short", steps=2, **given), tiny("whole", steps=4, **given)
    for config in (short, whole, replace(short, resume=True, steps=4)):
        grpo.run(config)
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("short", "whole"))
    assert len(ours) == 4 and "held_out_score" in ours[1]  # after what was the last step
    for mine, other in zip(ours, theirs, strict=True):
        mine = {name: value for name, value in mine.items() if name in other}
        other = {name: value for name, value in other.items() if name in mine}
        assert without_times(mine) == without_times(other)
    weights = (weights_in(tmp_path / name / "actor") for name in ("short", "whole"))
    assert all(map(torch.equal, *(each.values() for each in weights)))
    with pytest.raises(ValueError, match=r"--epochs=2 but the interrupted run had 1; .* use the original --epochs$"):
        grpo.run(replace(short, resume=True, steps=6, epochs=2))
    with pytest.raises(ValueError, match=r"--steps=3 but the interrupted run had 4; .* or more for a longer run$"):
        grpo.run(replace(short, resume=True, steps=3))


def test_the_best_may_be_the_last_where_no_interval_ends(tiny, tmp_path):
    grpo.run(tiny(steps=3, eval_every=2))
    result, lines = (
        json.loads((tmp_path / "run" / "result.json").read_text()),
        read_metrics(tmp_path / "run/metrics.jsonl"),
    )
    assert ["held_out_score" in line for line in lines] == [False, True, True]
    assert lines[2]["held_out_score"] == result["after"]["score"]
    scores = {2: lines[1]["held_out_score"], 3: lines[2]["held_out_score"]}
    assert result["best"] == {"score": max(scores.values()), "step": max(scores, key=scores.get)}


@pytest.mark.parametrize(
    ("options", "rate"), [({}, 1e-6), ({"lora_rank": 2}, 1e-5), ({"learning_rate": 2e-3, "lora_rank": 2}, 2e-3)]
)
@pytest.mark.parametrize("recipe", [grpo, online_dpo])
def test_a_model_of_the_users_is_trained_in_small_steps_unless_told_otherwise(
    recipe, options, rate, model, dataset, tmp_path, monkeypatch
):
    seen = []

    class Enough(Exception):
        pass

    def build_policy(config, source, learning_rate, *rest, **more):
        seen.append(learning_rate)
        raise Enough

    monkeypatch.setattr(recipe, "build_policy", build_policy)
    sources = {"model": model, "dataset": dataset, "reward": ("regex:1",), "out": str(tmp_path)}
    with pytest.raises(Enough):
        recipe.run(recipe.Config(**sources, max_new_tokens=6, **options))
    assert seen == [rate]


def test_a_process_rewards_steps_are_learned_from_and_choices_about_whole_answers_are_refused(
    tiny, tmp_path, monkeypatch
):
    (tmp_path / "steps.py").write_text(
        "def score(response_ids): return [[float(token % 3) for token in ids] for ids in response_ids]\n"
    )
    monkeypatch.chdir(tmp_path)
    seen = []
    normalised_steps = algorithms.normalised_steps
    monkeypatch.setattr(
        algorithms, "normalised_steps", lambda steps, *rest: seen.append(steps) or normalised_steps(steps, *rest)
    )
    grpo.run(tiny(steps=1, eval_every=0, reward=("steps:score",), algorithm=Algorithm(dynamic_sampling=1)))
    (steps,) = seen
    assert steps.shape[0] == 16 and set(steps[~steps.isnan()].tolist()) == {1.0, 2.0}
    for name, value in (("baseline", "leave-one-out"), ("scale", "batch-std"), ("overlong_buffer", 0.5)):
        with pytest.raises(ValueError, match=f"{value} applies to whole answers, but a --reward scores"):
            grpo.run(tiny(name, steps=1, eval_every=0, reward=("steps:score",), algorithm=Algorithm(**{name: value})))


def test_two_processes_learn_from_steps_as_one_does_also_where_only_one_draws_again(tiny, tmp_path, monkeypatch):
    (tmp_path / "halves.py").write_text(
        "def score(prompts, response_ids):\n"
        "    is_told = [int(prompt.split('+')[0]) % 2 for prompt in prompts]\n"
        "    return [[float(told and token % 3) for token in ids] for told, ids in zip(is_told, response_ids)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    algorithm = Algorithm(dynamic_sampling=3, kl_place="token-reward", kl_coef=0.05, kl_estimator="k1")
    config = tiny("steps-1", steps=2, eval_every=0, reward=("halves:score",), algorithm=algorithm)
    grpo.run(config)
    run_distributed(run_with_adapter_and_without, 2, [replace(config, out=str(tmp_path / "steps-2"), zero_stage=3)])
    one, two = (read_metrics(tmp_path / f"steps-{number}" / "metrics.jsonl") for number in (1, 2))
    for ours, theirs in zip(one, two, strict=True):
        assert ours["prompts_drawn"] > 4
        for figure in (FIGURES - {"reward_regex"}) | {"reward_score", "prompts_drawn"}:
            assert ours[figure] == pytest.approx(theirs[figure], rel=1e-3, abs=1e-4), figure


def save_teacher(folder, tokenizer):
    """A small model that is sure of its tokens."""
    torch.manual_seed(1)
    teacher = build_small_llama(tokenizer, hidden_size=64, num_layers=1)
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(8)
    teacher.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"), arithmetic.build_tokenizer())


def test_a_teacher_alone_needs_no_group_and_no_scores_that_differ(tiny, teacher, tmp_path):
    options = {"group_size": 1, "rollout_size": 16, "eval_every": 0, "reward": ("regex:nothing",)}
    grpo.run(tiny(teacher=teacher, teacher_alone=True, steps=12, learning_rate=1e-2, **options))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(line["trained_share"] == 1 and line["score"] == 0 for line in lines)
    assert lines[-1]["teacher_kl_per_token"] < 0.7 * lines[0]["teacher_kl_per_token"]


def test_a_teacher_is_added_to_the_advantages_of_scores(tiny, teacher, tmp_path, monkeypatch):
    found = []

    def build_experience(*given, teacher):
        experience, figures = real(*given, teacher=teacher)
        found.append((given, experience))
        return experience, figures

    real = grpo.build_experience
    monkeypatch.setattr(grpo, "build_experience", build_experience)
    grpo.run(tiny(teacher=teacher, teacher_coef=0.25, steps=1, eval_every=0))
    given, experience = found[0]
    alone, _ = real(*given)
    logits = load_logits(teacher, experience.sequences)
    mask = experience.sequences.response_mask
    of_teacher = logits.log_softmax(-1).gather(2, experience.sequences.responses[:, :, None]).squeeze(2)
    expected = alone.batch.advantages + 0.25 * (of_teacher - experience.batch.logprobs_old)
    torch.testing.assert_close(experience.batch.advantages, torch.where(mask, expected, 0.0), atol=1e-4, rtol=1e-4)


def load_logits(folder, sequences):
    """`[N, T, V]`: the logits of the response tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    positions = {"attention_mask": sequences.attention_mask, "position_ids": sequences.position_ids}
    with torch.no_grad():
        logits = model(sequences.input_ids, **positions).logits
    return logits[:, -sequences.response_mask.shape[1] - 1 : -1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teacher_coef": 0.5}, "--teacher-coef applies to a run with a teacher; give --teacher"),
        ({"teacher_alone": True}, "--teacher-alone applies to a run with a teacher; give --teacher"),
        ({"teacher": "t", "teacher_coef": 0.0}, "--teacher-coef=0"),
        ({"teacher_clamp": 10.0}, "--teacher-clamp applies to a run with a teacher; give --teacher"),
        ({"teacher": "t", "teacher_clamp": 0.0}, "--teacher-clamp=0"),
        ({"teacher": "self"}, "--teacher=self is a teacher of distill; grpo learns from a model in memory"),
        ({"teacher": "adapter:a"}, "--teacher=adapter:a is a teacher of distill"),
        ({"teacher": "http://h/v1"}, "--teacher=http://h/v1 is a teacher of distill"),
        (
            {"teacher": "t", "teacher_alone": True, "algorithm": Algorithm(dynamic_sampling=2)},
            "--dynamic-sampling=2 acts on rewards, but --teacher-alone",
        ),
        (
            {"teacher": "t", "teacher_alone": True, "algorithm": Algorithm(kl_place="reward", kl_coef=0.1)},
            "--kl-place=reward puts the KL into rewards",
        ),
    ],
)
def test_options_of_a_teacher_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        grpo.Config(**options)


def test_a_teacher_with_other_tokens_is_refused_before_training(tiny, tmp_path):
    tokenizer = arithmetic.build_tokenizer()
    tokenizer.add_tokens(["other"])
    with pytest.raises(ValueError, match="has other tokens than the actor"):
        grpo.run(tiny(teacher=save_small_actor(tmp_path / "other", tokenizer)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_plan_counts_the_teacher(model, dataset, teacher, capsys):
    command = f"plan grpo --model {model} --dataset {dataset} --reward regex:1 --json"
    peaks = []
    for more in ("", f" --teacher {teacher}"):
        assert cli.main((command + more).split()) == 0
        peaks.append(json.loads(capsys.readouterr().out)["training_peak_bytes"])
    num_bytes = sum(weight.numel() * 4 for weight in weights_in(teacher).values())
    assert peaks[1] - peaks[0] == pytest.approx(num_bytes, rel=0.05)
