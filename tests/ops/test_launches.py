"""Kernels compile and launch by Triton's own compiler, binder and launcher, in ops and in an engine, without a GPU."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.fake_cuda import kernel_names
from tests.support.paths import ROOT

# In a process of its own, where kernels are not interpreted. The last kernel must fail, and by its name.
RUN = """
import itertools, sys
import torch, triton, triton.language as tl
from hybrid_engine.ops import dispatch
from tests.tools import launches

@triton.jit
def wrong_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr).there_is_no_such_method())

def launch_wrong_kernel():
    dispatch.Launch(wrong_kernel, (1,), torch.device("cpu"))(torch.zeros(4))

right = launches.short_checks
launches.short_checks = lambda: itertools.chain(right(), [("a wrong kernel", launch_wrong_kernel)])
sys.exit(launches.main(["--short"]))
"""
KERNELS = """
    conv_prefill_kernel conv_step_kernel delta_chunks_kernel delta_step_kernel gated_norm_kernel
    space_chunks_kernel space_step_kernel
    decode_kernel draw_kernel fixed_attention_kernel fixed_product_kernel gated_activation_kernel gradient_kernel
    greedy_kernel linear_kernel logprob_kernel norm_kernel norm_rows_kernel prefill_kernel qkv_kernel reduce_rows_kernel
    residual_add_kernel scan_kernel softmax_rows_kernel store_kernel sums_kernel up_kernel
    divergence_gradient_kernel mixture_kernel totals_kernel
    _down_kernel _gating_kernel _mix_kernel _sort_kernel _sum_kernel _up_kernel
"""


def test_an_engine_and_the_ops_launch_every_kernel_and_one_that_does_not_compile_fails_by_name(tmp_path):
    backends = pytest.importorskip("triton.backends", reason="Triton does not exist for this platform").backends
    if "nvidia" not in backends:
        pytest.skip("this Triton was built without its NVIDIA backend")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("there is no C compiler, which Triton's launcher needs too")
    program = tmp_path / "run.py"
    program.write_text(RUN)
    unwanted = ("TRITON_INTERPRET", "HYBRID_ENGINE_FALLBACK")
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    folders = [str(ROOT), str(ROOT / "benchmarks"), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=600)
    told = f"{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    assert result.returncode == 1, told
    assert result.stdout.endswith("1 checks failed: a wrong kernel\n1 kernels failed: wrong_kernel\n"), told
    # The columns: kernel, variants, seconds, launches.
    rows = re.findall(r"^\| (\w+) \| (\d+) \| [\d.]+ \| (\d+) \|", result.stdout, re.MULTILINE)
    counts = {kernel: (int(variants), int(launches)) for kernel, variants, launches in rows}
    assert set(KERNELS.split()) <= set(counts), told
    assert all(min(counts[kernel]) > 0 for kernel in KERNELS.split()), told


def test_kernels_that_the_table_must_have_are_those_of_all_ops():
    found = {
        name
        for path in (ROOT / "ops").glob("*.py")
        for name in re.findall(r"^@triton\.jit(?:\([^@]*\))?\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert kernel_names() == found >= set(KERNELS.split())
