"""`hybrid-engine doctor`: findings agree with torch, the system and what is installed."""

import json
import resource
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from hybrid_engine.command import cli
from hybrid_engine.observing import health

KINDS = ["versions", "devices", "links", "kernels", "memory", "limits", "write access", "features"]


@pytest.fixture
def compiled(monkeypatch):
    """As a user has it: no references in place of kernels, which the tests ask for."""
    monkeypatch.setattr(health, "fallback_forced", lambda: False)


def found():
    return {(finding.kind, finding.name): finding for finding in health.examine()}


def test_the_command_prints_all_kinds_and_the_same_as_json(compiled, capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == KINDS
    assert cli.main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert len(findings) == len(lines) - len(KINDS)
    assert {finding["state"] for finding in findings} <= {"ok", "missing"}
    assert {"kind": "versions", "name": "torch", "state": "ok", "text": version("torch")} in findings


def test_findings_are_what_torch_and_the_system_say(compiled):
    findings = found()
    assert f"{torch.get_num_threads()} threads" in findings["devices", "cpu"].text
    assert findings["limits", "file descriptors"].text.startswith(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    assert findings["links", "gloo"].state == "ok"
    assert findings["features", "TRL's trainers (attach)"].text == f"trl {version('trl')}"


def test_what_is_missing_or_broken_says_so(compiled, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(health.FEATURES, "nothing that there is", ("no-such-package",))
    monkeypatch.setattr(health, "load_library", lambda: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    findings = found()
    assert findings["features", "nothing that there is"].text == "needs no-such-package"
    assert findings["kernels", "C, for the CPU"].state == findings["limits", "file descriptors"].state == "missing"
    assert "ulimit -n 4096" in findings["limits", "file descriptors"].text
    monkeypatch.setattr(health.os, "access", lambda path, mode: False)
    assert cli.main(["doctor"]) == 1
    assert "cannot be written to" in capsys.readouterr().out


def test_a_kernel_that_computes_something_else_is_broken(monkeypatch):
    assert health._try_kernel("norm", torch.device("cpu")).state == "ok"
    monkeypatch.setattr(health.NormOp, "__call__", lambda op, rows, weight: rows * 2)
    assert health._try_kernel("norm", torch.device("cpu")).state == "broken"


def test_its_help_needs_no_torch():
    lines = ["import sys", "from hybrid_engine.command.cli import main", "try: main(['doctor', '--help'])"]
    lines += ["except SystemExit: pass", "assert 'torch' not in sys.modules"]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, check=False).returncode == 0
