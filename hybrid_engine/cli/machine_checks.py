"""The checks of `hybrid-engine doctor`: of this machine and installation, and with `--gpu` of the card's results.

Each check is a `Finding`. The text of a "missing" one says what needs it; the engine does not work with a "broken" one.
`examine` looks at versions, devices, kernels (run once), memory, limits, write access. `examine_gpu` checks in about a
minute that this card generates and trains correctly:

    the card            what kernels need of it and of its driver, and other processes with memory on it
    a decode layer      kernels compiled, run and compared with the model's own forward, in fp32 and bf16
    greedy tokens       those of a small model, compared with its own generate()
    log-probabilities   of sampled tokens, and of `linear_log_prob` with its gradients, compared with the logits
    a training step     the loss falls, and the next rollout uses the new weights
    decode bandwidth    bytes of weights that a decode step reads per second, compared with a copy

`doctor` without `--gpu` tries the layer alone, on each device. Weights are random: nothing is downloaded.
"""

import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_engine
from hybrid_engine.containers.device import host_memory_bytes
from hybrid_engine.engine.hybrid_engine import HybridEngine
from hybrid_engine.generation.output import GenerateOutput
from hybrid_engine.ops.cpu_library import cache_folder, load_library
from hybrid_engine.ops.dispatch import HAS_TRITON, IS_INTERPRETED, fallback_forced, replaced_kernels
from hybrid_engine.ops.gpu import GIB, foreign_memory_line, kernel_problem, why_no_gpu
from hybrid_engine.ops.linear_log_prob import linear_log_prob
from hybrid_engine.ops.norm import NormOp

PACKAGES = ("hybrid-engine", "torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors", "triton")
FEATURES = {
    "serving (hybrid-engine serve, agent)": ("starlette", "uvicorn", "pydantic", "prometheus-client"),
    "agents (hybrid-engine agent)": ("openai",),
    "texts guided by patterns or schemas": ("llguidance",),
    "rewards from mathematics (--reward math)": ("math-verify",),
    "TRL's trainers (attach)": ("trl",),
    "bases in 4 or 8 bits": ("bitsandbytes",),
    "bases in 8 bits as torchao loads them": ("torchao",),
    "curves in TensorBoard (--tracker tensorboard)": ("tensorboard",),
}
FEWEST_FILES = 4096
"""File descriptors below which many processes, data loader workers and clients of a server run out of them."""
SMALL_DISK = 1 << 30
KIND = "gpu"
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16)}
"""Dtypes in which a layer is tried, by kind of device."""
VOCAB, PROMPT_TOKENS, NEW_TOKENS = 1024, 24, 40
MOST_APART = 1e-3
"""Largest difference of log-probabilities and gradients in fp32, whose sums differ only in their order."""
LEAST_SHARE = 0.2
"""Least share of the bandwidth at one row of a model of a billion parameters; less means that steps are held up."""
ENGINE_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "hybrid_engine": {"enabled": True, "max_out_tokens": PROMPT_TOKENS + NEW_TOKENS, "print_latency": False},
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the result."""

    kind: str
    """"versions", "devices", "links", "kernels", "memory", "limits", "write access" or "features"."""
    name: str
    state: str
    """"ok", "missing" or "broken"."""
    text: str


def examine() -> list[Finding]:
    """Runs all checks, in the order of `Finding.kind`; compiles the kernels for this CPU if necessary."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions, _devices, _links, _kernels, _memory, _limits, _write_access, _features,
    )  # fmt: skip
    return [finding for check in checks for finding in check()]


