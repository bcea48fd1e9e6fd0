"""Environments of episodes: the contract, limits, what goes wrong, and tasks. The policy is a list of answers."""

import itertools
import json
import re
import shlex
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from hybrid_engine.cli import cli
from hybrid_engine.rlhf.environments import records
from hybrid_engine.rlhf.environments.contract import MAX_CHARACTERS, TextGame, ToolEnvironment, bounded
from hybrid_engine.rlhf.environments.loading import load_kinds
from hybrid_engine.rlhf.environments.playing import Kind, Limits, Loop, Playground, PolicyClient, Task
from hybrid_engine.rlhf.environments.tasks import prepare_episodes
from hybrid_engine.rlhf.experience.start import judge_nothing
from hybrid_engine.rlhf.options.reinforcement import AgentConfig
from hybrid_engine.rlhf.tasks.calculator import build_tokenizer
from tests.support import some_environments as some
from tests.support.paths import ROOT
from tests.support.small_actors import save_small_actor

HERE = "tests.support.some_environments"
CALLING = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + (message['content'] | string) }}{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function']['name'] + '</tool_call>' }}{% endfor %}{{ '<eos>' }}{% endfor %}"
)


class Call(SimpleNamespace):
    def model_dump(self):
        return {"id": "call_1", "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class TooLong(Exception):
    code = "context_length_exceeded"


class Says:
    """A stand-in for the `openai` client: a text is an answer, a pair a call, an error is raised."""

    base_url, api_key = "http://127.0.0.1/v1/", "key"

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []
        self.chat = self.completions = self

    def create(self, **request):
        self.asked.append(request)
        said = self.answers.pop(0)
        if isinstance(said, Exception):
            raise said
        calls = [Call(name=said[0], arguments=said[1])] if isinstance(said, tuple) else None
        message = SimpleNamespace(content=None if calls else said, tool_calls=calls)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])


def task(environment="Notes", text="What is due?", **arguments):
    return Task(environment, [{"role": "user", "content": text}], arguments, arguments)


def playground(*factories, turns=4, seconds=20.0, num_concurrent=2):
    loop = Loop()

    def kind(factory):
        name = factory.__name__
        if hasattr(factory, "step"):
            return Kind(name, name, lambda: TextGame(factory(), r"<(\w+)>", loop.wait))
        return Kind(name, name, lambda: ToolEnvironment(factory(), [some.double], loop.wait, name))

    return Playground([kind(factory) for factory in factories], Limits(turns, seconds, 5.0), num_concurrent, loop)


def play(ground, client, *tasks, **options):
    policies = [PolicyClient(client=client, session_id="s", seed=0, sampling={"model": "policy"}) for _ in tasks]
    with closing(ground):
        return ground.play(tasks, policies, **options)


def contents(episode):
    return [message["content"] for message in episode.messages]


def test_methods_and_functions_are_tools_and_results_go_to_the_model_as_trl_writes_them():
    client = Says(
        ("read_note", '{"name": "today", "lines": 2}'), ("read_note", '{"name": "never"}'), ("look", "{}"),
        ("double", '{"number": 4}'), ("read_note", "{"), "milk",
    )  # fmt: skip
    (episode,) = play(playground(some.Notes, turns=9), client, task(hint=True))
    assert [tool["function"]["name"] for tool in client.asked[0]["tools"]] == ["double", "read_note"]
    assert contents(episode)[0] == "What is due? Read the notes."
    results = contents(episode)[2::2]
    assert results[:4] == ["milk\nmilk\n", str({"error": "'never'"}), str({"error": "Tool look not found."}), "8"]
    assert results[4].startswith("{'error': 'The arguments are not JSON")
    assert (episode.finish_reason, episode.num_turns, episode.reward) == ("done", 6, 1.0)
    assert episode.reward_name == "Notes"
    assert [request["seed"] for request in client.asked] == [1, 2, 3, 4, 5, 6]


