"""What the eager lowering costs on one process: training steps of a Llama, plain and parallelised, side by side.

    python benchmarks/bench_eager.py                # a Llama of 17M parameters, 16 x 256 tokens, fp32
    python benchmarks/bench_eager.py --small

A step is forward, backward and Adam. Losses and weights are compared to the bit before anything is timed; then steps of
both alternate. Seconds are of the processor, so that others on the machine count little.
"""

import statistics
import tempfile
import time
from collections.abc import Callable

import common
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from hybrid_engine.parallel.compute_config import ComputeConfig
from hybrid_engine.parallel.optimizer import build_optimizer
from hybrid_engine.parallel.parallelize import parallelize

TOKENS = {"full": (16, 256), "small": (2, 32)}


def stepper(module: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Callable[[], float]:
    """Makes one step of training and gives the loss."""

    def step() -> float:
        optimizer.zero_grad()
        loss = module(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def main() -> None:
    options = common.parse_run(common.run_options(__doc__), "eager")
    name = "small" if options.small else "full"
    shape = common.SMALL if options.small else common.FULL
    torch.manual_seed(0)
    model = LlamaForCausalLM(common.llama_config(shape, TOKENS[name][1]))
    ids = torch.randint(0, shape.vocab, TOKENS[name])
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, lowering="eager")
    with tempfile.TemporaryDirectory() as folder:
        eager = parallelize(
            model, {"input_ids": ids, "labels": ids, "use_cache": False}, "dp", config, gen_savedir=folder
        )
    steps = {
        "plain": stepper(model, torch.optim.Adam(model.parameters(), lr=1e-4), ids),
        "eager": stepper(eager, build_optimizer(eager, torch.optim.Adam, lr=1e-4), ids),
    }
    losses = {kind: step() for kind, step in steps.items()}
    assert losses["plain"] == losses["eager"], f"{losses=}"
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other), "weights after a step"
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(options.repeats):
        for kind, step in steps.items():
            start = time.process_time()
            step()
            seconds[kind].append(time.process_time() - start)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    ratio = medians["eager"] / medians["plain"]
    print(f"plain {medians['plain']:.3f} s, eager {medians['eager']:.3f} s a step, ratio {ratio:.4f}")
    rows = [
        {
            "lowering": kind,
            "shape": name,
            "tokens": ids.numel(),
            "step_s": round(value, 4),
            "ratio": round(value / medians["plain"], 4),
        }
        | common.environment("cpu")
        for kind, value in medians.items()
    ]
    common.append_rows(options.csv, rows)


if __name__ == "__main__":
    main()
