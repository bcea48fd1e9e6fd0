"""Everything there is to learn from a GPU, in one command, the most important first.

    make gpu                                # all parts; results in benchmarks/results/gpu/
    make gpu-smoke                          # one of them; `make gpu-smoke gpu-tests` two
    make gpu DEVICE=cpu RESULTS=/tmp/gpu    # the rehearsal: the same parts on small shapes
    python benchmarks/gpu_day.py --only smoke ops --results /tmp/gpu
    python benchmarks/gpu_day.py --budget 540 --archive gpu.tar.gz      # nine minutes, and one file to take home
    python benchmarks/gpu_day.py --budget 240 --skip smoke tests        # what was left

Each part is a process of its own with a time limit, so that one that crashes or hangs spoils no other; parts that time
nothing run beside each other. A part leaves `<part>.log`, what it measured in `<part>.csv`, tests that failed in
`<part>.failures`, and `<part>.json`: how it ended, on which device, with which versions of what, at which commit.
`summary.md` is written anew from all the `.json` files that lie in the folder, and the archive holds the folder as it
is after each part. No part starts for which the budget leaves too little; the last line is the command that goes on.

It needs a Python with torch, transformers, triton and pip, and no network: the package is installed for the parts
alone, into a temporary folder, without its dependencies. What is missing is named before anything runs; a part that
lacks something is skipped and says what. This file itself imports nothing but the standard library.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 480
"""What a part may take."""
LEAST_SECONDS = 30
"""With less no part starts: a process, its imports and a model take that long."""
RESERVED_SECONDS = 5
"""Of a budget, for the archive."""
NEEDED = ("torch", "transformers", "triton", "pip", "setuptools")
"""Without these there is nothing to run."""
KILLED = 124
NOT_STARTED = "not started"
SHOWN_LINES = 40


@dataclass(frozen=True)
class Part:
    """One process: what it answers, its command on a GPU and in the rehearsal, and the packages it cannot do without.

    In a command `{csv}` stands for the file that its rows go to, `{folder}` for a folder of its own, `{processes}` for
    how many to start.
    """

    name: str
    question: str
    on_gpu: tuple[str, ...]
    rehearsal: tuple[str, ...]
    needs: tuple[str, ...] = ()
    seconds: int = SECONDS
    is_alone: bool = True
    """Whether it has the machine for itself: it measures time, or does for the next ones what each would do again."""
    least_seconds: int = LEAST_SECONDS
    """With less it would teach nothing."""


# Appended: in front of Python's path this folder would hide the installed package, of which it has only a part.
TESTS = ("-m", "pytest", "-vv", "-p", "no:cacheprovider", "--import-mode=append", "-rs", "-n", "{processes}")


def find_tests(pattern: str) -> tuple[str, ...]:
    """Files of tests whose text has the pattern. By name: collecting all would import what only the recipes need."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(str(path.relative_to(ROOT)) for path in paths if re.search(pattern, path.read_text()))


TEST_FILES = find_tests(r"mark\.(multi)?gpu")
# Those with the fixtures `kernels` or `way`, or with the marker that such tests have.
KERNEL_FILES = find_tests(r"def test_\w+\([^)]*\b(kernels|way)\b|mark\.kernels")
TABLES = ("rich",)
COMMAND = ("-c", "import sys; from hybrid_engine.cli.cli import main; sys.exit(main())")
ROLLOUT = ("benchmarks/bench_rollout.py", "--dtype", "bfloat16", "--repeats", "3", "--csv", "{csv}")
# A Llama of 1.0 billion parameters.
ROLLOUT_SHAPE = (
    "--hidden", "2048", "--layers", "16", "--heads", "16", "--kv-heads", "8", "--intermediate", "8192", "--vocab",
    "32768", "--prompts", "64", "--prompt-tokens", "256", "--new-tokens", "256",
)  # fmt: skip

