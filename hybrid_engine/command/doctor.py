"""`hybrid-engine doctor`: what this machine and this installation have, and what is missing for what."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

DESCRIPTION = """\
Says what this machine and installation have, and what is missing for which feature.

    hybrid-engine doctor
    hybrid-engine doctor --json

Versions, devices, links between them, kernels that are compiled and run once, memory, file descriptors, write access,
packages of features. The exit status is 1 where something is broken, and 0 where things are merely missing.
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hybrid-engine doctor",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="a list of objects with kind, name, state and text")
    options = parser.parse_args(arguments)
    # Needs torch, which `--help` does not wait for.
    findings: list[Any] = importlib.import_module("hybrid_engine.observing.health").examine()
    if options.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=2)
        print()
    else:
        _show(findings)
    return int(any(finding.state == "broken" for finding in findings))


def _show(findings: list[Any]) -> None:
    kind = None
    for finding in findings:
        if finding.kind != kind:
            kind = finding.kind
            print(kind)
        print(f"  {finding.state:<7}  {finding.name}: {finding.text}")
