"""Settings every test runs under: no network, few threads, and helpers beside the tests importable."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

# Before transformers or datasets are imported; spawned processes inherit it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# A job in the background of a script ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What models were probed is forgotten with the tests.
if "HYBRID_ENGINE_CACHE" not in os.environ:
    os.environ["HYBRID_ENGINE_CACHE"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["HYBRID_ENGINE_CACHE"], ignore_errors=True)
# Kernels are defined for Triton's interpreter where there is no GPU. Everything runs on the references all the
# same, unless a test asks for kernels (the `kernels` fixture): interpreted they are a thousand times slower.
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ and "TESTS_HAVE_GPU" in os.environ:
    # The process that deals the tests out has hidden the GPU from all that it starts, this one included.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if "TESTS_VISIBLE_GPUS" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TESTS_VISIBLE_GPUS"]
HAS_GPU = torch.cuda.is_available()
if HAS_GPU:
    # This process has seen its GPU; those that tests start see none and run on the CPU.
    torch.cuda.init()
    torch.cuda.device_count()
    os.environ["TESTS_HAVE_GPU"] = "1"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ["TESTS_VISIBLE_GPUS"] = os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("HYBRID_ENGINE_FALLBACK", "0")  # a kernel that does not compile fails the test
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("HYBRID_ENGINE_FALLBACK", "1")


# Files that take longest, in CPU time: dealt first, so that the processes of `make test` end together.
LONGEST = (
    "test_kernels_model",
    "test_parallel_generate",
    "test_parallel_models",
    "test_deepspeed_defects",
    "test_generate_distributed",
    "test_step3_like",
    "test_script_names",
    "test_compat",
    "test_trainer",
    "test_pipeline_stages",
    "test_parallel_checkpoints",
    "test_one_rank_fails",
    "test_serving_stages",
    "test_parallel_eager",
    "test_decode_graph",
    "test_torch_style_backward",
    "test_state_offload",
    "test_kernels_sample",
    "test_tensor_parallel",
    "test_zero_training",
    "test_layer_groups",
    "test_from_deepspeed",
    "test_launcher",
    "test_every_optimizer",
    "test_kernels_gemm",
    "test_kernels_moe",
    "test_kernels_softmax_context",
    "test_recipes_jobs",
    "test_engine_options",
    "test_checkpoint",
    "test_zero_init",
    "test_lora_duck",
    "test_deepspeed_scripts",
    "test_init_inference",
)


def pytest_runtest_logreport(report):
    """Tells each failure at once in the file TESTS_FAILURES: a run that its time limit ends tells none."""
    if report.failed and "TESTS_FAILURES" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ["TESTS_FAILURES"]).open("a") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext[-2000:]}\n\n")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish():
    """What is imported by now stays: collections need not search it, which takes each a quarter of a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Tests run on the CPU, where their tensors lie, unless they are marked `gpu` or ask for kernels."""
    wants_gpu = item.get_closest_marker("gpu") is not None or "kernels" in item.fixturenames
    torch.cuda.is_available = lambda: HAS_GPU and wants_gpu
    if "hybrid_engine.config.notices" in sys.modules:  # what one test has read, another must see
        sys.modules["hybrid_engine.config.notices"].say_once.cache_clear()


@pytest.fixture
def kernels(monkeypatch):
    """Ops run their Triton kernels in this test: compiled on a GPU, interpreted elsewhere."""
    pytest.importorskip("triton", reason="Triton does not exist for this platform")
    if not HAS_GPU:
        from tests.support.fast_interpreter import install

        install()
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    return torch.device("cuda" if HAS_GPU else "cpu")


# `from distributed import run_distributed`: spawned processes find a worker by its module, so the path must reach them.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "compat")]

# The tests' tensors are tiny: more threads than cores only make them wait for each other.
most = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(most, os.cpu_count() or 1))))
