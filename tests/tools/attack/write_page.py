"""Writes docs/robustness.md from all attacks in their long form: `python -m tests.tools.attack.write_page`.

python -m tests.tools.attack.write_page --kills 60 --stops 4    fewer of these; the page says so
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from . import bad_inputs, interrupts, kills, leaks, recipe_kills

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "robustness.md"
HEAD = """# Robustness

Written by `make attack` (`python -m tests.tools.attack.write_page`); the test suite runs the same attacks in a quick
form. What each of them does, and what counts as a failure, stands at the top of its file in `tests/tools/attack/`.

"""
FORM = {
    "long": {"kills": 300, "stops": 30, "every": 3, "calls": 1, "cycles": 1000},
    "quick": {"kills": 15, "stops": 2, "every": 150, "calls": 10, "cycles": 20},
}

MEANINGS = {
    "kills": "kills of trainings",
    "stops": "stops of each recipe",
    "every": "interrupt at one line of so many",
    "calls": "make one bad call of so many",
    "cycles": "cycles in search of leaks",
}


def table(headings: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A Markdown table."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def listed(failures: list[str]) -> str:
    """Failures as a list; nothing where there are none."""
    return "".join(f"- {failure.replace(chr(10), ' ')[:300]}\n" for failure in failures)


def write_kills(num_kills: int) -> tuple[str, bool]:
    """Kills and what was lost."""
    outcomes = kills.attack_all(num_kills)
    rows = [
        (name, each.num_runs, each.num_kills, each.num_in_save, len(each.lost), len(each.different), len(each.errors))
        for name, each in outcomes.items()
    ]
    rows.append(("**all**", *(sum(row[column] for row in rows) for column in range(1, 7))))  # type: ignore[misc]
    headings = ("training", "runs", "kills", "in a save", "lost", "other numbers", "other errors")
    text = (
        "## Kills\n\nTrainings of 10 steps that save, killed by SIGKILL at random moments, half of them aimed at a "
        "save, and started again until they end. *Lost*: reported as saved, and not there afterwards. *Other numbers*: "
        "a loss or a last weight that is not, to the bit, that of the same training left alone.\n\n"
        f"{table(headings, rows)}\n"
    )
    failures = [failure for each in outcomes.values() for failure in (*each.lost, *each.different, *each.errors)]
    return text + listed(failures), not failures


def write_recipe_kills(num_stops: int) -> tuple[str, bool]:
    """Stops of whole recipes."""
    outcomes = recipe_kills.attack_all(num_stops)
    rows = [(f"`{name}`", each.num_runs, each.num_stops, len(each.failures)) for name, each in outcomes.items()]
    text = (
        "## Recipes that are stopped\n\nRuns of four steps, each with a checkpoint and an evaluation, stopped by "
        "SIGKILL, SIGTERM or SIGINT at random moments and resumed until they end. *Failures*: a figure, an answer or a "
        "weight of the last or the best model that is not, to the bit, that of the run left alone; a file too many; an "
        "error.\n\n"
        f"{table(('recipe', 'runs', 'stops', 'failures'), rows)}\n"
    )
    failures = [failure for each in outcomes.values() for failure in each.failures]
    return text + listed(failures), not failures


def write_interrupts(every: int) -> tuple[str, bool]:
    """Ctrl-C at many lines."""
    rows: list[tuple[object, ...]] = []
    failures = []
    for name, variant in interrupts.VARIANTS.items():
        outcome = interrupts.attack(variant, every)
        print(f"{name}: {outcome}", flush=True)
        rows.append((name, outcome.num_points, outcome.num_delivered, len(outcome.failures)))
        failures += outcome.failures
    text = (
        "## Ctrl-C\n\nSIGINT at a line of Python, in the engine or in PyTorch below it, of a cycle of rollouts and a "
        f"step; of every line the first and the last visit, one of {every} of them. After it gradients are enabled, "
        "weights, masters and optimizer state are those before the step or those after it, the engine goes on, and its "
        "next step is, to the bit, that of an engine that was never interrupted.\n\n"
        f"{table(('engine', 'places', 'interrupted', 'failures'), rows)}\n"
    )
    return text + listed(failures), not failures


def write_bad_inputs(every: int) -> tuple[str, bool]:
    """Bad input by kind."""
    answers = list(bad_inputs.ask_all(bad_inputs.build_calls()[::every]))
    rows = []
    for kind, counts in bad_inputs.count(answers).items():
        share = f"{100 * counts['clear'] / counts.total():.1f} %"
        rows.append((kind, counts.total(), *(counts[verdict] for verdict in bad_inputs.VERDICTS), share))
    sums = tuple(sum(row[column] for row in rows) for column in range(1, 6))  # type: ignore[misc]
    rows.append(("**all**", *sums, f"{100 * sums[1] / sums[0]:.1f} %"))
    failures = [f"{each.verdict}: {each.kind}, {each.name}: {each.text}" for each in answers if each.verdict != "clear"]
    rule = (bad_inputs.__doc__ or "").split("An answer is\n\n")[1].replace("`LONGEST`", str(bad_inputs.LONGEST))
    rule = rule.replace("`PATIENCE`", str(bad_inputs.PATIENCE))
    text = (
        "## Bad input\n\nCalls with one thing wrong in them. An answer is\n\n```\n"
        f"{rule}```\n\n{table(('kind', 'calls', *bad_inputs.VERDICTS, 'clear'), rows)}\n"
    )
    return text + listed(failures), not failures


def write_leaks(cycles: int) -> tuple[str, bool]:
    """What grows over cycles."""
    growths = leaks.attack(cycles)
    names = list(growths[0].added)
    rows = [(growth.kind, growth.cycles, *(growth.added[name] for name in names)) for growth in growths]
    allowed = ", ".join(f"{amount} {name}" for name, amount in leaks.MAY_GROW.items())
    text = (
        f"## Leaks\n\nWhat a number of cycles added, after {leaks.WARM_UP} that may fill caches. Allowed are "
        f"{allowed}, and nothing else, whatever the number of cycles.\n\n{table(('cycle', 'cycles', *names), rows)}\n"
    )
    failures = [f"{growth.kind}: {growth.leaks}" for growth in growths if growth.leaks]
    return text + listed(failures), not failures


def describe_form(form: dict[str, int]) -> str:
    """What is less than in the long form; nothing where nothing is."""
    changed = [f"`--{name} {value}` in place of {FORM['long'][name]}" for name, value in form.items()]
    changed = [text for text, name in zip(changed, form, strict=True) if form[name] != FORM["long"][name]]
    return f"Shorter than `make attack` by itself: {', '.join(changed)}.\n\n" if changed else ""


def describe_machine(seconds: float) -> str:
    """How it was tried."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return (
        f"Tried at commit {commit} on {device} ({platform.machine()}) in {seconds / 60:.0f} minutes, with Python "
        f"{platform.python_version()}, torch {torch.__version__} and transformers {transformers.__version__}.\n\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few of each, to try the attacks themselves")
    parser.add_argument("--page", type=Path, default=PAGE)
    for name, meaning in MEANINGS.items():
        parser.add_argument(f"--{name}", type=int, help=meaning)
    options = parser.parse_args()
    form = dict(FORM["quick" if options.quick else "long"])
    form |= {name: value for name in form if (value := getattr(options, name)) is not None}
    torch.set_num_threads(1)
    start = time.monotonic()
    parts = [
        write_kills(form["kills"]),  # first: it forks, which this process can as long as it has not computed
        write_recipe_kills(form["stops"]),
        write_bad_inputs(form["calls"]),
        write_interrupts(form["every"]),
        write_leaks(form["cycles"]),
    ]
    machine = describe_machine(time.monotonic() - start) + describe_form(form)
    options.page.write_text(HEAD + machine + "".join(text for text, _ in parts).rstrip() + "\n")
    return int(not all(is_good for _, is_good in parts))


if __name__ == "__main__":
    sys.exit(main())
