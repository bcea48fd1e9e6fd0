"""Episodes of several turns: the task, the environment, and a run of them."""

import itertools
import json
import math
import random
import shutil
from contextlib import closing
from dataclasses import asdict, replace
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from hybrid_engine.generation.model.probe import LogprobDifference
from hybrid_engine.recipes import agent, sft
from hybrid_engine.rlhf.batches.sequences import epochs_of_similar_length, response_logprobs
from hybrid_engine.rlhf.environments import tasks
from hybrid_engine.rlhf.environments.playing import PolicyClient
from hybrid_engine.rlhf.environments.tasks import prepare_episodes
from hybrid_engine.rlhf.experience.policy import build_policy
from hybrid_engine.rlhf.experience.start import judge_nothing
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.runs.engine_config import Schedule
from hybrid_engine.rlhf.runs.run_folder import read_metrics
from hybrid_engine.rlhf.runs.stages import seed_everything
from hybrid_engine.rlhf.tasks import calculator
from hybrid_engine.rlhf.tasks.calculator import Problem, calculate, is_right
from tests.support.interrupted_runs import stopped_after
from tests.support.small_actors import save_small_actor

PROBLEM = Problem(first=47, inner="+", second=38, outer="*", third=6)


def test_the_calculator_does_one_operation_and_says_e_to_anything_else():
    assert (calculate("47+38"), calculate("0085*6"), calculate("85-80")) == ("0085", "0510", "0005")
    for request in ("", "47", "47+", "1+2+3", "__import__('os')", "4/2", "1 + 2", "9" * 9 + "*2"):
        assert calculate(request) == "e"


def test_a_pupil_who_asks_is_right_and_one_who_guesses_is_not():
    endings = []
    for problem in itertools.islice(calculator.problems(False, 0), 400):
        messages = calculator.pupils_conversation(problem, random.Random(problem.text))
        asked = [m["content"] for m in messages if m["content"].startswith("?")]
        told = [m["content"] for m in messages if m["role"] == "tool"]
        assert [calculate(request[1:]) for request in asked] == told
        endings.append((len(asked), is_right(problem, messages[-1]["content"])))
    assert {is_it for count, is_it in endings if count == 2} == {True}
    assert {is_it for count, is_it in endings if count < 2} == {False}
    share = sum(is_it for _, is_it in endings) / len(endings)
    assert 0.2 < share < 0.4


def test_held_out_problems_are_never_trained_on():
    held_out = {problem.text for problem in calculator.held_out_problems()}
    trained = {problem.text for problem in itertools.islice(calculator.problems(False, 3), 5000)}
    assert len(held_out) == 128 and not held_out & trained


def test_the_tokenizer_marks_what_the_assistant_says():
    tokenizer = calculator.build_tokenizer()
    messages = calculator.pupils_conversation(PROBLEM, random.Random(1))
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    learned = [t for t, is_it in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if is_it]
    assert tokenizer.decode(learned) == "".join(m["content"] + "<eos>" for m in messages if m["role"] == "assistant")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_actor(tmp_path_factory.mktemp("model"), calculator.build_tokenizer())


@pytest.fixture
def tiny(model, tmp_path):
    return agent.Config(
        model=model, out=str(tmp_path / "run"), steps=2, rollout_size=3, group_size=2, num_clients=4, eval_every=0,
        max_prompt_tokens=256, max_new_tokens=6, save_every=1, learning_rate=1e-3,
    )  # fmt: skip


@pytest.fixture
def few_problems(monkeypatch):
    """Four held-out problems, and answers of an untrained model of which some pass, so that steps have variance."""
    monkeypatch.setattr(tasks, "held_out_problems", lambda: [PROBLEM] * 4)
    monkeypatch.setattr(calculator, "is_right", lambda problem, said: sum(map(ord, said)) % 2 == 0)


