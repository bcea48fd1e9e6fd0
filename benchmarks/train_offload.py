"""Training and generating with parameters, gradients and optimizer state in the CPU's memory: bench_train.py --offload.

On a GPU the model has as many layers as make its state exceed the card: bf16 parameters and gradients, fp32 masters
and two moments. Without offload it is then expected to run out of memory.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from common import peak_memory, timed
from train_loops import Case, TrainShape, build_batch, build_model, engine_config

import hybrid_engine

STATE_BYTES = 2 + 2 + 4 + 4 + 4  # of a parameter
EXCESS = 1.05  # of that state over the card's memory
PROMPT_TOKENS = 8
NEW_TOKENS = 8
CASE = Case(processes=1, stage=3, dtype=torch.bfloat16)
WIDE = TrainShape(hidden=4096, layers=0, heads=32, kv_heads=32, intermediate=11_008, vocab=32_768,
                  sequence_tokens=1024, micro_batch=4, accumulation=2)  # fmt: skip


@dataclass
class Training:
    """What one engine did; `error` is why it did not get to the end."""

    losses: list[float] = field(default_factory=list)
    """Of each step, on the same tokens every time."""
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    """Greedy answers, after the steps."""
    peak_bytes: int = 0
    num_parameters: int = 0
    error: str = ""


def shape_for_card(device: str) -> TrainShape:
    """`WIDE` with as many layers as make its state exceed the card's memory."""
    total = torch.cuda.get_device_properties(device).total_memory
    layer = 4 * WIDE.hidden**2 + 3 * WIDE.hidden * WIDE.intermediate + 2 * WIDE.hidden
    outside = 2 * WIDE.vocab * WIDE.hidden + WIDE.hidden
    return dataclasses.replace(WIDE, layers=math.ceil((EXCESS * total / STATE_BYTES - outside) / layer))


def measure_training(offloads: bool, shape: TrainShape, device: str, steps: int) -> Training:
    """Trains `steps` steps and generates, with everything in the CPU's memory or with nothing."""
    training = Training()
    with peak_memory(device) as peak:
        try:
            _train(training, offloads, shape, device, steps)
        except torch.cuda.OutOfMemoryError:
            training.error = "out of memory"
    training.peak_bytes = peak.num_bytes
    return training


def _train(training: Training, offloads: bool, shape: TrainShape, device: str, steps: int) -> None:
    model = build_model(shape, "cpu", torch.bfloat16)
    training.num_parameters = sum(p.numel() for p in model.parameters())
    engine, *_ = hybrid_engine.initialize(model=model, config=offload_config(offloads, shape))
    batch = build_batch(shape, device, step=0, rank=0)
    for _ in range(steps):
        seconds, losses = timed(lambda: [train_micro_batch(engine, tokens) for tokens in batch], device)
        training.losses.append(torch.stack(losses).mean().item())
        training.seconds.append(seconds)
    engine.eval()
    answers = engine.generate(
        batch[0][:, :PROMPT_TOKENS], max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    training.tokens = answers[:, PROMPT_TOKENS:].tolist()


def train_micro_batch(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Its loss; the last one of a step ends it."""
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def offload_config(offloads: bool, shape: TrainShape) -> dict[str, Any]:
    """Stage 3 and a hybrid engine."""
    place = {"device": "cpu" if offloads else "none"}
    return {
        **engine_config(CASE, shape),
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "hybrid_engine": {"enabled": True, "max_out_tokens": PROMPT_TOKENS + NEW_TOKENS},
    }


def check(trainings: dict[str, Training]) -> None:
    """Raises RuntimeError unless what was offloaded learned its tokens, like what was not where that fits."""
    offloaded, kept = trainings["offloaded"], trainings["kept"]
    if offloaded.error or not offloaded.losses[-1] < offloaded.losses[0]:
        raise RuntimeError(f"with offload: losses {offloaded.losses} {offloaded.error}, they must fall")
    if kept.error:
        return
    difference = max(abs(a - b) / b for a, b in zip(offloaded.losses, kept.losses, strict=True))
    if difference > 1e-3:
        raise RuntimeError(f"with offload losses differ by {difference:.2g}: {offloaded.losses}, {kept.losses}")
