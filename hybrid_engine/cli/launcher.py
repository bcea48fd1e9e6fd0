"""Starts a script on several processes: translates the flags of DeepSpeed's launcher for torchrun, and runs it."""

import argparse
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_engine.extensions.deepspeed.deepspeed_names import environment_with_names

DESCRIPTION = """\
Starts a script on several processes with torchrun, given the flags of DeepSpeed's launcher.

    hybrid-engine launch --num_gpus 2 train.py --deepspeed_config ds.json

On several machines, run the same command once on each machine (DeepSpeed's launcher logs in to them over ssh; this one
does not); --node_rank or the order of the hostfile numbers them. Like DeepSpeed's launcher, it passes --local_rank to
the script unless --no_local_rank is given, and sets the variable LOCAL_RANK.
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LOCAL_RANK = "--local_rank=${local_rank}"
"""An argument that each process gets before the script's own arguments; torchrun fills in the number."""
SSH = "this launcher never logs in to another machine"
NO_MEANING = {
    "--bind_core_list": "OMP_NUM_THREADS and numactl say which cores are used",
    "--bind_cores_to_rank": "OMP_NUM_THREADS and numactl say which cores are used",
    "--force_multi": SSH,
    "--launcher": SSH,
    "--launcher_args": SSH,
    "--no_ssh": SSH,
    "--no_ssh_check": SSH,
    "--save_pid": "the command itself waits for its processes",
    "--ssh_port": SSH,
    "--venv_script": SSH,
}
"""Flags of DeepSpeed's launcher that are accepted, and why they change nothing."""
NOT_SUPPORTED = {
    "--autotuning": "sizes are the caller's choice",
    "--elastic_training": "a checkpoint loads on any number of processes instead",
    "--max_elastic_nodes": "a checkpoint loads on any number of processes instead",
    "--min_elastic_nodes": "a checkpoint loads on any number of processes instead",
}
"""Flags of DeepSpeed's launcher that are refused, and why."""
WITH_VALUE = (
    "--autotuning",
    "--bind_core_list",
    "--launcher",
    "--launcher_args",
    "--max_elastic_nodes",
    "--min_elastic_nodes",
    "--ssh_port",
    "--venv_script",
)
"""Flags in `NO_MEANING` and `NOT_SUPPORTED` that are followed by a value."""
UNSET = -1
"""DeepSpeed's value for a number that is not given."""
MAX_PORT = 65535
DEFAULT_HOSTFILE = "/job/hostfile"
LOCALHOST = "localhost"


def build_parser() -> argparse.ArgumentParser:
    """The parser of the supported flags of DeepSpeed's launcher; the script and its arguments come last."""
    parser = argparse.ArgumentParser(
        prog="hybrid-engine launch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-H", "--hostfile", default=DEFAULT_HOSTFILE, help="file with lines of `<host> slots=<processes>`"
    )
    parser.add_argument("-i", "--include", default="", help="hosts and GPUs to use, e.g. host1@host2:0,2")
    parser.add_argument("-e", "--exclude", default="", help="hosts and GPUs to exclude, in the same format")
    parser.add_argument("--num_nodes", type=int, default=UNSET, help="number of machines of the hostfile to use")
    parser.add_argument(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=UNSET,
        help="processes per machine; default: one for each GPU",
    )
    parser.add_argument(
        "--node_rank", type=int, default=UNSET, help="this machine's number; default: from the hostfile"
    )
    parser.add_argument(
        "--master_addr", default="", help="address of the first machine; default: the first of the hostfile"
    )
    parser.add_argument("--master_port", type=int, default=29500, help="port of the first machine (default: 29500)")
    parser.add_argument("--module", action="store_true", help="run the script as `python -m`")
    parser.add_argument("--no_python", action="store_true", help="run the script directly, without python")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument(
        "--deepspeed-names",
        "--deepspeed_names",
        action="store_true",
        help="make this engine importable as deepspeed, for a script that imports it",
    )
    parser.add_argument("--enable_each_rank_log", metavar="FOLDER", help="folder for the output of each process")
    texts = {flag: f"no effect: {why}" for flag, why in NO_MEANING.items()}
    texts |= {flag: f"not supported: {why}" for flag, why in NOT_SUPPORTED.items()}
    for flag, text in texts.items():
        parser.add_argument(flag, action="store" if flag in WITH_VALUE else "store_true", help=text)
    parser.add_argument("user_script", help="the script to start")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs torchrun and returns its exit status, or the status of the signal that ended it.

    Flags that contradict each other or are not supported give one line on stderr and status 2; Ctrl-C gives one line
    and status 130.
    """
    options = build_parser().parse_args(arguments)
    try:
        command, environment = build_command(options)
        check_script(options)
    except ValueError as error:
        print(f"hybrid-engine launch: {error}", file=sys.stderr)
        return 2
    os.environ.update(environment)
    try:
        return run_torchrun(command[len(TORCHRUN) :])
    except KeyboardInterrupt:
        return _ended_by(signal.SIGINT)


def check_script(options: argparse.Namespace) -> None:
    """Raises ValueError unless the script, module or program exists on this machine."""
    script = options.user_script
    if options.module:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        is_there = importlib.util.find_spec(script.partition(".")[0]) is not None
        sys.path.pop(0)
    elif options.no_python:
        is_there = shutil.which(script) is not None
    else:
        is_there = Path(script).is_file() or (Path(script) / "__main__.py").is_file()
    if not is_there:
        kind = "module" if options.module else "program" if options.no_python else "script"
        raise ValueError(f"there is no {kind} {script!r} here; check its name, and put flags before it")


def run_torchrun(arguments: list[str]) -> int:
    """Runs torchrun in this process, so that a signal ends it without its tracebacks; returns the exit status.

    The processes that it started get the signal from torchrun, and the time that torchrun gives them to end.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_is_not_about_signals)
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    except SignalException as error:
        return _ended_by(error.sigval)
    return 0


