"""A process that waits for others says for whom, and an environment that contradicts itself is refused."""

import os
import time

import pytest
import torch.distributed as dist

from hybrid_engine.distributed import processes
from hybrid_engine.distributed.processes import announcing, describe_process
from tests.support.distributed import free_port

pytestmark = pytest.mark.quick


def environment(port, rank=0, size=3):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def read_until(capsys, text, seconds=300):
    """What was written to stderr, once `text` is in it."""
    end, seen = time.monotonic() + seconds, ""
    while text not in seen and time.monotonic() < end:
        time.sleep(0.02)
        seen += capsys.readouterr().err
    return seen


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(processes, "FIRST_AFTER", 0.2)


def test_who_waits_says_who_has_come_and_who_is_missing(at_once, capsys):
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    place = f"WORLD_SIZE=3 processes to meet at 127.0.0.1:{port}"
    with announcing(environment(port)):
        line = read_until(capsys, "missing: rank 1, 2")
        assert f"hybrid_engine: rank 0 has waited 0 s for {place}; 1 have come, missing: rank 1, 2\n" in line
        with announcing(environment(port, rank=2)):
            line = read_until(capsys, "rank 2 has waited").partition("rank 2 has waited")[2]
            assert line.splitlines()[0].endswith("2 have come, missing: rank 1")
    del server


def test_who_meets_nobody_says_so(at_once, capsys):
    port = free_port()
    with announcing(environment(port, rank=1)):
        assert f"127.0.0.1:{port}; nobody answers there, where rank 0 should" in read_until(capsys, "nobody answers")


def test_who_meets_at_an_init_method_says_so_too(at_once, capsys, tmp_path):
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    variables = {"RANK": "1", "WORLD_SIZE": "2"}
    with announcing(variables, f"tcp://127.0.0.1:{port}"):
        line = read_until(capsys, "missing: rank 0")
        assert f"rank 1 has waited 0 s for WORLD_SIZE=2 processes to meet at tcp://127.0.0.1:{port}; 1 have" in line
    with announcing(variables, f"file://{tmp_path}/meet"):
        assert f"to meet at file://{tmp_path}/meet; are all of them started" in read_until(capsys, "with this")
    del server


def test_who_does_not_wait_says_nothing(capsys):
    with announcing(environment(free_port())):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "5", "WORLD_SIZE": "1"}, "RANK=5 must be below WORLD_SIZE=1"),
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE='x' must be a whole number of at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "abc"}, "MASTER_PORT='abc' must be a whole number"),
        ({"RANK": "0"}, "RANK=0 is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set and RANK is not"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(variables, message):
    with pytest.raises(ValueError, match=message):
        describe_process(variables)


def test_what_is_right_is_taken_as_it_is():
    assert describe_process({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == {}
    assert describe_process({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == {}
    assert describe_process(dict.fromkeys(("HOME", "PATH"), os.sep)) == {}