PARTS = (
    Part(
        "compile", "does every kernel compile; those of later parts, in several processes",
        ("tests/tools/gpu_compile.py", "--processes", "{processes}"),
        ("tests/tools/gpu_compile.py", "--processes", "2"), TABLES, seconds=120,
    ),
    Part(
        "smoke", "does it work: kernels, a recorded step, a cycle of training and rollouts, LoRA, offload",
        ("benchmarks/gpu_smoke.py",), ("benchmarks/gpu_smoke.py",), TABLES, seconds=240, is_alone=False,
    ),
    Part(
        "decode", "are the goals of a decode step met",
        ("benchmarks/bench_decode.py", "--goals", "--repeats", "3", "--csv", "{csv}"),
        ("benchmarks/bench_decode.py", "--small", "--csv", "{csv}"), TABLES,
    ),
    Part(
        "rollout", "how much faster than transformers is a rollout",
        (*ROLLOUT, *ROLLOUT_SHAPE, "--without-generate-batch"), (*ROLLOUT, "--small", "--without-generate-batch"),
        TABLES,
    ),
    Part(
        "iteration", "is a rollout with a training step of OPT-1.3B as fast as DeepSpeed's",
        ("benchmarks/bench_iteration.py", "--csv", "{csv}"),
        ("benchmarks/bench_iteration.py", "--small", "--csv", "{csv}"), TABLES, seconds=180,
    ),
    Part(
        "doctor", "does `hybrid-engine doctor --gpu` find all well",
        (*COMMAND, "doctor", "--gpu"), (*COMMAND, "doctor"), TABLES, seconds=120,
    ),
    Part(
        "tests", "parity of families in bf16, graphs across training steps, flat memory; several GPUs where there are",
        (*TESTS, "-m", "gpu or multigpu", *TEST_FILES), (*TESTS, "-m", "gpu or multigpu", *TEST_FILES),
        ("pytest", "xdist"), is_alone=False,
    ),
    Part(
        "kernels", "is every kernel right in every dtype, at odd sizes, on poisoned memory",
        (*TESTS, "-m", "kernels", *KERNEL_FILES),
        (*TESTS, "tests/ops/test_kernels_compile.py"), ("pytest", "xdist"), is_alone=False,
    ),
    Part(
        "recipe", "does GRPO learn to add, in bf16, and do log-probabilities of rollout and trainer agree",
        (*COMMAND, "grpo", "--out", "{folder}", "--steps", "10", "--eval-every", "0"),
        (*COMMAND, "grpo", "--out", "{folder}", "--steps", "1", "--rollout-size", "8", "--eval-every", "0"),
        ("rich", "datasets"), seconds=180, least_seconds=90,
    ),
    Part(
        "ppo", "how much faster than transformers is a step of PPO",
        ("benchmarks/bench_ppo_step.py", "--csv", "{csv}"),
        ("benchmarks/bench_ppo_step.py", "--small", "--csv", "{csv}"), TABLES,
    ),
    Part(
        "train", "is a training step as fast as a plain PyTorch loop's",
        ("benchmarks/bench_train.py", "--repeats", "3", "--csv", "{csv}"),
        ("benchmarks/bench_train.py", "--small", "--processes", "1", "--csv", "{csv}"), TABLES, seconds=180,
    ),
    Part(
        "ops", "is each kernel faster than PyTorch's best way",
        ("benchmarks/bench_ops.py", "--csv", "{csv}"), ("benchmarks/bench_ops.py", "--small", "--csv", "{csv}"), TABLES,
    ),
    Part(
        "profile", "where does the time of a decode step go",
        ("benchmarks/profile_decode.py", "--shape", "opt-1.3b", "--batch", "1", "8", "--csv", "{csv}"),
        ("benchmarks/profile_decode.py", "--small", "--csv", "{csv}"),
    ),
    Part(
        "log_prob", "what do log-probabilities without logits save",
        ("benchmarks/bench_log_prob.py", "--csv", "{csv}"),
        ("benchmarks/bench_log_prob.py", "--small", "--csv", "{csv}"), TABLES,
    ),
    # A part of its own: its threads are transformers' own, and may hang.
    Part(
        "batching", "and than transformers' continuous batching",
        (*ROLLOUT, *ROLLOUT_SHAPE, "--only", "long tail"), (*ROLLOUT, "--small", "--only", "long tail"), TABLES,
    ),
)  # fmt: skip

# Prints what a record says of this machine, as the parts will find it.
PROBE = """
import importlib.metadata, importlib.util, json, platform, sys
packages = sys.argv[1].split(",")
found = {"python": platform.python_version(), "missing": [p for p in packages if not importlib.util.find_spec(p)]}
for name in ("torch", "triton", "transformers", "peft"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
if "torch" not in found["missing"]:
    import torch
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["capability"] = torch.cuda.get_device_capability() if found["devices"] else None
    found["arches"] = torch.cuda.get_arch_list()
print(json.dumps(found))
"""