def test_methods_may_be_asynchronous_and_an_observation_may_be_parts():
    (episode,) = play(playground(some.Tomorrow), Says(("look", "{}"), "ok"), task("Tomorrow"))
    assert contents(episode)[0] == [{"type": "text", "text": "What is due?"}, {"type": "text", "text": "hello"}]
    assert contents(episode)[2] == "nothing" and episode.reward == 0.5


def test_instances_are_reused_and_never_more_than_the_episodes_that_run():
    built = []

    class Counted(some.Slow):
        def __init__(self):
            built.append(self)
            super().__init__()

    ground = playground(Counted, num_concurrent=2)
    episodes = play(ground, Says(*["ok"] * 6), *[task("Counted")] * 6)
    assert len(episodes) == 6 and 1 <= len(built) <= 2 and all(one.is_closed for one in built)
    built.clear()
    ground = playground(Counted)
    with closing(ground):
        policies = [PolicyClient(client=Says("ok"), session_id="s", seed=0, sampling={}) for _ in range(3)]
        held = ground.play([task("Counted")] * 3, policies, holds=True)
        assert len({id(episode.instance) for episode in held}) == 3
        ground.release()
        assert ground.num_instances == 3


def test_each_limit_has_its_own_reason():
    def end(client, seconds=20.0):
        (episode,) = play(playground(some.Notes, turns=2, seconds=seconds), client, task())
        return episode.finish_reason, episode.num_turns, episode.error

    assert end(Says("ok")) == ("done", 1, None)
    assert end(Says(*[("read_note", '{"name": "today"}')] * 2)) == ("turns", 2, None)
    assert end(Says(("read_note", '{"name": "today"}'), TooLong())) == ("tokens", 1, None)
    with pytest.raises(RuntimeError, match="server"):
        end(Says(RuntimeError("the server is gone")))


def test_an_environment_that_hangs_ends_its_episode_and_others_go_on():
    some.Hangs.released.clear()
    ground = playground(some.Hangs, seconds=0.5, num_concurrent=1)
    client = Says(("read_note", '{"name": "a"}'), "ok")
    hung, other = play(ground, client, task("Hangs"), task("Hangs"))
    some.Hangs.released.set()
    assert (hung.finish_reason, hung.reward) == ("seconds", None)
    assert hung.error.startswith("Hangs: the reply to answer 1: it did not return within")
    assert (other.finish_reason, other.error) == ("done", None)


def test_an_error_of_the_environment_ends_its_episode_is_named_stored_and_replayed(tmp_path, capfd):
    tasks = [task("Breaks", seed=seed) for seed in (2, 3)]
    good, bad = episodes = play(playground(some.Breaks), Says("ok"), *tasks)
    assert good.error is None and bad.finish_reason == "failed"
    assert bad.error == "Breaks: reset(): OSError: the disk is full" and "raise OSError" in bad.trace
    figures = records.episode_figures(episodes)
    assert figures["failed_share"] == figures["ended_failed_share"] == figures["ended_done_share"] == 0.5
    records.note_failed(tmp_path, "7", tasks, episodes)
    config = AgentConfig(out=str(tmp_path), environment=(f"{HERE}:Breaks",), replay="7-1")
    assert records.replay(config) == "OSError: the disk is full"
    shown = capfd.readouterr().out
    assert "1 of 2 episodes failed and are left out: 1 times Breaks: reset()" in shown and "[user]" in shown
    with pytest.raises(ValueError, match=r"--replay='7-0' is not an episode in .*; the last ones there are 7-1"):
        records.replay(AgentConfig(out=str(tmp_path), environment=(f"{HERE}:Breaks",), replay="7-0"))


def test_a_tool_may_end_the_episode_where_its_environment_is_broken():
    (episode,) = play(playground(some.Gone), Says(("look", "{}")), task("Gone"))
    assert episode.error == "Gone: the reply to answer 1: BrokenEnvironment: no server"
    assert episode.finish_reason == "failed"