@pytest.fixture
def play(tiny):
    """Plays episodes of PROBLEM with a policy."""
    with closing(prepare(tiny).playground):
        yield lambda policy, config=tiny: agent.play(policy, [one_task(config)] * 4, prepare(config), 0)[0]


def prepare(config):
    return prepare_episodes(config, calculator.build_tokenizer(), judge_nothing)


def one_task(config):
    return prepare(config).tasks.held_out[0]._replace(arguments=asdict(PROBLEM))


def with_scores(episodes, scores):
    return [replace(episode, score=score) for episode, score in zip(episodes, scores, strict=True)]


@pytest.mark.parametrize(
    "options",
    [{"num_clients": 1}, {"exact": True, "top_k": 6}],
    ids=["one client", "exact mode, filtered"],
)
def test_an_interrupted_run_goes_on_to_the_bit(tiny, tmp_path, few_problems, options):
    whole = replace(tiny, **options)
    torn = replace(whole, out=str(tmp_path / "torn"))
    agent.run(whole)
    with stopped_after(1):
        agent.run(torn)
    agent.run(replace(torn, resume=True))
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("torn", "run"))
    assert list(map(without_times, ours)) == list(map(without_times, theirs)) and len(theirs) == 2
    assert any(line["trained_share"] > 0 for line in theirs)
    ours, theirs = (load_file(tmp_path / name / "actor" / "model.safetensors") for name in ("torn", "run"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def without_times(line):
    return {name: value for name, value in line.items() if not name.endswith(("seconds", "per_second", "bytes"))}


def test_a_run_leaves_metrics_and_an_actor(tiny, tmp_path, few_problems):
    agent.run(tiny)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    assert all(line["episode_seconds"] > 0 and line["length"] > 0 and line["grad_norm"] >= 0 for line in lines)
    assert all(0 <= line["cut_off_share"] <= 1 for line in lines)
    # The log-probabilities that the server recorded are the trainer's: the first ratio is 1.
    assert lines[0]["ratio"] == pytest.approx(1, abs=1e-4)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {"before", "after", "seconds"} <= result.keys()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "actor")) == len(calculator.build_tokenizer())


FLAKY = ("gymnasium:tests.support.some_environments:Flaky",)


def test_a_run_in_an_environment_that_fails_learns_from_the_other_episodes(tiny, tmp_path, monkeypatch, capfd):
    steps, update = [], agent.update

    def watched(policy, episodes, config):
        steps.append((episodes, agent.build_experience(policy, episodes, config)))
        return update(policy, episodes, config)

    monkeypatch.setattr(agent, "update", watched)
    agent.run(replace(tiny, environment=FLAKY, eval_prompts=4, rollout_size=4, save_every=0))
    for (episodes, experience), line in zip(steps, read_metrics(tmp_path / "run" / "metrics.jsonl"), strict=True):
        errors = [episode.played.error for episode in episodes]
        learned = experience.sequences.response_mask.any(dim=1).tolist()
        assert learned == [error is None for error in errors]
        assert line["failed_share"] == line["ended_failed_share"] == sum(map(bool, errors)) / 8
        assert line["reward_Flaky"] == line["score"]
    assert 0 < sum(error is not None for episodes, _ in steps for error in [e.played.error for e in episodes]) < 16
    stored = (tmp_path / "run" / "failed_episodes.jsonl").read_text()
    assert "the server is away" in stored and "episodes failed and are left out" in capfd.readouterr().out


def test_a_dry_run_shows_conversations_and_trains_nothing(tiny, tmp_path, capfd):
    agent.run(replace(tiny, environment=FLAKY, episodes=3, no_train=True))
    shown = capfd.readouterr().out
    assert shown.count("--- episode") == shown.count("[user]\nguess") == 3 and "[assistant]" in shown
    assert not (tmp_path / "run" / "actor").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()