def main() -> int:
    """Runs the parts that were asked for; 0 when each passed, or was skipped for a reason."""
    args = read_arguments()
    environment = build_environment(args.device)
    machine = probe(environment)
    refuse_where_nothing_can_run(machine, args.device)
    machine |= {"commit": find_commit(), "device": describe_device(machine, args.device)}
    args.results.mkdir(parents=True, exist_ok=True)
    print(f"{machine['device']}; Python {machine['python']}, torch {machine['torch']}, triton {machine['triton']}, "
          f"transformers {machine['transformers']}; commit {machine['commit']}", flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as site:
        install(site, environment)
        environment |= {"PYTHONPATH": site, "BENCHMARK_COMMIT": machine["commit"]}
        records = run_all(args, machine, environment)
    print(f"\n{table(records)}\n\nin {args.results}")
    if left := [record["part"] for record in records if record["status"] == NOT_STARTED]:
        print(f"the budget was too small for all; go on with: python benchmarks/gpu_day.py --only {' '.join(left)}")
    return int(any(record["status"] not in ("passed", "skipped", NOT_STARTED) for record in records))


def choose_parts(args: argparse.Namespace) -> list[Part]:
    """The parts of `--only` without those of `--skip`, in their own order."""
    return [part for part in PARTS if (not args.only or part.name in args.only) and part.name not in args.skip]


def run_all(args: argparse.Namespace, machine: dict, environment: dict[str, str]) -> list[dict]:
    """The record of each part that was asked for; those that time nothing run side by side."""
    records = []
    for is_alone, group in groupby(choose_parts(args), key=lambda part: part.is_alone):
        parts = list(group)
        with ThreadPoolExecutor(1 if is_alone else len(parts)) as pool:
            for record in pool.map(lambda part: run(part, args, machine, environment), parts):
                records.append(record)
                write_summary(args.results)
                pack(args.results, args.archive)
    return records


def pack(folder: Path, archive: Path | None) -> None:
    """Puts the folder into the archive, which is whole at every moment; not the weights that a recipe writes."""
    if archive is None:
        return

    def choose(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.endswith((archive.name, ".safetensors", ".pt", ".distcp")) else member

    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_name(f".{archive.name}")
    with tarfile.open(unfinished, "w:gz") as file:
        file.add(folder, arcname="gpu", filter=choose)
    unfinished.replace(archive)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="part", help=f"default: all; {names}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal on small shapes")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", help="a folder")
    parser.add_argument("--seconds", type=int, help="the limit of each part (default: its own, at most 480)")
    parser.add_argument("--budget", type=int, help="seconds for everything; no part starts that does not fit")
    parser.add_argument("--skip", nargs="+", default=[], metavar="part", help="parts that are left out")
    parser.add_argument("--archive", type=Path, help="a .tar.gz of the results, written anew after each part")
    args = parser.parse_args()
    args.end = None if args.budget is None else time.monotonic() + args.budget - RESERVED_SECONDS
    unknown = [name for name in (*args.only, *args.skip) if name not in {part.name for part in PARTS}]
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}; there are {names}")
    if not choose_parts(args):
        parser.error("--skip leaves out every part; leave out one of --only or --skip")
    args.results, args.archive = args.results.resolve(), args.archive and args.archive.resolve()
    return args


def build_environment(device: str) -> dict[str, str]:
    """This process's, without a network and, in the rehearsal, without a GPU."""
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    if device == "cpu":
        # One thread: what the parts do is tiny, and others may want the CPUs too.
        settings |= {"CUDA_VISIBLE_DEVICES": "", "REHEARSE_WITHOUT_GPU": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **settings}


def probe(environment: dict[str, str]) -> dict:
    """Versions, devices, and which of the packages that any part needs are missing."""
    packages = sorted({*NEEDED, *(name for part in PARTS for name in part.needs)})
    command = [sys.executable, "-c", PROBE, ",".join(packages)]
    found = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300)
    if found.returncode != 0:
        sys.exit("gpu_day.py: torch cannot be imported here; see above")
    return json.loads(found.stdout.splitlines()[-1])


def refuse_where_nothing_can_run(machine: dict, device: str) -> None:
    """Ends the program with what is missing."""
    missing = [name for name in NEEDED if name in machine["missing"]]
    if missing:
        sys.exit(f"gpu_day.py: {', '.join(missing)} missing from {sys.executable}; nothing can run without")
    if device == "cuda" and not machine["devices"]:
        sys.exit("gpu_day.py: torch finds no CUDA device here; --device cpu (make gpu DEVICE=cpu) rehearses without")
    for part in PARTS:
        lacks = [name for name in part.needs if name in machine["missing"]]
        if lacks:
            print(f"{part.name} will be skipped: {', '.join(lacks)} not installed")


def describe_device(machine: dict, device: str) -> str:
    """As records and the summary name it."""
    if device == "cpu":
        return f"CPU, {os.cpu_count()} of them (rehearsal)"
    names = machine["devices"]
    return f"{len(names)} x {names[0]}, CUDA {machine['cuda']}"


