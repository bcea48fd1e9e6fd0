"""`hybrid-engine doctor`: findings agree with torch, the system and what is installed."""

import json
import resource
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from hybrid_engine.cli import cli, commands, machine_checks
from hybrid_engine.engine.hybrid_engine import HybridEngine
from hybrid_engine.ops.softmax_context import SoftmaxContextOp

KINDS = ["versions", "devices", "links", "kernels", "memory", "limits", "write access", "features"]


@pytest.fixture
def compiled(monkeypatch):
    """As a user has it: no references in place of kernels, which the tests ask for."""
    monkeypatch.setattr(machine_checks, "fallback_forced", lambda: False)


def found():
    return {(finding.kind, finding.name): finding for finding in machine_checks.examine()}


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
    monkeypatch.setitem(machine_checks.FEATURES, "nothing that there is", ("no-such-package",))
    monkeypatch.setattr(machine_checks, "load_library", lambda: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    findings = found()
    assert findings["features", "nothing that there is"].text == "needs no-such-package"
    assert findings["kernels", "C, for the CPU"].state == findings["limits", "file descriptors"].state == "missing"
    assert "ulimit -n 4096" in findings["limits", "file descriptors"].text
    monkeypatch.setattr(machine_checks.os, "access", lambda path, mode: False)
    assert cli.main(["doctor"]) == 1
    assert "cannot be written to" in capsys.readouterr().out


def test_a_kernel_that_computes_something_else_is_broken(monkeypatch):
    assert machine_checks._try_kernel("norm", torch.device("cpu")).state == "ok"
    monkeypatch.setattr(machine_checks.NormOp, "__call__", lambda op, rows, weight: rows * 2)
    assert machine_checks._try_kernel("norm", torch.device("cpu")).state == "broken"


def test_a_whole_decode_layer_is_tried(compiled, monkeypatch):
    layers = [finding for finding in commands._examine() if "decode layer" in finding.name]
    assert [(one.kind, one.state) for one in layers] == [("kernels", "ok")]
    monkeypatch.setattr(SoftmaxContextOp, "__call__", lambda op, qkv, *_: torch.zeros(qkv.q.flatten(1).shape))
    (layer,) = machine_checks.try_layers(torch.device("cpu"))
    assert layer.state == "broken" and "the model's forward disagree" in layer.text


def test_gpu_without_a_card_is_one_line_and_no_work(monkeypatch, capsys):
    monkeypatch.setattr(machine_checks, "build_llama", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["doctor", "--gpu"]) == cli.REFUSED
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert "doctor --gpu: no GPU is seen: CUDA_VISIBLE_DEVICES='' hides every GPU" in said.err


@pytest.mark.gpu
def test_gpu_says_of_each_part_that_it_works(monkeypatch, capsys):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(machine_checks, "examine_gpu", lambda: machine_checks.examine_device(device))
    assert cli.main(["doctor", "--gpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gpu", *["ok"] * (4 + len(machine_checks.DTYPES[device.type]))]
    assert "160 tokens are those of the model's own" in lines[-4] and "a copy reaches" in lines[-1]


def test_gpu_with_wrong_tokens_or_a_step_that_does_not_train_ends_with_a_status(monkeypatch, capsys):
    cpu, generate = torch.device("cpu"), HybridEngine.generate
    monkeypatch.setattr(machine_checks, "examine_gpu", lambda: machine_checks.examine_device(cpu))
    monkeypatch.setattr(HybridEngine, "generate", lambda engine, ids, **options: generate(engine, ids, **options) % 9)
    monkeypatch.setattr(HybridEngine, "step", lambda engine: None)
    assert cli.main(["doctor", "--gpu", "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert [finding["state"] for finding in findings.values()] == ["ok", "broken", "broken", "broken", "ok"]
    assert "tokens are not those of generate()" in findings["greedy tokens"]["text"]
    monkeypatch.setattr(HybridEngine, "generate", generate)
    with pytest.raises(RuntimeError, match="the loss does not fall"):
        machine_checks.training_step(cpu)
    right = machine_checks.linear_log_prob
    monkeypatch.setattr(machine_checks, "linear_log_prob", lambda *given: right(given[0] * 1.1, *given[1:]))
    with pytest.raises(RuntimeError, match="from those of the logits"):
        machine_checks.log_probabilities(cpu)


def test_gpu_stops_at_a_card_that_kernels_cannot_run_on(monkeypatch, capsys):
    answers = {"is_available": True, "current_device": 0, "mem_get_info": (1, 2), "get_device_name": "Tesla T4"}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(machine_checks, "kernel_problem", lambda device: f"{device} is too old")
    assert cli.main(["doctor", "--gpu"]) == 1
    assert capsys.readouterr().out.splitlines() == ["gpu", "  broken   the card: cuda:0 is too old"]


def test_its_help_needs_no_torch():
    lines = ["import sys", "from hybrid_engine.cli.cli import main", "try: main(['doctor', '--help'])"]
    lines += ["except SystemExit: pass", "assert 'torch' not in sys.modules"]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, check=False).returncode == 0
