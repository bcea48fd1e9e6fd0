"""One PPO step, rollout and update: our engine against transformers' `generate()` and a plain PyTorch loop.

    python benchmarks/bench_ppo_step.py             # on a GPU: a Llama of 1.2B parameters, bf16 with fp32 masters
    python benchmarks/bench_ppo_step.py --threads 2

Both sample answers of a fixed length to the same prompts, then take one optimizer step on them under PPO's clipped
loss, in the same micro-batches, with the same AdamW in fp32. The advantages are noise: they change no time. The engine
keeps the log-probabilities of the rollout; the plain loop computes them by a forward pass, as one must who samples with
`generate()`. Before anything is timed the engine's are compared with its own trainer's. They take turns.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from bench_decode import ROUNDING
from common import (
    DTYPES,
    LlamaShape,
    add_shape_options,
    append_rows,
    chosen_shape,
    environment,
    llama_config,
    parse_run,
    peak_memory,
    run_options,
    synchronize,
    timed,
)
from torch import nn
from train_loops import ADAM, CLIPPING, Case, PlainLoop, PlainMastersLoop
from transformers import LlamaForCausalLM

import hybrid_engine
from hybrid_engine.ops import token_logprobs
from hybrid_engine.rl.losses import ppo_policy_loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape(LlamaShape):
    """A Llama, a batch of prompts and how it is cut."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    micro_batch: int


FULL = StepShape(hidden=384, layers=6, heads=6, kv_heads=6, intermediate=1024, vocab=8192, prompts=16, prompt_tokens=64,
                 new_tokens=64, micro_batch=8)  # fmt: skip
SMALL = StepShape(hidden=64, layers=2, heads=4, kv_heads=4, intermediate=128, vocab=512, prompts=4, prompt_tokens=8,
                  new_tokens=12, micro_batch=2)  # fmt: skip
CUDA = StepShape(hidden=2048, layers=20, heads=16, kv_heads=16, intermediate=5504, vocab=32_768, prompts=64,
                 prompt_tokens=256, new_tokens=256, micro_batch=16)  # fmt: skip


def response_logprobs(logits: torch.Tensor, sequences: torch.Tensor, shape: StepShape) -> torch.Tensor:
    """`[B, T]` of the answers, from logits at every position."""
    return token_logprobs(logits[:, shape.prompt_tokens - 1 : -1], sequences[:, shape.prompt_tokens :])


def policy_losses(
    forward: Callable[[torch.Tensor], torch.Tensor], sequences: torch.Tensor, old: torch.Tensor, shape: StepShape
) -> Any:
    """PPO's loss of each micro-batch in turn."""
    noise = torch.Generator().manual_seed(3)
    advantages = torch.randn(old.shape, generator=noise).to(old.device)
    for part, old_part, advantage in zip(
        *(tensor.split(shape.micro_batch) for tensor in (sequences, old, advantages)), strict=True
    ):
        logprobs = response_logprobs(forward(part), part, shape)
        yield ppo_policy_loss(logprobs, old_part, advantage).mean()


def sampling(shape: StepShape) -> dict[str, Any]:
    """Plain sampling, all tokens of every answer."""
    length = shape.new_tokens
    return {"do_sample": True, "top_k": 0, "min_new_tokens": length, "max_new_tokens": length, "pad_token_id": 0}


