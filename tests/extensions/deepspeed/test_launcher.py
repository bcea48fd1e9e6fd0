"""The launcher: DeepSpeed's flags become torchrun's, and torchrun starts the script."""

import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from hybrid_engine.cli import launcher
from tests.support.distributed import free_port
from tests.support.fresh_python import executable, run_python

pytestmark = pytest.mark.long

LOCAL_RANK = "--local_rank=${local_rank}"


def command(text):
    words, environment = launcher.build_command(launcher.build_parser().parse_args(text.split()))
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    return " ".join(words[3:]), environment


ONE = "--nnodes=1 --node_rank=0 --nproc_per_node=2 --master_addr=127.0.0.1 --master_port"


@pytest.mark.parametrize(
    ("flags", "expected", "devices"),
    [
        ("--num_gpus 2 t.py --lr 1", f"{ONE}=29500 t.py RANK --lr 1", None),
        ("--num_gpus=2 --num_nodes=1 --master_port 7 t.py", f"{ONE}=7 t.py RANK", None),
        (
            "--num_accelerators 2 --no_ssh --bind_cores_to_rank --bind_core_list 0-1 t.py",
            f"{ONE}=29500 t.py RANK",
            None,
        ),
        ("--launcher pdsh --force_multi --num_gpus 2 t.py", f"{ONE}=29500 t.py RANK", None),
        ("--num_gpus 2 --enable_each_rank_log logs t.py", f"{ONE}=29500 --log_dir=logs --redirects=3 t.py RANK", None),
        ("--include localhost:1,3 t.py --include x", f"{ONE}=29500 t.py RANK --include x", "1,3"),
        ("--num_gpus 2 --module a.b --no", f"{ONE}=29500 --module a.b RANK --no", None),
        ("--no_local_rank --no_python --num_gpus 2 t.sh", f"{ONE}=29500 --no_python t.sh", None),
        (
            "--num_nodes 2 --node_rank 1 --master_addr head --num_gpus 4 t.py",
            "--nnodes=2 --node_rank=1 --nproc_per_node=4 --master_addr=head --master_port=29500 t.py RANK",
            None,
        ),
    ],
)
def test_flags_become_torchruns(flags, expected, devices):
    assert command(flags) == (
        expected.replace("RANK", LOCAL_RANK),
        {"CUDA_VISIBLE_DEVICES": devices} if devices else {},
    )


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(f"head slots=4  # the first\n\n{socket.gethostname()} slots=2\n")
    return path