def _is_not_about_signals(record: logging.LogRecord) -> bool:
    return "signal" not in record.getMessage()


def _ended_by(received: signal.Signals) -> int:
    how = "interrupted" if received == signal.SIGINT else f"ended by {received.name}"
    print(f"hybrid-engine launch: {how}", file=sys.stderr)
    return 128 + received


def build_command(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """torchrun's command line on this machine, and the environment variables to set for it.

    Raises:
        ValueError: a flag is not supported, hosts or GPUs do not exist, flags contradict each other, or this machine is
            not one of several.
    """
    for flag, why in NOT_SUPPORTED.items():
        if getattr(options, flag.removeprefix("--")):
            raise ValueError(f"{flag} is not supported: {why}; leave it out")
    if options.module and options.no_python:
        raise ValueError("--module and --no_python contradict each other; give one of them")
    _check_numbers(options)
    hosts = choose_hosts(options)
    names = list(hosts)
    node_rank = _node_rank(options.node_rank, names)
    slots = hosts[names[node_rank]] if names else []
    num_processes = options.num_gpus if options.num_gpus > 0 else len(slots) or count_gpus()
    num_nodes = max(1, len(names), options.num_nodes)
    if num_nodes > 1 and not names and (options.node_rank < 0 or not options.master_addr):
        raise ValueError(
            f"--num_nodes={num_nodes} without a hostfile needs --node_rank and --master_addr; give both, or --hostfile"
        )
    if node_rank >= num_nodes:
        raise ValueError(f"--node_rank={node_rank} must be below the number of machines, {num_nodes}; lower it")
    address = options.master_addr or (names[0] if names and names[0] != LOCALHOST else "127.0.0.1")
    flags = [f"--nnodes={num_nodes}", f"--node_rank={node_rank}", f"--nproc_per_node={num_processes}"]
    flags += [f"--master_addr={address}", f"--master_port={options.master_port}"]
    flags += [f"--{name}" for name in ("module", "no_python") if getattr(options, name)]
    if options.enable_each_rank_log is not None:
        flags += [f"--log_dir={options.enable_each_rank_log}", "--redirects=3"]
    script = [options.user_script, *([] if options.no_local_rank else [LOCAL_RANK]), *options.user_args]
    command = [*TORCHRUN, *flags, *script]
    environment = environment_with_names(os.environ) if options.deepspeed_names else {}
    if (options.include or options.exclude) and slots:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    return command, environment


def _check_numbers(options: argparse.Namespace) -> None:
    for name, least in (("num_gpus", 1), ("num_nodes", 1), ("node_rank", 0)):
        value = getattr(options, name)
        if value < least and value != UNSET:
            raise ValueError(f"--{name}={value} must be at least {least}; raise it, or leave it out")
    if not 1 <= options.master_port <= MAX_PORT:
        raise ValueError(f"--master_port={options.master_port} must be from 1 to {MAX_PORT}; choose another port")


def count_gpus() -> int:
    """The number of GPUs of this machine, at least 1: as many processes are started."""
    import torch  # takes seconds, which --help and refused flags do not wait for

    return max(1, torch.cuda.device_count())


def choose_hosts(options: argparse.Namespace) -> dict[str, list[int]]:
    """Host names in order, each with the GPUs to use; empty if there is only this machine and nothing is selected."""
    if options.include and options.exclude:
        raise ValueError("--include and --exclude contradict each other; give one of them")
    if (options.include or options.exclude) and max(options.num_nodes, options.num_gpus) > 0:
        raise ValueError("--include and --exclude select the GPUs; leave --num_nodes and --num_gpus out")
    hosts = read_hostfile(Path(options.hostfile), is_required=options.hostfile != DEFAULT_HOSTFILE)
    filtered = options.include or options.exclude
    if not hosts and filtered:
        hosts = {LOCALHOST: list(range(count_gpus()))}
    if filtered:
        hosts = _filter(hosts, filtered, keeps=bool(options.include))
    if options.num_nodes > 0 and hosts:
        if options.num_nodes > len(hosts):
            raise ValueError(f"--num_nodes={options.num_nodes} exceeds the {len(hosts)} available hosts; lower it")
        hosts = dict(list(hosts.items())[: options.num_nodes])
    return hosts


def read_hostfile(path: Path, is_required: bool) -> dict[str, list[int]]:
    """The hosts in a file of lines `<host> slots=<n>`, each with its slots; empty if there is no such file."""
    if not path.is_file():
        if is_required:
            raise ValueError(f"--hostfile={path} is not a file; give one with lines of `<host> slots=<processes>`")
        return {}
    hosts: dict[str, list[int]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if match is None or match.group(1) in hosts:
            raise ValueError(f"{path}, line {number}: {line!r} must be `<host> slots=<processes>`, each host once")
        hosts[match.group(1)] = list(range(int(match.group(2))))
    return hosts


def _filter(hosts: dict[str, list[int]], text: str, keeps: bool) -> dict[str, list[int]]:
    """Applies `host1@host2:0,2`: hosts, each with the selected slots, or with all slots if none are named."""
    chosen: dict[str, list[int]] = {}
    for part in text.split("@"):
        name, _, slots = part.partition(":")
        if name not in hosts:
            raise ValueError(f"{part!r}: there is no host {name!r}; choose from {', '.join(hosts)}")
        if not re.fullmatch(r"(\d+(,\d+)*)?", slots):
            raise ValueError(f"{part!r}: the slots {slots!r} must be numbers; write them like {name}:0,2")
        chosen[name] = [int(slot) for slot in slots.split(",")] if slots else hosts[name]
        unknown = [slot for slot in chosen[name] if slot not in hosts[name]]
        if unknown and name != LOCALHOST:
            raise ValueError(f"{part!r}: {name} has no slots {unknown}; choose from {hosts[name]}")
    if keeps:
        return {name: chosen[name] for name in hosts if name in chosen}
    rest = {name: [slot for slot in slots if slot not in chosen.get(name, [])] for name, slots in hosts.items()}
    left = {name: slots for name, slots in rest.items() if slots}
    if not left:
        raise ValueError(f"--exclude={text} leaves nothing; leave something out of it")
    return left


def _node_rank(given: int, names: list[str]) -> int:
    if given >= 0:
        if names and given >= len(names):
            raise ValueError(f"--node_rank={given} must be below the number of machines, {len(names)}; lower it")
        return given
    if len(names) <= 1:
        return 0
    own = {socket.gethostname(), socket.getfqdn(), socket.gethostname().split(".")[0]}
    for rank, name in enumerate(names):
        if name in own:
            return rank
    raise ValueError(
        f"several machines ({', '.join(names)}), none of which has the name of this one ({socket.gethostname()}); run "
        f"this command on each of them, with --node_rank 0, 1, ..."
    )


if __name__ == "__main__":
    sys.exit(main())
