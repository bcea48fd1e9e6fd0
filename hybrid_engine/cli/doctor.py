"""`hybrid-engine doctor`: reports what this machine and this installation have, and what each feature lacks."""

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

DESCRIPTION = """\
Checks this machine and installation, and reports what each feature lacks.

    hybrid-engine doctor
    hybrid-engine doctor --gpu
    hybrid-engine doctor --json

Reports versions, devices and the links between them, kernels and a whole decode layer (compiled and run once), memory,
file descriptors, write access and the packages of features. With --gpu it checks in about a minute whether this GPU
works: its driver and memory, a decode layer, greedy tokens against the model's own generate(), a training step, and the
fraction of the memory bandwidth that a decode step reaches. The exit status is 1 if something is broken and 0 if
something is only missing; with --gpu on a machine without a GPU it is 2.
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hybrid-engine doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", action="store_true", help="check that the GPU generates and trains correctly")
    parser.add_argument("--json", action="store_true", help="print a list of objects with kind, name, state and text")
    options = parser.parse_args(arguments)
    found = _examine_gpu() if options.gpu else _examine()
    findings = list(found) if options.json else _show(found)
    if options.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=2)
        print()
    return int(any(finding.state == "broken" for finding in findings))


def _examine_gpu() -> Iterable[Any]:
    # Needs torch and transformers; `--help` does not wait for them.
    return importlib.import_module("hybrid_engine.cli.machine_checks").examine_gpu()


def _examine() -> Iterable[Any]:
    """All kinds of findings in order, with a decode layer on each device among the kernels."""
    checks = importlib.import_module("hybrid_engine.cli.machine_checks")
    tried = False
    for finding in checks.examine():
        if finding.kind == "memory" and not tried:
            tried = True
            for device in checks.devices_to_try():
                yield from checks.try_layers(device, "kernels")
        yield finding


def _show(findings: Iterable[Any]) -> list[Any]:
    """Prints each finding as soon as it is known; returns all of them."""
    shown: list[Any] = []
    for finding in findings:
        if not shown or finding.kind != shown[-1].kind:
            print(finding.kind)
        print(f"  {finding.state:<7}  {finding.name}: {finding.text}", flush=True)
        shown.append(finding)
    return shown
