"""Peak memory of training steps under plans, as the planner predicts it and as it is.

    python benchmarks/bench_plan_memory.py          # a Llama of 30M parameters, 4 x 128 tokens, fp32, on the CPU
    python benchmarks/bench_plan_memory.py --small

What is measured are the bytes of tensors that ops made and that are there at once, at most, from before the module is
built until after its second step of Adam, on real processes. What an op allocates and frees inside itself, buffers of
gloo and waste of the allocator are not in it. Each case runs in fresh processes; of several the largest counts.
"""

import tempfile
from dataclasses import replace
from typing import Any

import common
import torch
from planned_training import TOKENS, on_meta, train
from processes import run_fresh

from hybrid_engine.parallel.compute_config import ComputeConfig
from hybrid_engine.parallel.graph.graph import build_graph
from hybrid_engine.parallel.planning.machine import Machine
from hybrid_engine.parallel.planning.plan import Plan
from hybrid_engine.parallel.planning.plan_costs import plan_costs
from hybrid_engine.parallel.planning.setting import Setting

AUTODIST_GB = 0.5
"""Little enough that weights are split."""
CASES = [
    ("dp", 1, 1, False, 1),
    ("dp", 1, 1, False, 2),
    ("megatron", 2, 2, False, 1),
    ("data", 2, 2, False, 1),
    ("autodist", 2, 2, False, 1),
    ("dp", 1, 2, False, 1),
]
"""Policy, processes of a unit, processes, ZeRO, samples of a step."""


def predict(plan: dict[str, Any], config: ComputeConfig, shape: str, num_samples: int) -> float:
    """The bytes that the planner predicts."""
    graph = build_graph(on_meta(shape), {"sample": torch.zeros(TOKENS[shape], dtype=torch.long)})
    table = Machine.named("h100")
    setting = Setting(
        machine=replace(table, device=replace(table.device, kind="cpu")),
        plan_ngpus=config.plan_ngpus,
        num_units=config.num_units,
        use_zero=config.use_zero,
        num_micro_batches=num_samples,
    )
    return plan_costs(Plan.from_json(plan, graph), setting).peak_bytes


def main() -> None:
    parser = common.run_options(__doc__)
    parser.add_argument("--only", help="one policy")
    options = common.parse_run(parser, "plan_memory")
    shape = "small" if options.small else "full"
    print("policy, processes of a unit, of all, ZeRO, samples: predicted, measured, ratio")
    for policy, plan_ngpus, runtime_ngpus, use_zero, num_samples in CASES:
        if options.only not in (None, policy):
            continue
        pas_config = {"costs": "h100", "mem_constraint": AUTODIST_GB} if policy == "autodist" else {}
        config = ComputeConfig(
            plan_ngpus=plan_ngpus,
            runtime_ngpus=runtime_ngpus,
            use_zero=use_zero,
            use_end2end=True,
            pas_config=pas_config if shape == "full" else {},
        )
        with tempfile.TemporaryDirectory() as folder:
            results = run_fresh(train, runtime_ngpus, "cpu", 1, policy, config, shape, num_samples, folder)
        measured = max(num_bytes for num_bytes, _ in results)
        predicted = predict(results[0][1], config, shape, num_samples)
        print(
            f"{policy:10} {plan_ngpus} {runtime_ngpus} {use_zero!s:5} {num_samples}: {predicted / 1e6:.0f} MB, "
            f"{measured / 1e6:.0f} MB, {predicted / measured:.3f}",
            flush=True,
        )
        row = {
            "policy": policy,
            "plan_ngpus": plan_ngpus,
            "runtime_ngpus": runtime_ngpus,
            "use_zero": use_zero,
            "num_samples": num_samples,
            "shape": shape,
            "predicted_mb": round(predicted / 1e6, 1),
            "measured_mb": round(measured / 1e6, 1),
            "ratio": round(predicted / measured, 3),
        } | common.environment("cpu")
        common.append_rows(options.csv, [row])


if __name__ == "__main__":
    main()
