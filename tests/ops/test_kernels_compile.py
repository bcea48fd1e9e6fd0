"""Every kernel compiles for an H100 without one: here in its most demanding forms, by `make kernels` in all."""

import ast
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

FEW = {
    "attention": "all",
    "exact": "few",
    "gemm": "few",
    "linear_divergence": "few",
    "linear_log_prob": "few",
    "moe": "few",
    "sample": "few",
    "state": "few",
}
"""By the name of a script what it is told."""
KERNELS = """
    decode_kernel draw_kernel fixed_attention_kernel fixed_product_kernel gradient_kernel greedy_kernel
    latent_decode_kernel linear_kernel logprob_kernel merge_kernel norm_kernel norm_rows_kernel prefill_kernel
    qkv_kernel reduce_rows_kernel scan_kernel softmax_rows_kernel store_kernel sums_kernel up_kernel block_copy_kernel
    conv_prefill_kernel conv_step_kernel delta_chunks_kernel delta_step_kernel gated_norm_kernel
    space_chunks_kernel space_step_kernel
    divergence_gradient_kernel mixture_kernel totals_kernel
    _down_kernel _gating_kernel _mix_kernel _sort_kernel _sum_kernel _up_kernel
"""
# One process for all scripts: importing takes longer than compiling.
RUN = """
import runpy, sys
for path, argument in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    sys.argv = [path, argument]
    runpy.run_path(path, run_name="__main__")
"""


def test_kernels_compile_for_an_h100():
    backends = pytest.importorskip("triton.backends", reason="Triton does not exist for this platform").backends
    if "nvidia" not in backends:
        pytest.skip("this Triton was built without its NVIDIA backend")
    folder = ROOT / "tests/tools"
    assert {path.name for path in folder.glob("compile_*_kernels.py")} == {f"compile_{name}_kernels.py" for name in FEW}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    arguments = [part for name, told in FEW.items() for part in (folder / f"compile_{name}_kernels.py", told)]
    command = [sys.executable, "-c", RUN, *arguments]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-2000:]
    assert set(KERNELS.split()) <= set(result.stdout.split())


def test_no_tuple_of_a_kernel_holds_a_string():
    """Triton 3.6 cannot pass one on to another function: the field is a plain str there, and no constant."""
    files = sorted((ROOT / "ops").glob("*.py"))
    classes = [node for file in files for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    tuples = [node for node in classes if "NamedTuple" in map(ast.unparse, node.bases)]
    assert len(tuples) > 20
    fields = [field for node in tuples for field in node.body if isinstance(field, ast.AnnAssign)]
    assert [ast.unparse(field) for field in fields if ast.unparse(field.annotation) == "str"] == []