def find_commit() -> str:
    """What git says of this folder; where it has no history, what BENCHMARK_COMMIT says."""
    if os.environ.get("BENCHMARK_COMMIT"):
        return os.environ["BENCHMARK_COMMIT"]
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def install(site: str, environment: dict[str, str]) -> None:
    """Puts the package into the folder `site`; from a copy, so that nothing is left beside the sources."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        for name in ("hybrid_engine", "ops", "containers", "recipes"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        # Compiled here, once: parts write no bytecode.
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", site]
        command = [sys.executable, "-m", "pip", "install", *options, str(source)]
        if subprocess.run(command, env=environment, cwd=folder, timeout=300).returncode != 0:
            sys.exit("gpu_day.py: the package could not be installed; see above")
    # Tests look for files of this folder beside themselves.
    for path in ROOT.iterdir():
        if path.name != "hybrid_engine" and not path.name.startswith("."):
            (Path(site) / path.name).symlink_to(path)


def run(part: Part, args: argparse.Namespace, machine: dict, environment: dict[str, str]) -> dict:
    """Runs a part to its end or its limit; returns the record, which is also written."""
    left = None if args.end is None else max(0, int(args.end - time.monotonic()))
    seconds = min(part.seconds, args.seconds or part.seconds, part.seconds if left is None else left)
    words = part.on_gpu if args.device == "cuda" else part.rehearsal
    files = {kind: args.results / f"{part.name}.{kind}" for kind in ("log", "csv", "json", "failures")}
    for path in files.values():
        path.unlink(missing_ok=True)
    folder = args.results / f"{part.name}-run"
    values = {"csv": files["csv"], "folder": folder, "processes": max(1, min(8, (os.cpu_count() or 1) // 2))}
    command = [sys.executable, *(in_full(word).format(**values) for word in words)]
    record = {
        "part": part.name, "question": part.question, "status": "started", "seconds": 0.0, "limit_seconds": seconds,
        "result": "", "command": " ".join(command[1:]).replace(f"{ROOT}/", ""),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"), **machine,
    }  # fmt: skip
    lacks = [name for name in part.needs if name in machine["missing"]]
    if lacks:
        record |= {"status": "skipped", "result": f"{', '.join(lacks)} not installed"}
    elif left is not None and left < part.least_seconds:
        record |= {"status": NOT_STARTED, "result": f"{left} s were left"}
    else:
        write_record(files["json"], record)  # what is left if everything is ended from outside
        print(f"\n=== {part.name}: {part.question}? at most {seconds} s", flush=True)
        start = time.monotonic()
        code = run_to_limit(command, files["log"], seconds, environment | {"TESTS_FAILURES": str(files["failures"])})
        lines = files["log"].read_text(errors="replace").splitlines()
        has_passed = code == 0 and ("pytest" not in command or has_run_tests(lines))
        status = "timed out" if code == KILLED else "passed" if has_passed else "failed"
        print("\n".join(lines[-SHOWN_LINES:]), flush=True)
        record |= {"status": status, "seconds": round(time.monotonic() - start, 1), "result": last_words(lines)}
        print(f"=== {part.name} {status} after {record['seconds']} s", flush=True)
    write_record(files["json"], record)
    return record


def in_full(word: str) -> str:
    """A word of a command; a file of this repository by its whole path, since parts run elsewhere."""
    return str(ROOT / word) if word.endswith(".py") else word


def run_to_limit(command: list[str], log: Path, seconds: int, environment: dict[str, str]) -> int:
    """The exit status, KILLED at the limit; whatever the process started ends with it.

    It runs where the package is installed: processes that it starts look there first, and in this folder would find
    `hybrid_engine` without what `setup.py` puts beside it.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=environment.get("PYTHONPATH"), env=environment, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return KILLED
        finally:
            with suppress(ProcessLookupError):  # all have ended by themselves
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def has_run_tests(lines: list[str]) -> bool:
    """Whether a test passed, by pytest's last line: it takes tests that are all skipped for success."""
    return re.search(r"\b\d+ passed\b", last_words(lines)) is not None


def last_words(lines: list[str]) -> str:
    """The last line that says something, short enough for a table."""
    told = [line.strip() for line in lines if line.strip()]
    return told[-1].replace("|", "/")[:160] if told else ""


def write_record(path: Path, record: dict) -> None:
    """As JSON, in one step: a summary may be written beside it."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def write_summary(folder: Path) -> None:
    """`summary.md`, from all records in the folder, also those of other days and devices."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    order = [part.name for part in PARTS]
    records = sorted((r for r in found if r.get("part") in order), key=lambda r: order.index(r["part"]))
    places = sorted({f"{r['device']}; Python {r['python']}, torch {r['torch']}, triton {r['triton']}, transformers "
                     f"{r['transformers']}, peft {r['peft']}; commit {r['commit']}" for r in records})  # fmt: skip
    lines = ["# What ran", "", *(f"- {place}" for place in places), "", table(records), ""]
    (folder / "summary.md").write_text("\n".join(lines))


def table(records: list[dict]) -> str:
    """In markdown."""
    lines = ["| part | status | seconds | its last words |", "|---|---|---|---|"]
    lines += [f"| {r['part']} | {r['status']} | {r['seconds']:.0f} | {r['result']} |" for r in records]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