def devices_to_try() -> list[torch.device]:
    """Returns the CPU and each GPU that kernels can run on."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device for device in (torch.device("cpu"), *gpus) if kernel_problem(device) is None]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    text = f"{platform.python_version()} on {platform.platform()}"
    yield Finding(kind="versions", name="python", state="ok", text=text)
    for package in PACKAGES:
        found = _version(package)
        is_needed = package != "triton" or sys.platform == "linux"
        state = "ok" if found else "broken" if is_needed else "missing"
        yield Finding(kind="versions", name=package, state=state, text=found or "is not installed")


def _devices() -> Iterator[Finding]:
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.machine()} with {capability}"
    yield Finding(kind="devices", name="cpu", state="ok", text=text)
    if not torch.cuda.is_available():
        text = why_no_gpu() or f"no GPU is seen (torch has {torch.version.cuda or 'no CUDA'})"
        yield Finding(kind="devices", name="cuda", state="missing", text=text)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        problem = kernel_problem(torch.device("cuda", index))
        state = "broken" if problem else "ok"
        yield Finding(kind="devices", name=f"cuda:{index}", state=state, text=f"{text}: {problem}" if problem else text)
        if line := foreign_memory_line(torch.device("cuda", index)):
            yield Finding(kind="devices", name=f"cuda:{index}", state="missing", text=line)


def _links() -> Iterator[Finding]:
    for name, is_there in (
        ("gloo", torch.distributed.is_gloo_available()),
        ("nccl", torch.distributed.is_nccl_available()),
    ):
        needed = name == "gloo" or torch.cuda.is_available()
        state = "ok" if is_there else "broken" if needed else "missing"
        text = "processes on CPUs meet through it" if name == "gloo" else "processes on GPUs meet through it"
        yield Finding(kind="links", name=name, state=state, text=text if is_there else f"is not there: {text}")
    count = torch.cuda.device_count()
    for first in range(count):
        for second in range(first + 1, count):
            is_direct = torch.cuda.can_device_access_peer(first, second)
            text = "direct" if is_direct else "through the host's memory, which is slow"
            state = "ok" if is_direct else "missing"
            yield Finding(kind="links", name=f"cuda:{first} to cuda:{second}", state=state, text=text)


def _kernels() -> Iterator[Finding]:
    if fallback_forced():
        text = "HYBRID_ENGINE_FALLBACK=1: torch operations are used instead"
        yield Finding(kind="kernels", name="all", state="missing", text=text)
        return
    if load_library() is None:
        text = "not compiled; torch operations are used instead, which is slower"
        yield Finding(kind="kernels", name="C, for the CPU", state="missing", text=text)
    else:
        yield _try_kernel("Triton, interpreted" if IS_INTERPRETED else "C, for the CPU", torch.device("cpu"))
    if not torch.cuda.is_available():
        return
    if not HAS_TRITON:
        text = "triton is not installed; torch operations are used instead"
        yield Finding(kind="kernels", name="Triton", state="missing", text=text)
        return
    for device in devices_to_try()[1:]:
        yield _try_kernel(f"Triton, on {device}", device)


def _try_kernel(name: str, device: torch.device) -> Finding:
    op = NormOp("rms", 1e-6)
    rows, weight = torch.randn(3, 64, device=device), torch.randn(64, device=device)
    try:
        apart = (op(rows, weight) - op.reference(rows, weight)).abs().max().item()
    except Exception as error:  # any error, of a compiler or a driver, is the finding
        return Finding(kind="kernels", name=name, state="broken", text=f"{type(error).__name__}: {error}")
    state = "ok" if apart <= 1e-4 else "broken"
    return Finding(kind="kernels", name=name, state=state, text=f"compiled and run once, {apart:.1e} from torch")


def _memory() -> Iterator[Finding]:
    free, total = host_memory_bytes()
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield Finding(kind="memory", name="host", state="ok", text=text)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        state = "ok" if free >= SMALL_DISK else "missing"
        text = f"{free / GIB:.1f} GiB free" + ("" if state == "ok" else ", little for data loader workers")
        yield Finding(kind="memory", name=str(shared), state=state, text=text)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft >= FEWEST_FILES or soft == resource.RLIM_INFINITY
    text = f"{soft}, at most {hard}" + ("" if is_enough else f"; raise it by `ulimit -n {FEWEST_FILES}`")
    yield Finding(kind="limits", name="file descriptors", state="ok" if is_enough else "missing", text=text)


def _write_access() -> Iterator[Finding]:
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    places = {
        "this folder": Path.cwd(),
        "temporary files": Path(tempfile.gettempdir()),
        "compiled kernels and verdicts": cache_folder("compiled"),
        "models of the hub": hub,
    }
    for name, folder in places.items():
        nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
        can_write = os.access(nearest, os.W_OK)
        free = shutil.disk_usage(nearest).free
        text = f"{folder}: {free / GIB:.1f} GiB free" if can_write else f"{folder} cannot be written to"
        state = "ok" if can_write and free >= SMALL_DISK else "missing" if can_write else "broken"
        yield Finding(kind="write access", name=name, state=state, text=text)


def _features() -> Iterator[Finding]:
    for feature, packages in FEATURES.items():
        absent = [package for package in packages if _version(package) is None]
        text = f"needs {', '.join(absent)}" if absent else ", ".join(f"{p} {_version(p)}" for p in packages)
        yield Finding(kind="features", name=feature, state="missing" if absent else "ok", text=text)


def examine_gpu() -> Iterator[Finding]:
    """Yields one finding after another, each as soon as it is known; ends after a card that cannot be used.

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"doctor --gpu: no GPU is seen: {why_no_gpu() or 'this machine has no NVIDIA driver'}")
    device = torch.device("cuda", torch.cuda.current_device())
    card = _card(device)
    yield card
    if card.state != "broken":
        yield from examine_device(device)


