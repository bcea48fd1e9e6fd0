"""Commands as agents: a folder, a time limit and a process tree each, scored by tests, learned from in all branches."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_engine.cli import cli
from hybrid_engine.recipes import agent
from hybrid_engine.rlhf.environments.child import ChildLimits, can_cut_network, run_child
from hybrid_engine.rlhf.environments.harness import filled, run_tests, write_files
from hybrid_engine.rlhf.environments.records import replay
from hybrid_engine.rlhf.environments.tasks import prepare_episodes
from hybrid_engine.rlhf.experience.policy import build_policy
from hybrid_engine.rlhf.experience.start import judge_nothing
from hybrid_engine.rlhf.runs.engine_config import Schedule
from hybrid_engine.rlhf.tasks import calculator
from hybrid_engine.serving.sessions import Trajectory
from tests.support.paths import ROOT
from tests.support.small_actors import save_small_actor

AGENT = ROOT / "tests" / "support" / "coding_agent.py"
ENVIRONMENT = {"PATH": os.environ["PATH"]}
TEST = "import solution\nassert len(solution.ANSWER) % 2 == 0, solution.ANSWER\n"


def run(folder, command, seconds=20.0, **limits):
    return run_child(["sh", "-c", command], folder, ENVIRONMENT, ChildLimits(seconds, **limits))


def is_running(name):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return any(name.encode() in line.replace(b"\0", b" ") for line in found)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a subreaper needs Linux")


def test_a_command_has_its_folder_its_environment_and_its_status(tmp_path):
    ended = run(tmp_path, "pwd; env; echo bad >&2; exit 3")
    assert ended.status == 3 and ended.output.startswith(f"{tmp_path}\n") and "bad" in ended.output
    assert "HOME=" not in ended.output
    assert run(tmp_path, "kill -9 $$").status == 137
    with pytest.raises(OSError, match="cannot be started"):
        run_child(["/nowhere/x"], tmp_path, {}, ChildLimits(5))


@linux
def test_everything_that_a_command_started_ends_with_it(tmp_path):
    for command, status in (
        ("setsid sleep 71.1 & sleep 0.1", 0),
        ("(setsid sh -c 'sleep 71.1; true' &); sleep 71.1", None),
    ):
        ended = run(tmp_path, command, seconds=1.0)
        assert ended.status == status and ended.num_left >= 1 and ended.seconds < 10
        assert not is_running("sleep 71.1")


@linux
@pytest.mark.parametrize("is_killed", [True, False])
def test_nothing_is_left_where_the_run_is_killed_or_interrupted(tmp_path, is_killed):
    if is_killed:
        code = (
            "import sys; from pathlib import Path; from hybrid_engine.rlhf.environments.child import *;"
            f"run_child(['sh', '-c', 'setsid sleep 72.3 & echo > begun; sleep 72.3'], Path({str(tmp_path)!r}),"
            f"{ENVIRONMENT!r}, ChildLimits(60))"
        )
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
            wait_until(lambda: (tmp_path / "begun").exists())
            process.kill()
    else:
        stopping = threading.Event()
        threading.Timer(0.5, stopping.set).start()
        ended = run_child(
            ["sh", "-c", "setsid sleep 72.3 & sleep 72.3"], tmp_path, ENVIRONMENT, ChildLimits(60), stopping
        )
        assert ended.status is None and ended.seconds < 30
    wait_until(lambda: not is_running("sleep 72.3"))


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_flood_is_cut_and_limits_hold(tmp_path):
    flood = run(tmp_path, "echo begin; head -c 3000000 /dev/zero | tr '\\0' x; echo end")
    assert flood.status == 0 and len(flood.output) < 70_000
    assert flood.output.startswith("begin") and flood.output.endswith("end\n") and "bytes left out" in flood.output
    big = run_child(
        [sys.executable, "-c", "bytearray(10**9)"], tmp_path, ENVIRONMENT, ChildLimits(20, memory_bytes=4 * 10**8)
    )
    assert big.status == 1 and "MemoryError" in big.output
    written = run(tmp_path, "head -c 3000000 /dev/zero > big", file_bytes=10**6)
    assert written.status != 0 and (tmp_path / "big").stat().st_size <= 10**6


@pytest.mark.skipif(not can_cut_network(), reason="the system does not let a child have no network")
def test_a_child_without_a_network_reaches_nothing(tmp_path):
    code = "import socket; socket.create_connection(('127.0.0.1', 9), 1)"
    ended = run_child([sys.executable, "-c", code], tmp_path, ENVIRONMENT, ChildLimits(20, has_network=False))
    assert ended.status == 1 and "unreachable" in ended.output


def test_words_in_braces_are_filled_once_and_other_braces_stay():
    values = {"task": "say {api_key}", "api_key": "k"}
    assert filled("--x={task}{api_key}{other} ${HOME} {}", values) == "--x=say {api_key}k{other} ${HOME} {}"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "."])
def test_a_file_outside_the_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="outside"):
        write_files(tmp_path / "f", {name: "x"})


def test_tests_run_in_a_copy_over_what_the_agent_wrote(tmp_path):
    folder = tmp_path / "f"
    write_files(folder, {"solution.py": "ANSWER = 'ab'\n", "test_it.py": "raise SystemExit(0)\n"})
    assert run_tests("{python} test_it.py", folder, {"test_it.py": TEST}) == 1.0
    (folder / "solution.py").write_text("ANSWER = 'abc'\n")
    assert run_tests("{python} test_it.py", folder, {"test_it.py": TEST}) == 0.0
    assert (folder / "test_it.py").read_text() == "raise SystemExit(0)\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small_actor(tmp_path_factory.mktemp("model"), calculator.build_tokenizer())


@pytest.fixture
def config(model, tmp_path):
    rows = [{"prompt": f"{word} {n}", "tests": {"test_it.py": TEST}, "files": {"notes/a.txt": "hello"}}
            for n in range(6) for word in ("write", "crash")]  # fmt: skip
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return agent.Config(
        model=model, out=str(tmp_path / "run"), dataset=str(data), steps=1, rollout_size=3, group_size=2, num_clients=4,
        harness=f"{{python}} {AGENT} {{base_url}} {{api_key}} {{task}}", harness_tests="{python} test_it.py",
        harness_env=("KIND={model}", "LANG"), max_prompt_tokens=200, max_new_tokens=8, eval_prompts=2,
        learning_rate=1e-3, max_episode_seconds=60.0, held_out_share=0.5,
    )  # fmt: skip


def test_a_run_with_a_coding_agent_is_scored_by_its_tests_and_learns_from_all_branches(config, monkeypatch):
    seen = []
    update = agent.update

    def watched(policy, episodes, config):
        experience = agent.build_experience(policy, episodes, config)
        seen.append((episodes, experience))
        return update(policy, episodes, config)

    monkeypatch.setattr(agent, "update", watched)
    out = agent.run(config)
    ((episodes, experience),) = seen
    assert (out / "config.json").exists()
    written = [episode for episode in episodes if episode.played.messages[0]["content"].startswith("write")]
    crashed = [episode for episode in episodes if episode not in written]
    assert written and all(
        episode.score in (0.0, 1.0) and episode.played.finish_reason == "done" for episode in written
    )
    assert all(math.isnan(episode.score) and not episode.branches for episode in crashed)
    assert all("there is nothing to do" in episode.played.error for episode in crashed)
    for episode in written:
        assert len(episode.branches) == 2 and episode.played.num_turns == 3
        said = episode.played.messages[-3]["content"] if len(episode.trajectory.messages) == 4 else ""
        assert episode.score == float(len(said) % 2 == 0)
        output = episode.played.instance.ended.output
        assert "'HOME', 'KIND'" in output and "SECRET" not in output
        assert not episode.played.instance.folder.exists() or not is_running("sleep 77")
    # Every token that the policy drew is learned once, with its episode's advantage.
    drawn = sum(sum(branch.written) for episode in episodes for branch in episode.branches)
    assert int(experience.batch.mask.sum()) == drawn
    assert not is_running("sleep 77")


def test_what_the_policy_draws_is_not_the_harnesss_choice(config):
    """It asks greedily for 4,000 tokens; the run samples, in groups, with its own limit."""
    prepared = prepare_episodes(config, calculator.build_tokenizer(), judge_nothing)
    with prepared.playground:
        policy = build_policy(config, config.model, 1e-3, Schedule.of(config, 1, "agent"))
        tasks = [prepared.tasks.held_out[0]._replace(messages=[{"role": "user", "content": "write 7"}], columns={})] * 4
        played, again = (agent.play(policy, tasks, prepared, 3)[0] for _ in range(2))
        tokens = [[branch.tokens for branch in episode.branches] for episode in played]
        assert len({str(each) for each in tokens}) > 1
        assert tokens == [[branch.tokens for branch in episode.branches] for episode in again]
        assert all(sum(branch.written) <= 2 * 8 for episode in played for branch in episode.branches)


def test_branches_have_the_advantage_of_their_episode_where_they_are_learned():
    own = torch.tensor([[0.0, 2.0, 2.0], [-1.0, -1.0, 0.0]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 0]]).bool()
    found = agent.with_branches(own, mask, [1, 0])
    torch.testing.assert_close(found[2:], torch.tensor([[0.0, 0.0, -1.0], [2.0, 0.0, 0.0]]), rtol=0, atol=0)


def test_tokens_of_an_earlier_branch_are_not_learned_again():
    branch = Trajectory(
        "s", list(range(6)), [False, True, False, True, True, False], [0.0] * 6, [b""] * 6, [0] * 6, num_shared=3
    )
    part = agent.learned_part(branch)
    assert (part.prompt, part.response, part.written) == ([0, 1, 2], [3, 4, 5], [True, True, False])
    assert agent.num_answers(branch) == 1


def test_a_dry_run_shows_conversation_and_output_and_a_failed_episode_is_shown_again(config, capfd):
    dry = replace(config, episodes=6, eval_prompts=6, no_train=True)
    agent.run(dry)
    shown = capfd.readouterr().out
    assert "working in" in shown and "[assistant]" in shown and "there is nothing to do" in shown
    failed = json.loads((Path(config.out) / "failed_episodes.jsonl").read_text().splitlines()[0])
    error = replay(replace(dry, replay=failed["id"]))
    assert "there is nothing to do" in error and "[output]" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset": None}, "--harness needs tasks"),
        ({"environment": ("a:b",)}, "exclude each other"),
        ({"harness": "  "}, "is empty"),
        ({"harness": "a 'b"}, "fix its quotes"),
        ({"harness": None}, "belongs to --harness"),
        ({"harness": "/nowhere/agent {task}"}, "not a program that can be started"),
        ({"harness_tests": None}, "needs --reward"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_trained(config, options, words):
    with pytest.raises(ValueError, match=words):
        prepare_episodes(replace(config, **options), calculator.build_tokenizer(), judge_nothing)


PAGE = (ROOT / "docs" / "agents.md").read_text()
COMMANDS = re.findall(r"^hybrid-engine agent (.*--harness .*)$", PAGE, re.MULTILINE)


def test_the_example_of_the_page_plays(config, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / f"{name}.py").write_text(text)
    (row,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    rows = [json.loads(row) | {"number": n} for n in range(40)]  # one prompt, many tasks
    (tmp_path / "bugs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in COMMANDS:
        words = shlex.split(command.replace("$PWD", str(tmp_path)))
        given = cli.read_arguments(["agent", *words])
        recipe, given = given.pop("recipe"), given | {"model": config.model, "lora_rank": 0, "eval_prompts": 1}
        given |= {"max_prompt_tokens": 250, "max_new_tokens": 6}
        read = cli.build_config(agent.Config, cli.read_recipe_help(recipe).options, given)
        if read.no_train:
            agent.run(replace(read, episodes=1, out=str(tmp_path / "run")))
    shown = capfd.readouterr().out
    assert "ended by done after 2 answers, score 0" in shown and "[output]" in shown