def test_a_text_game_takes_the_action_in_an_answer_and_sums_its_rewards():
    client = Says("I say <3>", "none", "<9> or <7>")
    (episode,) = play(playground(some.Guess), client, task("Guess", text="", number=7))
    assert contents(episode)[0] == "guess" and contents(episode)[2] == "higher"
    assert contents(episode)[4] == r"There is no action in your answer: it must match '<(\\w+)>'."
    assert (episode.finish_reason, episode.reward, episode.reward_name) == ("done", 1.0, "Guess")
    assert "tools" not in client.asked[0]


def test_a_flood_of_text_is_cut():
    assert bounded("a" * MAX_CHARACTERS) == "a" * MAX_CHARACTERS
    assert bounded("a" * (MAX_CHARACTERS + 5)).endswith("a\n[5 more characters were cut off]")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small actor whose chat template shows tools and writes calls."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CALLING
    return save_small_actor(tmp_path_factory.mktemp("calling"), tokenizer), tokenizer


def prepare(model, tmp_path, **options):
    config = AgentConfig(model=model[0], out=str(tmp_path / "run"), rollout_size=2, eval_prompts=3, **options)
    return prepare_episodes(config, model[1], judge_nothing)


def write_rows(tmp_path, rows):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows.jsonl")


def test_without_data_tasks_are_seeds_of_which_some_are_held_out(model, tmp_path):
    prepared = prepare(model, tmp_path, environment=(f"{HERE}:Notes",))
    prepared.playground.close()
    held_out = {entry.arguments["seed"] for entry in prepared.tasks.held_out}
    first = [entry.arguments["seed"] for entry in itertools.islice(prepared.tasks.train(0), 40)]
    assert len(held_out) == 3 and len(set(first)) == 40 and not held_out & set(first)
    assert [entry.arguments["seed"] for entry in itertools.islice(prepared.tasks.train(5), 35)] == first[5:]
    assert prepared.tasks.held_out[0].messages == [{"role": "user", "content": ""}]
    assert prepared.config.max_prompt_tokens + prepared.config.max_new_tokens <= 512


def test_rows_choose_their_environment_and_their_columns_begin_it(model, tmp_path):
    rows = [{"environment": "ab"[n % 2], "answer": str(n), "hint": n} for n in range(120)]
    specs = (f"a={HERE}:Notes", f"b={HERE}:Tomorrow")
    prepared = prepare(model, tmp_path, environment=specs, dataset=write_rows(tmp_path, rows))
    prepared.playground.close()
    drawn = list(itertools.islice(prepared.tasks.train(0), 30))
    assert {entry.environment for entry in drawn} == {"a", "b"}
    assert all(entry.arguments.keys() == {"answer", "hint"} for entry in drawn)
    assert [reward.name for reward in prepared.rewards.rewards] == ["Notes", "Tomorrow"]
    assert not prepared.holds_environments