class EngineStep:
    """Our engine."""

    name = "engine"

    def __init__(self, model: LlamaForCausalLM, dtype: str, shape: StepShape):
        config = {
            "train_micro_batch_size_per_gpu": shape.micro_batch,
            "gradient_accumulation_steps": shape.prompts // shape.micro_batch,
            "gradient_clipping": CLIPPING,
            "bf16": {"enabled": dtype == "bfloat16"},
            "fp16": {"enabled": dtype == "float16"},
            "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
            "hybrid_engine": {
                "enabled": True, "print_latency": False, "max_out_tokens": shape.prompt_tokens + shape.new_tokens,
            },
        }  # fmt: skip
        self.engine: Any
        self.engine, *_ = hybrid_engine.initialize(model=model, config=config)
        if self.engine.generator.fallback_reason is not None:
            raise RuntimeError(f"no containers: {self.engine.generator.fallback_reason}")
        self.shape = shape

    def roll_out(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences and the log-probabilities of the answers."""
        self.engine.eval()
        output = self.engine.generate(
            prompts, torch.ones_like(prompts), return_dict_in_generate=True, **sampling(self.shape)
        )
        return output.sequences, output.logprobs

    def update(self, sequences: torch.Tensor, old: torch.Tensor) -> None:
        """One optimizer step."""
        self.engine.train()
        for loss in policy_losses(lambda ids: self.engine(input_ids=ids).logits, sequences, old, self.shape):
            self.engine.backward(loss)
            self.engine.step()


class PlainStep:
    """transformers and PyTorch alone."""

    name = "transformers"

    def __init__(self, model: LlamaForCausalLM, dtype: str, shape: StepShape):
        case = Case(processes=1, stage=0, dtype=DTYPES[dtype])
        kind = PlainLoop if dtype == "float32" else PlainMastersLoop
        self.loop, self.model, self.shape = kind(model, case, shape), model, shape  # type: ignore[arg-type]

    def roll_out(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences, and the log-probabilities of the answers by a forward pass."""
        self.model.eval()
        with torch.no_grad():
            sequences = self.model.generate(prompts, attention_mask=torch.ones_like(prompts), **sampling(self.shape))
            parts = sequences.split(self.shape.micro_batch)
            old = [response_logprobs(self.model(part, use_cache=False).logits, part, self.shape) for part in parts]
        return sequences, torch.cat(old)

    def update(self, sequences: torch.Tensor, old: torch.Tensor) -> None:
        """One optimizer step."""
        self.model.train()
        num_parts = self.shape.prompts // self.shape.micro_batch
        for loss in policy_losses(lambda ids: self.model(ids, use_cache=False).logits, sequences, old, self.shape):
            (loss / num_parts).backward()
            if isinstance(self.loop, PlainMastersLoop):
                self.loop.move_gradients()
        stepped = self.loop.masters if isinstance(self.loop, PlainMastersLoop) else list(self.model.parameters())
        nn.utils.clip_grad_norm_(stepped, CLIPPING)
        self.loop.optimizer.step()
        self.loop.optimizer.zero_grad()
        if isinstance(self.loop, PlainMastersLoop):
            with torch.no_grad():
                torch._foreach_copy_(self.loop.params, self.loop.masters)


def build_model(shape: StepShape, dtype: str, device: str) -> LlamaForCausalLM:
    """The same random weights at every call, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(llama_config(shape, shape.prompt_tokens + shape.new_tokens))
    return model.to(DTYPES[dtype])


def check(step: EngineStep, prompts: torch.Tensor, dtype: str, shape: StepShape) -> None:
    """RuntimeError where the rollout's log-probabilities are not the trainer's."""
    sequences, logprobs = step.roll_out(prompts)
    with torch.no_grad():
        own = response_logprobs(step.engine.module(sequences[: shape.micro_batch]).logits,
                                sequences[: shape.micro_batch], shape)  # fmt: skip
    difference = (own - logprobs[: shape.micro_batch]).abs().mean().item()
    print(f"log-probabilities of rollout and trainer are {difference:.2g} apart on average")
    if not difference <= ROUNDING[dtype]:
        raise RuntimeError(f"they are {difference:.3g} apart")


def measure(step: Any, prompts: torch.Tensor, device: str) -> tuple[float, float, int]:
    """Seconds of the rollout and of the update, and the most memory of the device above what lay there before."""
    with peak_memory(device) as peak:
        generating, (sequences, old) = timed(lambda: step.roll_out(prompts), device)
        training, _ = timed(lambda: step.update(sequences, old), device)
    return generating, training, peak.num_bytes


def parse_arguments() -> tuple[argparse.Namespace, StepShape]:
    """The command line."""
    parser = run_options(__doc__, repeats=3)
    is_cuda = torch.cuda.is_available()
    add_shape_options(parser, CUDA if is_cuda else FULL, SMALL)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if is_cuda else "float32")
    args = parse_run(parser, "ppo_step")
    shape = chosen_shape(args, CUDA if is_cuda else FULL, SMALL)
    if shape.prompts % shape.micro_batch:
        parser.error(f"--prompts={shape.prompts} must be a multiple of --micro-batch={shape.micro_batch}")
    return args, shape


def main() -> int:
    """Measures, prints, writes."""
    args, shape = parse_arguments()
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, shape.vocab, (shape.prompts, shape.prompt_tokens), generator=generator).to(args.device)
    ours = EngineStep(build_model(shape, args.dtype, args.device), args.dtype, shape)
    check(ours, prompts, args.dtype, shape)
    theirs = PlainStep(build_model(shape, args.dtype, args.device), args.dtype, shape)
    times: dict[str, list[tuple[float, float, int]]] = {ours.name: [], theirs.name: []}
    for repeat in range(args.repeats + 1):
        for step in (ours, theirs) if repeat % 2 else (theirs, ours):
            found = measure(step, prompts, args.device)
            print(f"{step.name}: rollout {found[0]:.3f} s, update {found[1]:.3f} s", flush=True)
            if repeat:  # the first one warms up
                times[step.name].append(found)
    synchronize(args.device)
    totals = {name: statistics.median(g + t for g, t, _ in runs) for name, runs in times.items()}
    rows = []
    for name, runs in times.items():
        row = {
            **vars(shape), "dtype": args.dtype, "way": name,
            "rollout_seconds": round(statistics.median(g for g, _, _ in runs), 4),
            "update_seconds": round(statistics.median(t for _, t, _ in runs), 4),
            "step_seconds": round(totals[name], 4), "peak_bytes": max(peak for _, _, peak in runs),
            "times_transformers": round(totals[theirs.name] / totals[name], 3),
        }  # fmt: skip
        rows.append(row)
        print(f"{name}: {row['step_seconds']} s a step ({row['rollout_seconds']} rollout, {row['update_seconds']} "
              f"update), {row['times_transformers']} times transformers")  # fmt: skip
    append_rows(args.csv, [row | environment(args.device) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
