"""Does everything work on this device? In two minutes on a GPU, each check by itself, the rest after one that fails.

    python benchmarks/gpu_smoke.py            # the first part of `make gpu`
    python benchmarks/gpu_smoke.py --only LoRA

Kernels are held against their references in fp64. Rollouts are held against the model's own forward pass: the mean
difference of log-probabilities, in fp32 by its rounding, in bf16 by what the rounding of 8 bits explains. Without a
GPU the references run in place of the kernels, and nothing is recorded.
"""

import argparse
import gc
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_decode import ROUNDING
from bench_ops import Case, attention_cases, check, linear_cases, small_cases
from common import DTYPES, synchronize
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hybrid_engine
from hybrid_engine.ops import token_logprobs
from hybrid_engine.ops.dispatch import SWITCH, use_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, PROMPT, NEW = 1024, 24, 40
# In fp32 the sums of kernels and of cuBLAS differ in their order only.
DIFFERENCE = {**ROUNDING, "float32": 1e-3}


class NotHereError(Exception):
    """A check that cannot be made on this machine, and why."""


def build_llama() -> LlamaForCausalLM:
    """Heads of 64, grouped; odd numbers of layers and columns are for the tests."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=VOCAB, max_position_embeddings=256))


def build_gpt2() -> GPT2LMHeadModel:
    """Layer norms, biases, transposed weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=256))


def build_engine(model: PreTrainedModel, dtype: str = "bfloat16", zero: dict | None = None, **generation: Any) -> Any:
    """An engine that trains with AdamW; RuntimeError if it would not generate on containers."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero or {"stage": 0},
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "initial_scale_power": 8},
        "hybrid_engine": {"enabled": True, "max_out_tokens": PROMPT + NEW, "print_latency": False} | generation,
    }
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    if engine.generator.fallback_reason is not None:
        raise RuntimeError(f"no containers: {engine.generator.fallback_reason}")
    return engine


def prompts(device: torch.device, rows: int = 5) -> torch.Tensor:
    """`[rows, PROMPT]`."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (rows, PROMPT), generator=generator).to(device)


def roll_out(engine: Any, **options: Any) -> Any:
    """Greedy, all NEW tokens, unless the options say otherwise."""
    options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0} | options
    ids = prompts(engine.device)
    return engine.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, seed=7, **options)


def compare_with_model(engine: Any, output: Any, dtype: str) -> str:
    """RuntimeError where the rollout's log-probabilities are not the model's."""
    with torch.no_grad():
        logits = engine.module(output.sequences).logits[:, PROMPT - 1 : -1]
    own = token_logprobs(logits, output.sequences[:, PROMPT:])
    difference = (own - output.logprobs).abs().mean().item()
    if not difference <= DIFFERENCE[dtype]:
        raise RuntimeError(f"log-probabilities are {difference:.3g} from the model's own on average")
    return f"{difference:.2g} from the model's log-probabilities"


def train_step(engine: Any, output: Any) -> float:
    """One step on the rollout; returns the loss."""
    engine.train()
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(input_ids=output.sequences[:4], labels=output.sequences[:4]).loss
        engine.backward(loss)
        engine.step()
    if not torch.isfinite(loss):
        raise RuntimeError(f"the loss is {loss.item()}")
    return loss.item()


def check_kernel(case: Case, dtype: torch.dtype) -> str:
    """The kernel's error against fp64 is the reference's own, within a factor of four."""
    with torch.no_grad():
        check(case, {"ours": case.ours}, dtype)
    is_kernel = use_triton(torch.empty(0, dtype=dtype, device=DEVICE))
    if DEVICE == "cuda" and not is_kernel:
        raise RuntimeError("the reference ran, not the kernel")
    return "kernel" if is_kernel else "reference"


