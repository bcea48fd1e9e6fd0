"""The driver of `make gpu`: a part that hangs or fails spoils no other, and what is missing is said first."""

import argparse
import importlib.util
import json
import sys
import tarfile
import time
from functools import partial

import pytest

from hybrid_engine.ops import dispatch
from tests.support.paths import ROOT

SPEC = importlib.util.spec_from_file_location("gpu_day", ROOT / "benchmarks" / "gpu_day.py")
gpu_day = sys.modules["gpu_day"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_day)

MACHINE = {
    "missing": [], "devices": ["H100"], "device": "1 x H100", "python": "3.12", "torch": "2.11", "triton": "3.6",
    "transformers": "5.17", "peft": None, "commit": "abc",
}  # fmt: skip


def part(name, source, needs=(), seconds=60):
    return gpu_day.Part(name, "does it", ("-c", source), ("-c", source), needs, seconds)


def run(one, folder, machine=MACHINE, end=None):
    args = argparse.Namespace(device="cuda", results=folder, seconds=None, end=end)
    return gpu_day.run(one, args, machine, gpu_day.build_environment("cuda") | {"PYTHONPATH": str(folder)})


def test_a_part_that_hangs_crashes_or_lacks_a_package_is_told_and_the_next_one_runs(tmp_path, monkeypatch):
    # The grandchild holds the log open, as compilers and ranks do: it must end with the part.
    hang = "import subprocess, sys, time; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    parts = [
        part("hangs", hang, seconds=2),
        part("dies", "import os; print('last words'); os.abort()"),
        part("lacks", "print('never')", needs=("rich",)),
        part("works", "import os; print('rows', os.path.exists(r'{csv}'))"),
    ]
    monkeypatch.setattr(gpu_day, "PARTS", parts)
    statuses = [run(one, tmp_path, MACHINE | {"missing": ["rich"]}) for one in parts]
    assert [record["status"] for record in statuses] == ["timed out", "failed", "skipped", "passed"]
    assert statuses[0]["seconds"] < 30
    assert [record["result"] for record in statuses] == ["begun", "last words", "rich not installed", "rows False"]
    gpu_day.write_summary(tmp_path)
    summary = (tmp_path / "summary.md").read_text()
    assert "1 x H100; Python 3.12, torch 2.11" in summary and "commit abc" in summary
    assert [line.split(" | ")[:2] for line in summary.splitlines()[-4:]] == [
        ["| hangs", "timed out"], ["| dies", "failed"], ["| lacks", "skipped"], ["| works", "passed"],
    ]  # fmt: skip
    record = json.loads((tmp_path / "works.json").read_text())
    assert record["torch"] == "2.11" and record["limit_seconds"] == 60


def test_processes_that_a_part_starts_import_the_package_as_it_is_installed(tmp_path):
    """From a folder that has `hybrid_engine` and not what belongs beside it they would import that."""
    package = tmp_path / "hybrid_engine"
    package.mkdir()
    (package / "__init__.py").write_text("installed = True")
    fresh = "import hybrid_engine; print('fresh', hybrid_engine.installed)"
    record = run(part("starts", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {fresh!r}])"), tmp_path)
    assert (record["status"], record["result"]) == ("passed", "fresh True")


def test_tests_run_on_the_package_as_it_is_installed(tmp_path):
    """The folder of the repository has `hybrid_engine` too, without ops, containers and recipes."""
    gpu_day.install(str(tmp_path), gpu_day.build_environment("cpu"))
    (tmp_path / "where.py").write_text(
        "import sys\ndef pytest_unconfigure():\n    print(sys.modules['hybrid_engine'].__file__)"
    )
    words = (*gpu_day.TESTS[:-2], "-p", "where", "tests/ops/test_vocabulary.py")
    record = run(gpu_day.Part("tests", "", words, words), tmp_path)
    assert (record["status"], record["result"]) == ("failed", f"{tmp_path}/hybrid_engine/__init__.py")
    assert " passed" in (tmp_path / "tests.log").read_text()


def test_nothing_runs_without_torch_or_without_a_gpu_unless_it_is_a_rehearsal():
    with pytest.raises(SystemExit, match=r"torch, triton missing from .*; nothing can run without"):
        gpu_day.refuse_where_nothing_can_run(MACHINE | {"missing": ["torch", "triton"]}, "cpu")
    with pytest.raises(SystemExit, match="torch finds no CUDA device here"):
        gpu_day.refuse_where_nothing_can_run(MACHINE | {"devices": []}, "cuda")
    gpu_day.refuse_where_nothing_can_run(MACHINE | {"devices": []}, "cpu")


def test_every_part_has_a_script_that_is_there_and_all_gpu_tests_are_in_one():
    for one in gpu_day.PARTS:
        files = [word for word in (*one.on_gpu, *one.rehearsal) if word.endswith(".py")]
        assert files or one.on_gpu[:2] == gpu_day.COMMAND, one.name
        assert all((ROOT / file).exists() for file in files), one.name
        assert one.seconds <= 480
    assert {
        "tests/integration/test_gpu.py",
        "tests/integration/test_multigpu.py",
        "tests/generation/test_decode_graph.py",
    } <= set(gpu_day.TEST_FILES)