def examine_device(device: torch.device) -> Iterator[Finding]:
    """The same findings for any device, without the one about the card."""
    yield from try_layers(device)
    for name, check in (
        ("greedy tokens", greedy_tokens),
        ("log-probabilities", log_probabilities),
        ("a training step", training_step),
        ("decode bandwidth", decode_bandwidth),
    ):
        yield _finding(KIND, name, lambda check=check: check(device))  # type: ignore[misc]


def try_layers(device: torch.device, kind: str = KIND) -> Iterator[Finding]:
    """Tries a whole decode layer in each dtype of the device."""
    for dtype in DTYPES[device.type]:
        name = f"a decode layer in {str(dtype).removeprefix('torch.')}, on {device}"
        yield _finding(kind, name, lambda dtype=dtype: _try_layer(device, dtype))  # type: ignore[misc]


def _finding(kind: str, name: str, check: Callable[[], str]) -> Finding:
    """The finding of one check: the text that it returns, or its error."""
    start = time.perf_counter()
    try:
        text, state = check(), "ok"
        if replaced := replaced_kernels():
            text, state = "; ".join([*replaced, "torch operations are used instead of these kernels"]), "broken"
    except Exception as error:  # whatever the compiler, the driver or the engine raises is the finding
        text, state = f"{type(error).__name__}: {error}", "broken"
    return Finding(kind=kind, name=name, state=state, text=f"{text} ({time.perf_counter() - start:.1f} s)")


def _card(device: torch.device) -> Finding:
    free, total = torch.cuda.mem_get_info(device)
    text = f"{torch.cuda.get_device_name(device)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if problem := kernel_problem(device):
        return Finding(kind=KIND, name="the card", state="broken", text=problem)
    line = foreign_memory_line(device)
    return Finding(kind=KIND, name="the card", state="missing" if line else "ok", text=line or text)


def build_llama(device: torch.device, dtype: torch.dtype, hidden: int = 256, layers: int = 2) -> LlamaForCausalLM:
    """A Llama with random weights and heads of dimension 64; two query heads share one key/value head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "vocab_size": VOCAB}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=2048)).to(dtype).eval()


def _try_layer(device: torch.device, dtype: torch.dtype) -> str:
    """Compares containers with the model's forward as they are built; RuntimeError where no containers run."""
    attached = hybrid_engine.attach(build_llama(device, dtype, layers=1), max_out_tokens=256)
    difference = attached.logprob_difference
    assert attached.generator is not None and difference is not None
    if (reason := attached.generator.fallback_reason) is not None:
        raise RuntimeError(reason)
    return f"prefill and decode are {difference.mean:.1e} from the model's own forward in log-probability"


def _engine(device: torch.device) -> HybridEngine:
    """An engine for a small model in fp32."""
    engine = hybrid_engine.initialize(model=build_llama(device, torch.float32), config=ENGINE_CONFIG)[0]
    assert isinstance(engine, HybridEngine)
    return engine


def _prompts(device: torch.device, rows: int = 4) -> torch.Tensor:
    """Random token ids, `[rows, PROMPT_TOKENS]`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (rows, PROMPT_TOKENS), generator=generator).to(device)


def _compare_tokens(engine: HybridEngine, device: torch.device) -> tuple[torch.Tensor, int]:
    """A greedy rollout and its number of new tokens; RuntimeError where they differ from the model's own generate()."""
    ids = _prompts(device)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    found = engine.eval().generate(ids, attention_mask=torch.ones_like(ids), **options)
    with torch.no_grad():
        expected = engine.generator.own.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert isinstance(found, torch.Tensor)
    if (wrong := int((found != expected).sum())) > 0:
        raise RuntimeError(f"{wrong} of {found[:, PROMPT_TOKENS:].numel()} tokens are not those of generate()")
    return found, found[:, PROMPT_TOKENS:].numel()


