"""Files and figures of played episodes: those that failed, their replay, and what a dry run shows."""

import json
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_engine.rlhf.data.rows import Message
from hybrid_engine.rlhf.environments.contract import Environment, with_observation
from hybrid_engine.rlhf.environments.harness import HarnessRun
from hybrid_engine.rlhf.environments.loading import load_kinds
from hybrid_engine.rlhf.environments.playing import REASONS, Loop, Played, Task
from hybrid_engine.rlhf.options.reinforcement import AgentConfig
from hybrid_engine.rlhf.runs.run_folder import FAILED_EPISODES
from hybrid_engine.rlhf.runs.run_log import say

MAX_STORED = 200
"""Maximum number of failed episodes of one step that are stored."""
SHOWN_ERRORS = 3
"""Number of different errors of a step that are logged."""


def episode_figures(episodes: Sequence[Played]) -> dict[str, float]:
    """Shares of the reasons why episodes ended, and of those that failed; with several environments, of each."""
    count = len(episodes)
    reasons = Counter(episode.finish_reason for episode in episodes)
    figures = {f"ended_{reason}_share": reasons[reason] / count for reason in REASONS}
    figures["failed_share"] = sum(episode.error is not None for episode in episodes) / count
    names = sorted({episode.environment for episode in episodes})
    for name in names if len(names) > 1 else ():
        own = [episode for episode in episodes if episode.environment == name]
        figures[f"{name}_share"] = len(own) / count
        figures[f"{name}_turns"] = sum(episode.num_turns for episode in own) / len(own)
        figures[f"{name}_failed_share"] = sum(episode.error is not None for episode in own) / len(own)
    return figures


def note_failed(folder: Path, label: str, tasks: Sequence[Task], episodes: Sequence[Played]) -> None:
    """Logs the errors of environments, and appends their episodes to failed_episodes.jsonl under `label`-NUMBER."""
    failed = [number for number, episode in enumerate(episodes) if episode.error is not None]
    if not failed:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FAILED_EPISODES).open("a") as file:
        for number in failed[:MAX_STORED]:
            task, episode = tasks[number], episodes[number]
            record = {
                "id": f"{label}-{number}",
                "environment": task.environment,
                "error": episode.error,
                "finish_reason": episode.finish_reason,
                "first_messages": task.messages,
                "arguments": task.arguments,
                "messages": episode.messages,
                "trace": episode.trace,
            }
            file.write(json.dumps(record, default=repr) + "\n")
    errors = Counter(str(episodes[number].error) for number in failed)
    shown = "; ".join(f"{count} times {error}" for error, count in errors.most_common(SHOWN_ERRORS))
    say(
        f"{len(failed)} of {len(episodes)} episodes failed and are left out: {shown}; "
        f"--replay {label}-{failed[0]} repeats the first"
    )


def read_failed(folder: Path, name: str) -> dict[str, Any]:
    """The failed episode `name` of a run; ValueError if there is none."""
    path = folder / FAILED_EPISODES
    lines = path.read_text().splitlines() if path.is_file() else []
    records = {record["id"]: record for record in map(json.loads, lines)}
    if name not in records:
        known = ", ".join(list(records)[-10:]) or "none"
        raise ValueError(f"--replay={name!r} is not an episode in {path}; the last ones there are {known}")
    return records[name]


def replay(config: AgentConfig) -> str | None:
    """Gives an environment the answers of a failed episode again, and shows what happens, without a time limit.

    Returns the error that ended it this time; None if it ended without one.

    Raises:
        ValueError: there is no such episode, or its environment is not among those of the options.
    """
    record = read_failed(Path(config.out), str(config.replay))
    if config.harness is not None:  # without the policy there is nothing that a command could ask again
        say(f"{shown_conversation(record['messages'])}\n[output]\n{record['trace']}\n{record['error']}")
        return str(record["error"])
    loop = Loop()
    kinds = {kind.name: kind for kind in load_kinds(config, loop.wait)}
    if record["environment"] not in kinds:
        raise ValueError(
            f"--replay={config.replay!r} was played in {record['environment']!r}, and --environment has "
            f"{', '.join(map(repr, kinds))}; give it"
        )
    messages, began = list(record["first_messages"]), time.perf_counter()
    answers = [message for message in record["messages"] if message["role"] == "assistant"]
    error = None
    try:
        environment = kinds[record["environment"]].build()
        repeat(environment, record["arguments"], messages, answers)
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"
        say("".join(traceback.format_exception(raised)))
    say(shown_conversation(messages))
    say(f"then: {record['error']}\nnow, after {time.perf_counter() - began:.1f} s: {error or 'no error'}")
    loop.close()
    return error


def repeat(
    environment: Environment, arguments: Mapping[str, Any], messages: list[Message], answers: Sequence[Message]
) -> None:
    """Plays an episode whose `answers` are known; adds what is said to `messages`."""
    messages[:] = with_observation(messages, environment.reset(arguments))
    for answer in answers:
        messages.append(answer)
        messages += environment.respond(answer) or []
    if environment.reward_name is not None:
        say(f"{environment.reward_name}: {environment.get_reward()}")
    environment.close()


def shown_conversation(messages: Sequence[Message]) -> str:
    """The messages as text, each below its role."""
    parts = []
    for message in messages:
        content = message.get("content")
        calls = [
            f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", ())
        ]
        text = content if isinstance(content, str) else json.dumps(content)
        parts.append("\n".join([f"[{message['role']}]", *([text] if text else []), *calls]))
    return "\n".join(parts)


def show_episodes(episodes: Sequence[Played], scores: Sequence[float]) -> None:
    """Logs the conversations of a dry run, each with its end and its score."""
    for number, (episode, score) in enumerate(zip(episodes, scores, strict=True)):
        end = episode.error or f"ended by {episode.finish_reason} after {episode.num_turns} answers, score {score:g}"
        output = f"\n[output]\n{episode.instance.ended.output}" if isinstance(episode.instance, HarnessRun) else ""
        say(f"--- episode {number} ({episode.environment}): {end}\n{shown_conversation(episode.messages)}{output}")
