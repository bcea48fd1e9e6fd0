"""`hybrid-engine doctor --gpu`: checks in about a minute that this card generates and trains correctly.

    the card            what kernels need of it and of its driver, and other processes with memory on it
    a decode layer      kernels compiled, run and compared with the model's own forward, in fp32 and bf16
    greedy tokens       those of a small model, compared with its own generate()
    log-probabilities   of sampled tokens, and of `linear_log_prob` with its gradients, compared with the logits
    a training step     the loss falls, and the next rollout uses the new weights
    decode bandwidth    bytes of weights that a decode step reads per second, compared with a copy

`doctor` without `--gpu` tries the layer alone, on each device. Weights are random: nothing is downloaded.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_engine
from hybrid_engine.engine.hybrid_engine import HybridEngine
from hybrid_engine.generation.output import GenerateOutput
from hybrid_engine.metrics.health import Finding
from hybrid_engine.ops.dispatch import replaced_kernels
from hybrid_engine.ops.gpu import GIB, foreign_memory_line, kernel_problem, why_no_gpu
from hybrid_engine.ops.linear_log_prob import linear_log_prob

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