@pytest.mark.parametrize(
    ("flags", "expected", "devices"),
    [
        ("", "--nnodes=2 --node_rank=1 --nproc_per_node=2 --master_addr=head", None),
        ("--node_rank 0", "--nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=head", None),
        ("--include head:1,2", "--nnodes=1 --node_rank=0 --nproc_per_node=2 --master_addr=head", "1,2"),
        ("--exclude head:0@HERE:1", "--nnodes=2 --node_rank=1 --nproc_per_node=1 --master_addr=head", "0"),
        ("--num_nodes 1", "--nnodes=1 --node_rank=0 --nproc_per_node=4 --master_addr=head", None),
    ],
)
def test_a_hostfile_says_which_machine_this_is_and_how_many_processes_it_has(hostfile, flags, expected, devices):
    flags = flags.replace("HERE", socket.gethostname())
    words, environment = command(f"--hostfile {hostfile} {flags} t.py")
    assert words == f"{expected} --master_port=29500 t.py {LOCAL_RANK}"
    assert environment == ({"CUDA_VISIBLE_DEVICES": devices} if devices else {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--elastic_training t.py", "--elastic_training is not supported: a checkpoint loads on any number"),
        ("--autotuning run t.py", "--autotuning is not supported: sizes are the caller's choice"),
        ("--hostfile missing t.py", "--hostfile=missing is not a file"),
        ("--include localhost --exclude localhost t.py", "--include and --exclude contradict each other"),
        ("--include localhost:0 --num_gpus 2 t.py", "leave --num_nodes and --num_gpus out"),
        ("--module --no_python a.b", "--module and --no_python contradict each other"),
        ("--include other:0 t.py", "there is no host 'other'; choose from localhost"),
        ("--num_nodes 2 t.py", "--num_nodes=2 without a hostfile needs --node_rank and --master_addr"),
        ("--hostfile HOSTS --num_nodes 3 t.py", "--num_nodes=3 exceeds the 2 available hosts"),
        ("--hostfile HOSTS --node_rank 2 t.py", "--node_rank=2 must be below the number of machines, 2"),
        ("--hostfile HOSTS --include head:7 t.py", r"head has no slots \[7\]; choose from \[0, 1, 2, 3\]"),
        ("--hostfile BROKEN t.py", "line 1: 'head' must be `<host> slots=<processes>`"),
        ("--hostfile FOREIGN t.py", "none of which has the name of this one.*--node_rank 0, 1"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused_with_what_to_do(hostfile, tmp_path, flags, message):
    (tmp_path / "broken").write_text("head\n")
    (tmp_path / "foreign").write_text("no-host-1 slots=1\nno-host-2 slots=1\n")
    for word, path in (("HOSTS", hostfile), ("BROKEN", tmp_path / "broken"), ("FOREIGN", tmp_path / "foreign")):
        flags = flags.replace(word, str(path))
    with pytest.raises(ValueError, match=message):
        command(flags)


def _launch(module, flags):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment["PYTHON_EXEC"] = executable()  # torchrun's variable for the interpreter that it starts
    arguments = ["--num_gpus", "2", "--master_port", str(free_port()), *flags]
    return run_python("-m", *module, *arguments, env=environment)


def test_the_command_starts_the_script_on_as_many_processes_with_its_arguments_and_its_local_rank(tmp_path):
    """The script takes the rank as those written for DeepSpeed do: from the argument alone."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import argparse, pathlib, sys
        import hybrid_engine as deepspeed
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--out", type=pathlib.Path)
        args = parser.parse_args()
        assert args.deepspeed_config == "x.json"
        deepspeed.init_distributed()
        (args.out / str(args.local_rank)).write_text(str(deepspeed.comm.get_world_size()))
        """)
    )
    arguments = [str(script), "--deepspeed_config", "x.json", "--out", str(tmp_path)]
    result = _launch(["hybrid_engine.cli.launcher"], arguments)
    assert result.returncode == 0, result.stderr
    assert [(tmp_path / name).read_text() for name in ("0", "1")] == ["2", "2"]


def test_each_process_may_have_files_of_its_own_for_its_output_and_no_local_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint('argument', sys.argv[1:], os.environ['LOCAL_RANK'])")
    flags = ["--no_local_rank", "--enable_each_rank_log", str(tmp_path / "logs"), str(script), "a"]
    result = _launch(["hybrid_engine.cli.cli", "launch"], flags)
    assert result.returncode == 0 and "argument" not in result.stdout, result.stderr
    texts = sorted(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))
    assert texts == [f"argument ['a'] {rank}\n" for rank in range(2)]


def test_a_script_whose_last_line_is_a_collective_ends_without_an_error(tmp_path):
    """Twice two processes, of which a third aborts where gloo's threads wait for the lock as Python ends."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import torch
        import hybrid_engine as deepspeed
        deepspeed.init_distributed()
        tensor = torch.ones(1000)
        sys.setswitchinterval(100)  # seconds that threads wait for the lock if nobody blocks
        deepspeed.comm.broadcast(tensor, 0)
        """)
    )
    for _ in range(2):
        result = _launch(["hybrid_engine.cli.launcher"], ["--no_local_rank", str(script)])
        assert result.returncode == 0, result.stderr


def test_a_script_that_is_not_there_is_one_line_before_torchrun_starts(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for words, what in (
        (["nothing.py"], "script 'nothing.py'"),
        (["folder"], "script 'folder'"),
        (["--module", "no_such.module"], "module 'no_such.module'"),
        (["--no_python", "no-such-program"], "program 'no-such-program'"),
    ):
        assert launcher.main(["--num_gpus", "2", *words, "--lr", "1"]) == 2
        line = f"hybrid-engine launch: there is no {what} here; check its name, and put flags before it\n"
        assert capfd.readouterr().err == line


def test_ctrl_c_ends_the_scripts_with_one_line_of_the_launchers(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys, time
        try:
            # One write for a line: two processes share the pipe, and unbuffered, print() writes the feed by itself.
            os.write(1, b"ready\\n")
            time.sleep(100)
        except KeyboardInterrupt:
            os.write(1, f"interrupted {os.environ['LOCAL_RANK']}\\n".encode())
        """)
    )
    command = [
        sys.executable,
        "-m",
        "hybrid_engine.cli.launcher",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
    ]
    with subprocess.Popen(
        [*command, "--no_local_rank", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does: all that runs in it gets the signal
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and errors == "hybrid-engine launch: interrupted\n"
    assert sorted(output.splitlines()) == ["interrupted 0", "interrupted 1"]


def test_the_module_answers_like_the_command(capsys):
    assert launcher.main(["--num_nodes", "2", "t.py"]) == 2
    assert "hybrid-engine launch: --num_nodes=2 without a hostfile" in capsys.readouterr().err
