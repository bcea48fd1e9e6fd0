"""Settings every test runs under: no network, few threads, and helpers beside the tests importable."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from contextlib import nullcontext
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


WHOLE_FILES = ("quick", "torch_versions")
"""Markers of whole files: the others need not be imported to be left out."""


def pytest_ignore_collect(collection_path, config):
    marker = config.option.markexpr
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and marker in WHOLE_FILES and f"mark.{marker}" not in collection_path.read_text() else None


def pytest_runtest_logreport(report):
    """Tells each failure at once in the file TESTS_FAILURES: a run that its time limit ends tells none."""
    if report.failed and "TESTS_FAILURES" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ["TESTS_FAILURES"]).open("a") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext[-2000:]}\n\n")


def pytest_collection_modifyitems(items):
    """Tests that ask for `kernels` get its marker. Long files are dealt first, so that all processes end together."""
    for item in items:
        if "kernels" in item.fixturenames:
            item.add_marker("kernels")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """What is imported by now stays: collections need not search it, which takes each a quarter of a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Tests run on the CPU, where their tensors lie, unless they are marked `gpu` or `kernels`."""
    wants_gpu = any(item.get_closest_marker(name) is not None for name in ("gpu", "kernels"))
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


@pytest.fixture
def compiled(monkeypatch):
    """Ops run their compiled functions for CPUs, or the test is skipped."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler cc")
    monkeypatch.setenv("HYBRID_ENGINE_FALLBACK", "0")
    from hybrid_engine.ops import dispatch

    monkeypatch.setattr(dispatch, "HAS_TRITON", False)


@pytest.fixture
def on_kernels(kernels):
    """The same, and tensors that are made without a device are made where kernels run."""
    with kernels if HAS_GPU else nullcontext():
        yield


# Processes that tests start find a worker by its module, `tests.<room>.test_<file>`, so the path must reach them.
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/integration/step3")]

# The tests' tensors are tiny: more threads than cores only make them wait for each other.
most = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", min(most, os.cpu_count() or 1))))
