"""A recipe's process keeps the memory that it frees, and its threads do not spin, unless its user says otherwise."""

import os
import subprocess
import sys

import pytest

from hybrid_engine.cli import cli

PROGRAM = """
import ctypes, importlib.util, resource, sys

spec = importlib.util.spec_from_file_location("freed_memory", sys.argv[1])
freed_memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(freed_memory)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


def pages_of_a_pass():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(8 * 2**20) for _ in range(20)]
    for block in blocks:
        ctypes.memset(block, 1, 8 * 2**20)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


pages_of_a_pass()
by_itself = pages_of_a_pass()
is_kept = freed_memory.keep_freed_memory()
pages_of_a_pass()
print(is_kept, by_itself, pages_of_a_pass())
"""


def run_program(**environment):
    command = [sys.executable, "-c", PROGRAM, cli.__file__]
    clean = {name: value for name, value in os.environ.items() if name not in cli.SETTINGS}
    output = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=True).stdout.split()
    return output[0] == "True", int(output[1]), int(output[2])


def has_glibc():
    return "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})


@pytest.mark.skipif(not has_glibc(), reason="the C library is not glibc")
def test_memory_that_was_freed_is_not_fetched_again():
    is_kept, by_itself, kept = run_program()
    assert is_kept
    assert by_itself > 100
    assert kept < by_itself / 10


def test_what_the_user_has_set_stays():
    assert not run_program(MALLOC_TOP_PAD_="131072")[0]


def test_a_c_library_without_such_a_setting_is_left_alone(monkeypatch):
    monkeypatch.setattr(cli.ctypes, "CDLL", lambda name: object())
    for name in cli.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert not cli.keep_freed_memory()


WAITING = """
import importlib.util, subprocess, sys

spec = importlib.util.spec_from_file_location("command", sys.argv[1])
command = importlib.util.module_from_spec(spec)
spec.loader.exec_module(command)
is_changed = command.share_processors()
import torch
a = torch.ones(2**20)
torch.set_num_threads(2)
(a + a).sum()
print(is_changed, command.share_processors())
"""


def settings_of_openmp(**environment):
    """What the program prints, and what GNU OpenMP says that it read, which it tells on stderr when it is loaded."""
    clean = {name: value for name, value in os.environ.items() if name not in cli.WAIT_SETTINGS}
    command, told = [sys.executable, "-c", WAITING, cli.__file__], {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run(command, env=clean | told | environment, capture_output=True, text=True, check=True)
    return done.stdout.split(), done.stderr


def test_threads_that_wait_for_each_other_sleep_soon():
    printed, read = settings_of_openmp()
    assert printed == ["True", "False"]  # torch has read it by the second call
    assert f"GOMP_SPINCOUNT = '{cli.MOST_SPINS}'" in read


def test_how_threads_wait_stays_as_the_user_has_set_it():
    printed, read = settings_of_openmp(OMP_WAIT_POLICY="PASSIVE")
    assert printed == ["False", "False"]
    assert "GOMP_SPINCOUNT = '0'" in read