def check_recorded_step(dtype: str) -> str:
    """Recorded steps give what steps give that are launched one by one, greedy and sampled, also after training."""
    recorded = build_engine(build_llama(), dtype).eval()
    launched = build_engine(build_llama(), dtype, enable_cuda_graph=False).eval()
    captures = 0
    for _ in range(2):
        for options in ({}, {"do_sample": True, "top_k": 0}, {"do_sample": True, "top_k": 50, "top_p": 0.9}):
            outputs = [roll_out(engine, **options) for engine in (recorded, launched)]
            captures += recorded.latency_stats()["graph_captures"]
            if dtype == "float32" and outputs[0].sequences.tolist() != outputs[1].sequences.tolist():
                raise RuntimeError(f"other tokens than steps launched one by one, {options}")
            compare_with_model(recorded, outputs[0], dtype) if not options else None
        for engine in (recorded, launched):
            train_step(engine, outputs[1])
            engine.eval()
    if DEVICE == "cpu":
        return "nothing is recorded on a CPU; equal tokens"
    if not captures:
        raise RuntimeError("nothing was recorded")
    return f"{captures:.0f} recordings"


def check_cycle(build: Callable[[], PreTrainedModel], dtype: str, **options: Any) -> str:
    """eval, generate, train, step, three times: the loss falls and each rollout is that of the weights there are."""
    engine = build_engine(build(), dtype, **options)
    first = engine.eval() and roll_out(engine)
    losses, said = [], compare_with_model(engine, first, dtype)
    for _ in range(3):
        losses.append(train_step(engine, first))
        engine.eval()
        said = compare_with_model(engine, roll_out(engine), dtype)
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"losses {losses} do not fall")
    return said