def test_functions_alone_are_tools_and_a_reward_may_look_at_environments(model, tmp_path):
    rows = write_rows(tmp_path, [{"prompt": f"{n}+1", "answer": str(n)} for n in range(120)])
    options = {"dataset": rows, "reward": (f"{HERE}:same",), "tools": (f"{HERE}:double",)}
    prepared = prepare(model, tmp_path, **options)
    prepared.playground.close()
    assert prepared.tasks.held_out[0].environment == "tools" and prepared.holds_environments
    specs = (f"{HERE}:num_read", "exact")
    prepared = prepare(model, tmp_path, environment=(f"{HERE}:Notes",), dataset=rows, reward=specs)
    prepared.playground.close()
    assert [reward.name for reward in prepared.rewards.rewards] == ["num_read", "exact", "Notes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment": (f"{HERE}:Undocumented",)}, r"Undocumented.look\(\) cannot be a tool.*type hint"),
        ({"environment": (f"{HERE}:Notes", "tests.support.some_environments:Notes")}, "2 are named 'Notes'"),
        ({"environment": (f"{HERE}:Silent",)}, r"no get_reward\(\), and there is no --reward"),
        ({"environment": (f"{HERE}:NoReset",)}, r"NoReset has no method reset\(\)"),
        ({"environment": (f"{HERE}:Missing",)}, "has no function 'Missing'"),
        ({"environment": ("no_such_module:Game",)}, "no module 'no_such_module'"),
        ({"environment": (f"{HERE}:broken",)}, "cannot be built: RuntimeError: no such server"),
        ({"environment": (f"{HERE}:Seedless",)}, "Seedless.reset.* unexpected keyword argument 'seed'"),
        ({"environment": (f"{HERE}:Notes", f"{HERE}:Tomorrow")}, "give --dataset"),
        ({"environment": (f"{HERE}:Notes",), "action_pattern": "("}, "--action-pattern='\\('"),
        ({"environment": ("reasoning_gym:",)}, "names nothing"),
        ({"tools": (f"{HERE}:double",)}, "--tools needs tasks"),
        ({"dataset": "rows.jsonl"}, "needs --reward"),
        ({"environment": (f"{HERE}:Notes",), "model": None}, "--environment: the model"),
        ({"episodes": 4}, "belong together"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_trained(model, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        prepare((options.pop("model", model[0]), model[1]), tmp_path, **options)


def test_a_template_without_tool_calls_is_refused_where_there_are_tools(model, tmp_path):
    with pytest.raises(ValueError, match=r"shows no known form of tool calls.*read_note"):
        prepare((model[0], build_tokenizer()), tmp_path, environment=(f"{HERE}:Notes",))


def test_questions_of_reasoning_gym_are_games_of_one_action(tmp_path):
    config = AgentConfig(model="any", environment=("reasoning_gym:chain_sum:max_terms=2",), out=str(tmp_path))
    (kind,) = load_kinds(config, lambda value: value)
    game = kind.build()
    question = game.reset({"seed": 5})
    assert question == game.reset({"seed": 5}) != game.reset({"seed": 6})
    game.reset({"seed": 5})
    right = game.instance._entry["answer"]
    assert game.respond({"role": "assistant", "content": f" {right}\n"}) is None and game.get_reward() == 1.0


PAGE = (ROOT / "docs" / "environments.md").read_text()
COMMANDS = re.findall(r"^hybrid-engine agent (.*)$", PAGE, re.MULTILINE)
SERVERS = ("gymnasium:MyGame-v0", "mcp:", "openenv:", "reasoning_gym:")
"""Environments that `make clients` tries, or another test."""


@pytest.mark.parametrize("command", [line for line in COMMANDS if not any(word in line for word in SERVERS)])
def test_the_examples_of_the_page_run(command, model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    questions = [{"prompt": f"{n}*2", "answer": 2 * n} for n in range(120)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    mixed = [{"environment": ("calendar", "maze")[n % 2], "seed": n} for n in range(120)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    given = cli.read_arguments(["agent", *shlex.split(command), "--eval-prompts", "3"])
    recipe, given = given.pop("recipe"), given | {"model": model[0], "lora_rank": 0}
    config = cli.build_config(AgentConfig, cli.read_recipe_help(recipe).options, given)
    if config.replay:
        task_of_page = task("Calendar", seed=4)
        (failed,) = play(playground(some.Breaks), Says("ok"), task("Breaks", seed=3))
        records.note_failed(tmp_path / "runs" / "agent", "3", [task_of_page] * 18, [failed] * 18)
        assert records.replay(config) is None
        return
    prepared = prepare_episodes(config, model[1], judge_nothing)
    with closing(prepared.playground):
        policies = [
            PolicyClient(client=Says("done"), session_id="s", seed=0, sampling={}) for _ in prepared.tasks.held_out
        ]
        monkeypatch.setattr(prepared.playground, "limits", prepared.playground.limits._replace(turns=1))
        episodes = prepared.playground.play(prepared.tasks.held_out, policies)
    assert [episode.error for episode in episodes] == [None] * 3
