"""Scripts that import deepspeed run as they stand, on one process and on several."""

import json
import os
import re
import subprocess
import sys

import pytest

from hybrid_engine.extensions.deepspeed import deepspeed_names
from hybrid_engine.extensions.deepspeed.deepspeed_names import VERSION
from tests.support.distributed import free_port
from tests.support.fresh_python import run_python

pytestmark = pytest.mark.long

SHOW = """
import importlib.metadata, json, multiprocessing, sys
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import is_deepspeed_available
from accelerate.utils import is_deepspeed_available as accelerate_has_it

def child(queue):
    import deepspeed.zero
    queue.put(deepspeed.zero.Init.__module__)

if __name__ == "__main__":
    assert is_deepspeed_available() and accelerate_has_it()
    kept = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": 1})
    import deepspeed
    from deepspeed.pipe import PipelineModule
    assert is_deepspeed_zero3_enabled(), "importing deepspeed has forgotten the config"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    versions = importlib.metadata.version("deepspeed"), deepspeed.__version__
    print(json.dumps([sys.argv, __file__, sys.path[0], versions, queue.get(timeout=300), sys.flags.utf8_mode]))
    process.join()
"""


def environment():
    """That of a shell which no launcher has started, on a machine without a GPU."""
    shell = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**shell, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(folder, *arguments, flags=(), **variables):
    command = [sys.executable, *flags, "-m", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**environment(), **variables},
        timeout=300,
    )


def test_a_script_sees_deepspeed_and_itself_as_without_us(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    result = run(
        tmp_path,
        "hybrid_engine.extensions.deepspeed.deepspeed_names",
        "show.py",
        "--lr=1",
        "-m",
        flags=["-X", "utf8"],
        PYTHONPATH="x",
    )
    assert result.returncode == 0, result.stderr
    arguments, file, first, versions, child, utf8 = json.loads(result.stdout)
    assert (arguments, file, first) == (["show.py", "--lr=1", "-m"], str(tmp_path / "show.py"), str(tmp_path))
    assert versions == [VERSION, VERSION] and child.startswith("hybrid_engine.") and utf8


def test_a_module_runs_and_an_error_has_its_own_traceback_and_status(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "task.py").write_text("import deepspeed, sys\nraise KeyError(sys.argv[1:])\n")
    result = run(tmp_path, "hybrid_engine.extensions.deepspeed.deepspeed_names", "-m", "package.task", "a")
    assert result.returncode == 1 and result.stderr.endswith("KeyError: ['a']\n")
    assert f'File "{tmp_path}/package/task.py", line 2, in <module>' in result.stderr
    assert "hybrid_engine" not in result.stderr


def test_nothing_to_run_is_one_line(capsys):
    for arguments in ([], ["-m"]):
        assert deepspeed_names.main(arguments) == 2
        assert capsys.readouterr().err == f"{deepspeed_names.USAGE}\n"


def test_the_folder_on_the_path_has_the_version_of_the_names():
    (metadata,) = deepspeed_names.FOLDER.glob("*.dist-info/METADATA")
    assert metadata.parent.name == f"deepspeed-{VERSION}.dist-info" and f"Version: {VERSION}\n" in metadata.read_text()


@pytest.mark.parametrize("before", ["", "a", os.pathsep.join(["a", str(deepspeed_names.FOLDER)])])
def test_the_folder_comes_first_and_once(before):
    paths = deepspeed_names.environment_with_names({"PYTHONPATH": before})["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(deepspeed_names.FOLDER), *(["a"] if before else [])]


TRAIN = """
import argparse
import deepspeed, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).view(-1)

    def forward_value(self, x):
        return self(x).view(-1, 1)

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
config = {
    "train_batch_size": 2,
    "optimizer": {"type": "Adam"},
    "my_note": 1,
    "zero_optimization": {"stage": 3, "overlap_comm": True},
}
for stage in (1, 3):
    torch.manual_seed(0)
    config["zero_optimization"]["stage"] = stage
    engine, *_ = deepspeed.initialize(model=Model(), config=config)
    for forward in (engine, engine.forward_value) * 2:
        out = forward(torch.ones(1, 4, device=engine.device))
        out *= 2.0  # in place, of a view
        engine.backward(out.mean())
        engine.step()
    print(f"rank {deepspeed.comm.get_rank()} of {deepspeed.comm.get_world_size()}, {args.local_rank}: {out.item():.5f}")
"""


def losses(result):
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr and "view" not in result.stderr, result.stderr
    return sorted(re.findall(r"rank (\d of \d, \w+): (-?\d+\.\d{5})", result.stdout))


def test_two_processes_train_as_one_does_and_one_of_them_says_once_what_has_no_effect(tmp_path):
    """Also where outputs are views that are changed in place, which FSDP2 warns of."""
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ["--deepspeed-names", "--num_gpus", "2", "--master_port", str(free_port())]
    result = run(tmp_path, "hybrid_engine.cli.cli", "launch", *flags, "train.py")
    ranks, values = zip(*losses(result), strict=True)
    assert ranks == ("0 of 2, 0", "0 of 2, 0", "1 of 2, 1", "1 of 2, 1")
    with_names = "import hybrid_engine\nhybrid_engine.enable_compat()\n"
    alone = [value for _, value in losses(run_python("-c", with_names + TRAIN, env=environment()))]
    assert len(set(values)) == 1 and set(alone) == set(values)
    said = [line for line in result.stderr.splitlines() if "without effect" in line]
    assert len(said) == 1 and "my_note (unknown to DeepSpeed too)" in said[0] and "overlap_comm" in said[0]