class Says:
    """A stand-in for the `openai` client that answers from a list; an answer that ends with … is cut off."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []
        self.chat = self.completions = self

    def create(self, messages, **_):
        self.asked.append([dict(message) for message in messages])
        said = self.answers.pop(0)
        reason = "length" if said.endswith("…") else "stop"
        message = SimpleNamespace(content=said.removesuffix("…"), tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason=reason)])


def test_the_environment_answers_with_the_calculator_and_judges_the_last_answer(tiny):
    def solve(client):
        policy = PolicyClient(client=client, session_id="0", seed=0, sampling=agent.request_options(tiny))
        (played,) = prepared.playground.play([one_task(tiny)], [policy])
        return played.reward, played.finish_reason, played.num_turns, played.num_cut_off

    prepared, client = prepare(tiny), Says("?47+38", "?0085*6", "=0510")
    assert solve(client) == (1.0, "done", 3, 0)
    assert [message["content"] for message in client.asked[-1]] == ["(47+38)*6", "?47+38", "0085", "?0085*6", "0510"]
    assert solve(Says("=0500")) == (0.0, "done", 1, 0)
    assert solve(Says("?1+1…", "?1+1", "?1+1…")) == (0.0, "turns", 3, 2)


def test_a_stranger_on_this_machine_plays_no_episode(tiny, play, monkeypatch):
    ask, answered = PolicyClient.ask, []

    def beside_a_stranger(policy, *more):
        for key, session in (
            ("none", policy.session_id), ("none", "0"), (policy.client.api_key, "0"), (policy.client.api_key, "x" * 43),
        ):  # fmt: skip
            body = {"model": "policy", "messages": [{"role": "user", "content": "poison"}], "session_id": session}
            headers = {"Authorization": f"Bearer {key}"}
            answered.append(
                httpx.post(f"{policy.client.base_url}chat/completions", json=body, headers=headers).status_code
            )
        return ask(policy, *more)

    policy = build_policy(tiny, tiny.model, 1e-3, Schedule.of(tiny, 2, "agent"))
    alone = play(policy)
    monkeypatch.setattr(PolicyClient, "ask", beside_a_stranger)
    beside = play(policy)
    num_asked = sum(episode.played.num_turns for episode in beside)
    assert answered.count(401) == answered.count(403) == 2 * num_asked
    assert [episode.trajectory.messages[0] for episode in beside] == [{"role": "user", "content": PROBLEM.text}] * 4
    assert len({episode.trajectory.session_id for episode in [*alone, *beside]}) == 8


def test_rows_learn_from_what_the_policy_wrote_alone(tiny, play):
    seed_everything(0)
    policy = build_policy(tiny, tiny.model, 1e-3, Schedule.of(tiny, 2, "agent"))
    episodes = play(policy)
    experience = agent.build_experience(policy, episodes, replace(tiny, group_size=4))
    for row, episode in enumerate(episodes):
        mask = experience.sequences.response_mask[row]
        written = [t for t, is_it in zip(episode.trajectory.tokens, episode.trajectory.written, strict=True) if is_it]
        assert experience.sequences.responses[row][mask].tolist() == written
        assert len(written) == sum(episode.trajectory.written) > 0
        logprobs = experience.logprobs[row][mask]
        assert (logprobs < 0).all()


def test_filtered_answers_are_learned_over_the_supports_of_their_own_turns(tiny, play):
    seed_everything(0)
    policy = build_policy(tiny, tiny.model, 1e-3, Schedule.of(tiny, 2, "agent"))
    config = replace(tiny, group_size=4, top_k=5, top_p=0.7, temperature=0.8)
    episodes = play(policy, config)
    assert max(episode.played.num_turns for episode in episodes) > 1
    policy.actor.train()
    sequences, sampled = agent.build_experience(policy, episodes, config)[:2]
    mask, vocab = sequences.response_mask, policy.actor.module.config.vocab_size
    sizes = sequences.supports.sizes
    assert ((sizes > 0) == mask.numpy()).all() and 1 < sizes[mask.numpy()].mean() < 5
    kept = sequences.supports[mask.numpy()].mask(vocab, mask.device)
    with torch.no_grad():
        logits = policy.actor.module(sequences.input_ids, attention_mask=sequences.attention_mask,
                                     position_ids=sequences.position_ids).logits  # fmt: skip
        logprobs = (logits[:, -mask.shape[1] - 1 : -1][mask] / 0.8).masked_fill(~kept, -torch.inf).log_softmax(-1)
        found = response_logprobs(policy.actor, sequences, 0.8)
    expected = logprobs.gather(1, sequences.responses[mask][:, None]).squeeze(1)
    torch.testing.assert_close(sampled[mask], expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[mask], expected, atol=1e-5, rtol=1e-5)


def test_old_log_probabilities_are_the_trainers_where_the_bound_asks_for_them(tiny, play):
    seed_everything(0)
    policy = build_policy(tiny, tiny.model, 1e-3, Schedule.of(tiny, 2, "agent"))
    corrected = Algorithm(correction="truncated", correction_threshold=0.0)
    config = replace(tiny, group_size=4, logprob_bound=0.0, algorithm=corrected)
    episodes = play(policy, config)
    policy.actor.generator.logprob_difference = LogprobDifference(mean=0.125, max=0.125)
    for episode in episodes:  # as a sampler in 16 bits has them
        episode.trajectory.logprobs = [logprob - 0.125 for logprob in episode.trajectory.logprobs]
    policy.actor.train()
    sequences, sampled, batch, _ = agent.build_experience(policy, episodes, config)
    mask = sequences.response_mask
    with torch.no_grad():
        assert torch.equal(batch.logprobs_old[mask], response_logprobs(policy.actor, sequences, 1.0)[mask])
    torch.testing.assert_close(batch.logprobs_old[mask] - sampled[mask], torch.full((int(mask.sum()),), 0.125))
    torch.testing.assert_close(batch.weights[mask], torch.full((int(mask.sum()),), math.exp(0.125)))


def test_a_gradient_that_was_left_does_not_count_in_the_first_step(tiny, play):
    def first_step(is_left):
        seed_everything(0)
        policy = build_policy(tiny, tiny.model, 1e-3, Schedule.of(tiny, 2, "agent"))
        told = with_scores(episodes, [0.0, 1.0, 0.0, 1.0])
        policy.actor.train()
        if is_left:
            policy.actor.backward(sum(p.sum() for p in policy.actor.module.parameters()))
        norm = agent.update(policy, told, replace(tiny, group_size=4))["grad_norm"]
        return norm, [p.detach().clone() for p in policy.actor.module.parameters()]

    seed_everything(0)
    policy = build_policy(tiny, tiny.model, 1e-3, Schedule.of(tiny, 2, "agent"))
    episodes = play(policy)
    (norm, weights), (norm_left, weights_left) = first_step(False), first_step(True)
    assert norm > 0 and norm_left == norm
    assert all(torch.equal(left, weight) for left, weight in zip(weights_left, weights, strict=True))


def test_a_step_whose_episodes_all_succeed_moves_nothing_after_one_that_did(tiny, play):
    def update(successes):
        policy.actor.train()
        figures = agent.update(policy, with_scores(episodes, successes), replace(tiny, group_size=4))
        return figures["trained_share"], [p.detach().clone() for p in policy.actor.module.parameters()]

    seed_everything(0)
    policy = build_policy(tiny, tiny.model, 1e-3, Schedule.of(tiny, 2, "agent"))
    episodes = play(policy)
    begun = [p.detach().clone() for p in policy.actor.module.parameters()]
    share, moved = update([0.0, 1.0, 0.0, 1.0])
    assert share == 1 and not all(torch.equal(*pair) for pair in zip(begun, moved, strict=True))
    share, kept = update([1.0] * 4)
    assert share == 0 and all(torch.equal(*pair) for pair in zip(moved, kept, strict=True))
    assert policy.actor.global_steps == 2


def test_what_leaves_no_room_for_the_conversation_is_refused_before_anything_is_trained(tiny, monkeypatch):
    monkeypatch.setattr(agent.sft_stage, "run", None)
    for options in (
        {"max_prompt_tokens": 1},
        {"max_prompt_tokens": 1, "model": None},
        {"max_new_tokens": 120},
    ):
        with pytest.raises(ValueError, match=r"--max-prompt-tokens=\d+ must be at least \d+"):
            agent.run(replace(tiny, **options))


def test_lengths_that_are_not_given_are_those_of_the_model_and_of_the_longest_conversation(tiny, capfd):
    assert (agent.Config().max_prompt_tokens, agent.Config().max_new_tokens) == (256, 24)
    positions = AutoConfig.from_pretrained(tiny.model).max_position_embeddings
    settled = prepare(replace(tiny, max_prompt_tokens=0, max_new_tokens=0)).config
    assert f"--model has {positions} positions" in capfd.readouterr().out
    assert 24 < settled.max_new_tokens <= 256
    assert settled.max_prompt_tokens + settled.max_new_tokens <= positions
    given = prepare(replace(tiny, max_prompt_tokens=0, max_new_tokens=7)).config
    assert given.max_new_tokens == 7
    assert settled.max_prompt_tokens - given.max_prompt_tokens == 2 * (settled.max_new_tokens - 7)


@pytest.mark.parametrize(
    ("template", "word"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no tools here') }}", "refuses .* no tools here; use a model"),
    ],
)
def test_a_model_for_no_such_conversations_is_refused_before_it_is_loaded(tiny, tmp_path, monkeypatch, template, word):
    monkeypatch.setattr(agent, "build_policy", None)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    tokenizer.chat_template = template
    shutil.copytree(tiny.model, tmp_path / "other", ignore=shutil.ignore_patterns("chat_template*", "tokenizer*"))
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=rf"--model=.*other: its .*{word}"):
        agent.run(replace(tiny, model=str(tmp_path / "other")))


def test_steps_of_the_first_stage_see_those_who_ask_and_those_who_guess(tmp_path):
    config = agent.character_stage("calculator", agent.Config(out=str(tmp_path)), group_by_length=False)
    _, corpus = sft.load_corpus(replace(config, max_examples=256))
    lengths = [len(example) for example in corpus.train]
    shortest, longest = min(lengths), max(lengths)
    for batch in epochs_of_similar_length(lengths, 64, 1, 0, num_pooled=1):
        assert min(lengths[row] for row in batch) < (shortest + longest) / 2 < max(lengths[row] for row in batch)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"steps": 0}, "--steps"),
        ({"num_clients": 0}, "--num-clients"),
        ({"group_size": 1}, "--group-size"),
        ({"learning_rate": -1.0}, "--learning-rate"),
        ({"temperature": 0.0}, "--temperature"),
        ({"algorithm": Algorithm(kl_place="loss", kl_coef=0.1)}, "--kl-place"),
        ({"algorithm": Algorithm(entropy_target=0.2)}, "--entropy-target=0.2: agent keeps"),
        (
            {"algorithm": Algorithm(reward_aggregation="normalize-then-sum")},
            "--reward-aggregation=normalize-then-sum: agent learns from the sum",
        ),
        ({"algorithm": Algorithm(dynamic_sampling=2)}, "--dynamic-sampling=2"),
        ({"algorithm": Algorithm(overlong_buffer=0.5)}, "--overlong-buffer=0.5"),
        ({"algorithm": Algorithm(mask_cut_off=True)}, "--mask-cut-off=True"),
    ],
)
def test_wrong_options_are_refused(tiny, options, word):
    with pytest.raises(ValueError, match=word):
        replace(tiny, **options)