def test_what_teaches_most_comes_first():
    names = [one.name for one in gpu_day.PARTS]
    assert names[:5] == ["compile", "smoke", "decode", "rollout", "iteration"]


def test_every_test_that_launches_kernels_is_in_one_part(request):
    """Of those that were collected with this one."""
    (part,) = [one for one in gpu_day.PARTS if one.name == "kernels"]
    marked = [item for item in request.session.items if item.get_closest_marker("kernels") is not None]
    assert {str(item.path.relative_to(ROOT)) for item in marked} <= set(part.on_gpu)
    ops = ("kernels_linear_divergence", "gated_delta", "gated_norm", "short_conv", "latent_attention", "xielu")
    assert {f"tests/ops/test_{name}.py" for name in ops} <= set(part.on_gpu)
    assert part.on_gpu[part.on_gpu.index("-m", 2) + 1] == "kernels"


def test_a_kernel_that_does_not_compile_fails_the_first_part_by_name(monkeypatch):
    """It is not replaced by torch's operations, as it is in a run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delenv(dispatch.SWITCH, raising=False)
    gpu_compile = importlib.import_module("tests.tools.gpu_compile")
    compiler = {"__name__": "triton.compiler.compiler"}
    exec("def compile(): raise RuntimeError('no such operation')", compiler)
    wrong, right = (partial(dispatch.kernel_or_reference, run, bool) for run in (compiler["compile"], int))
    monkeypatch.setattr(gpu_compile, "build_cases", lambda: [("wrong", wrong), ("right", right)])
    assert gpu_compile.compile_share((0, 1)) == ["wrong: RuntimeError: no such operation"]


def test_the_first_part_compiles_every_op(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = [name for name, _ in importlib.import_module("tests.tools.gpu_compile").list_checks()]
    ops = ("prefill of states", "decode of latents", "divergence of heads", "experts", "exact attention", "sampling")
    assert all(any(name.startswith(op) for name in names) for op in ops)


def test_a_budget_starts_no_part_that_does_not_fit(tmp_path, monkeypatch):
    counts = "import pathlib; print('done'); pathlib.Path(r'{csv}').write_text('a,b')"

    def quick(name, source):
        return gpu_day.Part(name, "", ("-c", source), (), seconds=5, least_seconds=3)

    parts = [quick("first", counts), quick("long", "import time; time.sleep(60)"), quick("last", counts)]
    monkeypatch.setattr(gpu_day, "PARTS", parts)
    archive, results = tmp_path / "home" / "gpu.tar.gz", tmp_path / "results"
    results.mkdir()
    args = argparse.Namespace(
        only=[], skip=[], device="cuda", results=results, seconds=None, archive=archive, end=time.monotonic() + 7
    )
    records = gpu_day.run_all(args, MACHINE, gpu_day.build_environment("cuda") | {"PYTHONPATH": str(tmp_path)})
    assert [record["status"] for record in records] == ["passed", "timed out", "not started"]
    with tarfile.open(archive) as file:
        names = set(file.getnames())
    assert {"gpu/first.csv", "gpu/long.log", "gpu/last.json", "gpu/summary.md"} <= names


def test_parts_that_time_nothing_run_beside_each_other(tmp_path, monkeypatch):
    """Each waits for a file that the other one writes."""
    wait = "import pathlib, time; pathlib.Path({!r}).touch()\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.05)"
    names = [str(tmp_path / name) for name in ("a", "b")]
    parts = [
        gpu_day.Part(name, "", ("-c", wait.format(*pair)), (), seconds=60, is_alone=False)
        for name, pair in (("one", names), ("two", names[::-1]))
    ]
    monkeypatch.setattr(gpu_day, "PARTS", parts)
    args = argparse.Namespace(
        only=[], skip=[], device="cuda", results=tmp_path, seconds=None, archive=None, end=None
    )  # fmt: skip
    records = gpu_day.run_all(args, MACHINE, gpu_day.build_environment("cuda") | {"PYTHONPATH": str(tmp_path)})
    assert [record["status"] for record in records] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("source", "selected", "status"),
    [
        ("def test_it(): pass", "it", "passed"),
        ("def test_it(): pass", "other", "failed"),
        ("import pytest\n\n@pytest.mark.skip\ndef test_it(): pass", "it", "failed"),
    ],
)
def test_a_part_of_which_no_test_runs_has_failed(source, selected, status, tmp_path):
    (tmp_path / "test_one.py").write_text(source)
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-k", selected, str(tmp_path / "test_one.py"))
    record = run(gpu_day.Part("one", "", command, command), tmp_path)
    assert record["status"] == status, record["result"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--only", "smoke", "decod"], "no part is named decod; there are compile, smoke"),
        (["--only", "smoke", "--skip", "smoke"], "--skip leaves out every part"),
        (["smoke"], "unrecognized arguments: smoke"),
    ],
)
def test_parts_that_are_not_there_are_an_error_before_any_runs(options, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", *options])
    with pytest.raises(SystemExit):
        gpu_day.read_arguments()
    assert error in capsys.readouterr().err


def test_only_names_the_parts_that_run_in_their_own_order(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--only", "decode", "smoke", "compile", "--skip", "compile"])
    assert [part.name for part in gpu_day.choose_parts(gpu_day.read_arguments())] == ["smoke", "decode"]
