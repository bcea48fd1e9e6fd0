"""docs/from-deepspeed.md: its scripts run as they stand, on two processes, with its command."""

import os
import re
import shlex

import pytest
from transformers import LlamaForCausalLM

from tests.support.distributed import free_port
from tests.support.fresh_python import executable, run_python
from tests.support.paths import DOCS

pytestmark = pytest.mark.long

PAGE = (DOCS / "from-deepspeed.md").read_text()
NAMES = ("train.py", "trainer.py")
SCRIPTS = dict(zip(NAMES, re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))
(COMMAND,) = re.findall(r"```\n(hybrid-engine .*?)\n```", PAGE)


def environment():
    """That of a shell which no launcher has started, on a machine without a GPU."""
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in torchrun} | {"CUDA_VISIBLE_DEVICES": ""}


def launch(name, folder):
    """Standard output of the page's command for the script."""
    (folder / name).write_text(SCRIPTS[name])
    program, verb, *arguments = shlex.split(COMMAND.replace("train.py", name))
    assert program == "hybrid-engine"
    command = ["-m", "hybrid_engine.cli.cli", verb, "--master_port", free_port(), *arguments]
    # PYTHON_EXEC is torchrun's variable for the interpreter that it starts.
    result = run_python(*command, cwd=folder, env={**environment(), "PYTHON_EXEC": executable()})
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_scripts_of_the_page_run_on_one_process_without_a_launcher(tmp_path):
    for name in NAMES:
        (tmp_path / name).write_text(SCRIPTS[name])
        result = run_python(name, cwd=tmp_path, env=environment())
        assert result.returncode == 0, result.stderr
        assert ("process 0 of 1" if name == "trainer.py" else "rank 0: torch.Size([64, 32])") in result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_script_of_the_page_runs_on_two_processes(tmp_path, name):
    output = launch(name, tmp_path)
    if name == "train.py":
        assert set(re.findall(r"rank (\d): torch.Size\(\[64, 32\]\)", output)) == {"0", "1"}
        assert (tmp_path / "checkpoints" / "latest").exists()
    else:
        assert set(re.findall(r"process (\d) of 2", output)) == {"0", "1"}
        assert LlamaForCausalLM.from_pretrained(tmp_path / "final").config.hidden_size == 32