def check_lora(dtype: str) -> str:
    """An adapter on every linear: rollouts use it, training moves it, the base weights keep every bit."""
    if importlib.util.find_spec("peft") is None:
        raise NotHereError("peft is not installed")
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_llama(), LoraConfig(r=8, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    engine = build_engine(model, dtype)
    base = {n: p.detach().clone() for n, p in engine.module.named_parameters() if "lora_" not in n}
    said = check_trained_rollout(engine, dtype)
    changed = [n for n, p in engine.module.named_parameters() if n in base and not torch.equal(p, base[n])]
    if changed:
        raise RuntimeError(f"base weights have changed: {changed[:3]}")
    return said


def check_trained_rollout(engine: Any, dtype: str) -> str:
    """Rollout, step, rollout."""
    train_step(engine, engine.eval() and roll_out(engine))
    return compare_with_model(engine.eval(), roll_out(engine), dtype)


def check_offload(dtype: str) -> str:
    """Parameters, gradients and optimizer in the CPU's memory; then all states of an engine there and back."""
    place = {"device": "cpu"}
    offloaded = build_engine(build_llama(), dtype, {"stage": 3, "offload_param": place, "offload_optimizer": place})
    said = check_trained_rollout(offloaded, dtype)
    engine = build_engine(build_llama(), dtype)
    output = engine.eval() and roll_out(engine)
    train_step(engine, output)
    before = roll_out(engine.eval()).sequences
    synchronize(DEVICE)
    held = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    engine.offload_states()
    freed = held - torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    engine.reload_states()
    if roll_out(engine).sequences.tolist() != before.tolist():
        raise RuntimeError("other tokens after offload_states() and reload_states()")
    if DEVICE == "cuda" and freed <= 0:
        raise RuntimeError(f"offload_states() freed {freed} bytes of the device")
    return f"{said}; offload_states() freed {freed / 2**20:.0f} MiB"


def check_exact(dtype: str) -> str:
    """In exact mode the rollout's log-probabilities are the trainer's to the bit, before a step and after it."""
    engine = build_engine(build_llama(), dtype, exact=True)
    for _ in range(2):
        output = engine.eval() and roll_out(engine, do_sample=True, top_k=0)
        engine.train()
        logits = engine(input_ids=output.sequences).logits[:, PROMPT - 1 : -1]
        trained = token_logprobs(logits, output.sequences[:, PROMPT:])
        if not torch.equal(trained, output.logprobs):
            apart = (trained - output.logprobs).abs().max().item()
            raise RuntimeError(f"log-probabilities of rollout and trainer differ by {apart:.3g}")
        train_step(engine, output)
    return "equal to the bit"


def check_async_answers(dtype: str) -> str:
    """Groups of answers that a thread decodes have the tokens of `generate()`."""
    engine = build_engine(build_llama(), dtype).eval()
    expected = roll_out(engine).sequences[:, PROMPT:].tolist()
    ids = prompts(engine.device)
    options = {"do_sample": False, "min_new_tokens": NEW, "max_new_tokens": NEW, "pad_token_id": 0}
    with engine.generate_async(ids, torch.ones_like(ids), **options) as rollout:
        found = {group.index: group.answers[0].tokens for group in rollout}
    if sorted(found) != list(range(len(expected))):
        raise RuntimeError(f"answers to prompts {sorted(found)} alone")
    if dtype == "float32" and [found[i] for i in range(len(expected))] != expected:
        raise RuntimeError("other tokens than generate()'s")
    return f"{len(found)} answers"


def all_checks() -> list[tuple[str, Callable[[], str]]]:
    """By name, in the order in which they say most about those that follow."""
    checks: list[tuple[str, Callable[[], str]]] = []
    for name in ("bfloat16", "float32"):
        dtype = DTYPES[name]
        torch.manual_seed(0)
        cases = [c for build in (linear_cases, attention_cases, small_cases) for c in build(dtype, DEVICE, True)]
        checks += [(f"{case.name}, {name}", partial(check_kernel, case, dtype)) for case in cases]
    return [
        *checks,
        ("recorded step, float32", partial(check_recorded_step, "float32")),
        ("recorded step, bfloat16", partial(check_recorded_step, "bfloat16")),
        ("cycle of a Llama, bfloat16", partial(check_cycle, build_llama, "bfloat16")),
        ("cycle of a GPT-2, bfloat16", partial(check_cycle, build_gpt2, "bfloat16")),
        ("cycle at stage 3, bfloat16", partial(check_cycle, build_llama, "bfloat16", zero={"stage": 3})),
        (
            "cycle that gives its cache back",
            partial(check_cycle, build_llama, "bfloat16", release_inference_cache=True),
        ),
        ("LoRA, bfloat16", partial(check_lora, "bfloat16")),
        ("offload, bfloat16", partial(check_offload, "bfloat16")),
        ("cycle of a Llama, float16", partial(check_cycle, build_llama, "float16")),
        ("exact mode, float32", partial(check_exact, "float32")),
        ("exact mode, bfloat16", partial(check_exact, "bfloat16")),
        ("answers in the order in which they end, float32", partial(check_async_answers, "float32")),
    ]


def main() -> int:
    """Runs the checks; 1 when any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="checks whose name contains this")
    only, begun = parser.parse_args().only, time.perf_counter()
    os.environ.setdefault(SWITCH, "0")  # a reference in the place of a kernel that does not compile shows nothing
    chosen = [(name, run) for name, run in all_checks() if only in name]
    failed, skipped = [], 0
    for name, run in chosen:
        start = time.perf_counter()
        try:
            said = f"ok       {name}: {run()}"
            synchronize(DEVICE)
        except NotHereError as reason:
            said, skipped = f"skipped  {name}: {reason}", skipped + 1
        except Exception as error:  # the next check may well pass
            failed.append(name)
            traceback.print_exc(file=sys.stdout)
            said = f"FAILED   {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(f"{said} ({time.perf_counter() - start:.1f} s)", flush=True)
        gc.collect()
    passed, seconds = len(chosen) - len(failed) - skipped, time.perf_counter() - begun
    others = (f", {skipped} skipped" if skipped else "") + (f"; FAILED: {', '.join(failed)}" if failed else "")
    print(f"{passed} of {len(chosen)} checks passed on {DEVICE} in {seconds:.0f} s{others}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
