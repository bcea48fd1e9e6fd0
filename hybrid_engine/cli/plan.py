"""`hybrid-engine plan`: predicts the memory of a recipe's command, and proposes changes where it does not fit."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DESCRIPTION = """\
Predicts the memory that a command needs, before it runs: put `plan` in front of it.

    hybrid-engine plan grpo --model Qwen/Qwen3-0.6B --dataset problems.jsonl --reward math
    hybrid-engine plan sft --model Qwen/Qwen3-0.6B --dataset chats.jsonl --memory 24GB --processes 4

Prints, for each model of the run, the bytes of weights, gradients, optimizer state and activations with their
formulas; then the KV workspace, and the peaks of training and of generation on one device. It reads the model's config
but not its weights, trains nothing and writes nothing. The exit status is 1 if the command does not fit.
"""
PLANNED = ("sft", "reward", "ppo", "grpo", "dpo", "kto", "online-dpo", "agent")
"""The recipes that train, which are the ones that can be planned."""


@dataclass(frozen=True, kw_only=True)
class PlanWishes:
    """Options of a plan, in addition to the command that is planned."""

    memory: str | None
    """Memory of a device; None: the memory that is free here."""
    processes: int
    as_json: bool


def read_wishes(arguments: Sequence[str]) -> tuple[PlanWishes, list[str]]:
    """The plan's own options, wherever they stand, and the command that is planned."""
    parser = argparse.ArgumentParser(
        prog="hybrid-engine plan",
        usage="hybrid-engine plan [--memory SIZE] [--processes N] [--json] command ...",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=arguments[:1] in (["-h"], ["--help"]),
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of a device, such as 24GB; default: the free memory here"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes started by torchrun (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as a JSON object")
    found, command = parser.parse_known_args(arguments)
    if found.processes < 1:
        parser.error(f"--processes={found.processes} must be at least 1; raise it")
    return PlanWishes(memory=found.memory, processes=found.processes, as_json=found.json), command


def show(fitted: Any, wishes: PlanWishes) -> int:
    """Prints a `rlhf.planning.comparison.Fitted`; returns the exit status."""
    if wishes.as_json:
        json.dump(fitted.to_json(), sys.stdout, indent=2)
        print()
    else:
        print("\n".join(fitted.lines()))
    return int(fitted.missing_bytes > 0)
