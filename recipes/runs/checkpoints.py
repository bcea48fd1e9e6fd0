"""Checkpoints of a PPO run: actor and critic under one tag, the actor saved last, so its `latest` names whole pairs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid_engine.checkpoint.folder import discard
from hybrid_engine.distributed.processes import on_rank_zero
from hybrid_engine.recipes.experience.rollout import Roles
from hybrid_engine.recipes.runs.checks import flag
from hybrid_engine.recipes.runs.run_log import say

OPTIONS = "options.json"
"""The options of the run, beside its checkpoints: they can be compared before any model is loaded."""
_MAY_DIFFER = frozenset({"out", "resume", "restart", "save_every", "eval_prompts"})


def save_checkpoints(roles: Roles, folder: Path, step: int, config: Any) -> None:
    """Saves both engines as they are after `step` steps and then removes older tags; collective."""
    state = {"step": step, "config": asdict(config)}
    on_rank_zero(lambda: _write_options(folder, config))
    for name, engine in (("critic", roles.critic), ("actor", roles.actor)):
        engine.save_checkpoint(folder / name, f"step{step}", state)

    def prune() -> None:
        for path in folder.glob("*/step*"):
            discard(path.parent, path.name, f"step{step}")

    on_rank_zero(prune)


def load_checkpoints(roles: Roles, folder: Path, config: Any) -> int:
    """Loads the last pair; returns the steps that it had done. Collective.

    Raises:
        ValueError: there is no checkpoint, or it was written under other options.
    """
    _, state = roles.actor.load_checkpoint(folder / "actor")
    _check_options(state["config"], asdict(config))
    roles.critic.load_checkpoint(folder / "critic", f"step{state['step']}")
    say(f"Going on after step {state['step']}")
    return state["step"]


def check_saved_options(folder: Path, config: Any) -> None:
    """Whether the run whose checkpoints are in `folder` had the same options: what `load_checkpoints` finds, but early.

    Raises:
        ValueError: naming the first that differs.
    """
    if (folder / OPTIONS).is_file():
        _check_options(json.loads((folder / OPTIONS).read_text()), asdict(config))


def _write_options(folder: Path, config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writing = folder / f".{OPTIONS}"
    writing.write_text(json.dumps(asdict(config), indent=2) + "\n")
    writing.replace(folder / OPTIONS)


def _check_options(saved: dict[str, Any], given: dict[str, Any]) -> None:
    for name in sorted(given.keys() - _MAY_DIFFER):
        if saved.get(name) != given[name]:
            raise ValueError(
                f"--resume: {flag(name)}={given[name]!r} but the interrupted run had {saved.get(name)!r}; "
                f"a run goes on under the options that it began with: give {flag(name)} as it was"
            )