def greedy_tokens(device: torch.device) -> str:
    """Checks a greedy rollout in fp32; RuntimeError where it differs from the model's own."""
    engine = _engine(device)
    if (reason := engine.generator.fallback_reason) is not None:
        raise RuntimeError(reason)
    return f"{_compare_tokens(engine, device)[1]} tokens are those of the model's own generate()"


def log_probabilities(device: torch.device) -> str:
    """Checks log-probabilities; RuntimeError where a sampled rollout or `linear_log_prob` differs from the logits."""
    engine, ids = _engine(device).eval(), _prompts(device)
    options = {"do_sample": True, "top_k": 50, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    output = engine.generate(ids, attention_mask=torch.ones_like(ids), seed=7, pad_token_id=0, **options)
    assert isinstance(output, GenerateOutput)
    with torch.no_grad():
        logits = engine.module(output.sequences).logits[:, PROMPT_TOKENS - 1 : -1]
    assert output.sequences is not None and output.logprobs is not None
    own = logits.float().log_softmax(-1).gather(-1, output.sequences[:, PROMPT_TOKENS:, None]).squeeze(-1)
    apart = (torch.where(output.logprobs == 0, own, output.logprobs) - own).abs().max().item()
    apart = max(apart, _linear_log_prob_difference(device))
    if not apart <= MOST_APART:
        raise RuntimeError(f"they are {apart:.1e} from those of the logits, more than {MOST_APART:.0e}")
    return f"at most {apart:.1e} from those of the logits"


def _linear_log_prob_difference(device: torch.device) -> float:
    """The largest difference of log-probabilities and gradients in fp32 from torch's own in fp64."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, device=device).div_(8).requires_grad_() for rows in (100, 1000))
    targets = torch.arange(100, device=device) * 7
    logprobs = linear_log_prob(hidden, weight, targets).logprobs
    expected = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    found = [logprobs, *torch.autograd.grad(logprobs.sum(), (hidden, weight))]
    right = [expected, *torch.autograd.grad(expected.sum(), (hidden, weight))]
    return max((one - other).abs().max().item() for one, other in zip(found, right, strict=True))


def training_step(device: torch.device) -> str:
    """Trains two steps; RuntimeError where the loss does not fall or the next rollout uses other weights."""
    engine = _engine(device)
    sequences, losses = _compare_tokens(engine, device)[0], []
    engine.train()
    for _ in range(2):
        loss = engine(input_ids=sequences, labels=sequences).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if not losses[1] < losses[0]:
        raise RuntimeError(f"the loss does not fall: {losses[0]:.4f}, then {losses[1]:.4f}")
    _compare_tokens(engine, device)
    return f"loss {losses[0]:.4f}, then {losses[1]:.4f}; the rollout after it is that of the new weights"


def decode_bandwidth(device: torch.device) -> str:
    """Measures a decode step; RuntimeError where it reads weights at less than LEAST_SHARE of a copy's bandwidth."""
    hidden, layers = (2048, 16) if device.type == "cuda" else (256, 2)
    dtype = DTYPES[device.type][-1]
    model = build_llama(device, dtype, hidden, layers)
    weights = sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
    config = {"train_batch_size": 1, "bf16": {"enabled": dtype is torch.bfloat16}, "hybrid_engine": {"enabled": True}}
    engine = hybrid_engine.initialize(model=model, config=config)[0].eval()
    assert isinstance(engine, HybridEngine)
    step, copied = _seconds_per_step(engine, device), _copied_bytes_per_second(device)
    share = weights / step / copied
    text = f"{share:.2f} of the {copied / 1e12:.2f} TB/s that a copy reaches: {step * 1e3:.2f} ms a step at one row"
    if device.type == "cuda" and share < LEAST_SHARE:
        raise RuntimeError(f"{text}; at least {LEAST_SHARE} is expected, see docs/gpu.md")
    return text


def _seconds_per_step(engine: HybridEngine, device: torch.device) -> float:
    """Median seconds of a decode step over three rollouts of one row, after one that compiles and captures graphs."""
    ids, seconds = _prompts(device, 1), []
    for number in range(4):
        engine.latency.begin()
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        engine.generate(ids, attention_mask=torch.ones_like(ids), **options)
        if number:
            stats = engine.latency_stats()
            seconds.append((stats["decode_seconds"] - stats["graph_capture_seconds"]) / (NEW_TOKENS - 1))
    return statistics.median(seconds)


def _copied_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written per second in the fastest of three copies of 1 GiB (64 MiB on a CPU)."""
    source = torch.ones(GIB if device.type == "cuda" else GIB // 16, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(4):
        _wait_for(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / min(seconds[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
