"""Peak memory of training steps under plans, as the planner predicts it and as it is.

    python benchmarks/bench_plan_memory.py          # a Llama of 30M parameters, 4 x 128 tokens, fp32, on the CPU
    python benchmarks/bench_plan_memory.py --small

Measured twice on real processes, each time in fresh ones, from before the module is built until after its second step
of Adam: the bytes of tensors that ops made and that are there at once, at most; and how much resident memory rises
above what the process has after the same training of a tiny model. The first leaves out what an op allocates and frees
inside itself, buffers of gloo and waste of the allocator; the second has them. The process that needs most counts, with
stages that of each stage.
"""

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
    ("dp", 1, 2, True, 1),
    ("pp", 2, 2, False, 4),
]
"""Policy, processes of a unit, processes, ZeRO, samples of a step."""


def predict(plan: dict[str, Any], config: ComputeConfig, shape: str, num_samples: int) -> list[float]:
    """The bytes that the planner predicts for a process of each stage."""
    graph = build_graph(on_meta(shape), {"sample": torch.zeros(TOKENS[shape], dtype=torch.long)})
    table = Machine.named("h100")
    setting = Setting(
        machine=replace(table, device=replace(table.device, kind="cpu")),
        plan_ngpus=config.plan_ngpus,
        num_units=config.num_units,
        use_zero=config.use_zero,
        num_micro_batches=num_samples,
    )
    return [max(stage.peaks.values()) for stage in plan_costs(Plan.from_json(plan, graph), setting).stages]


def config_for(policy: str, plan_ngpus: int, runtime_ngpus: int, use_zero: bool, num_samples: int) -> ComputeConfig:
    """What `parallelize` is asked for."""
    options = {
        "autodist": {"costs": "h100", "mem_constraint": AUTODIST_GB},
        "pp": {"pipeline_nmicros": num_samples},
    }
    return ComputeConfig(
        plan_ngpus=plan_ngpus,
        runtime_ngpus=runtime_ngpus,
        use_zero=use_zero,
        use_end2end=True,
        pas_config=options.get(policy, {}),
    )


def measure(case: tuple[str, int, int, bool, int], shape: str) -> list[dict[str, Any]]:
    """A row for each stage."""
    policy, plan_ngpus, runtime_ngpus, use_zero, num_samples = case
    config = config_for(*case)
    live, resident = (
        run_fresh(train, runtime_ngpus, "cpu", 1, policy, config, shape, num_samples, counts)
        for counts in (True, False)
    )
    predicted = predict(live[0].plan, config, shape, num_samples)
    rows = []
    for stage, expected in enumerate(predicted):
        ranks = [rank for rank in range(runtime_ngpus) if rank % plan_ngpus * len(predicted) // plan_ngpus == stage]
        tensors, memory = max(live[r].live_bytes for r in ranks), max(resident[r].resident_bytes for r in ranks)
        rows.append(
            {
                "policy": policy,
                "plan_ngpus": plan_ngpus,
                "runtime_ngpus": runtime_ngpus,
                "use_zero": use_zero,
                "num_samples": num_samples,
                "stage": stage,
                "shape": shape,
                "predicted_mb": round(expected / 1e6, 1),
                "tensors_mb": round(tensors / 1e6, 1),
                "to_tensors": round(expected / tensors, 3),
                "resident_mb": round(memory / 1e6, 1),
                "to_resident": round(expected / memory, 3),
            }
        )
    return rows


def main() -> None:
    parser = common.run_options(__doc__)
    parser.add_argument("--only", help="one policy")
    options = common.parse_run(parser, "plan_memory")
    shape = "small" if options.small else "full"
    print("policy, processes of a unit, of all, ZeRO, samples, stage: predicted, tensors, ratio, resident, ratio")
    for case in CASES:
        if options.only not in (None, case[0]) or (case[0] == "autodist" and options.small):
            continue
        rows = measure(case, shape)
        for row in rows:
            print(
                "{policy:10} {plan_ngpus} {runtime_ngpus} {use_zero!s:5} {num_samples} {stage}: {predicted_mb:.0f} MB, "
                "{tensors_mb:.0f} MB, {to_tensors:.3f}, {resident_mb:.0f} MB, {to_resident:.3f}".format(**row),
                flush=True,
            )
        common.append_rows(options.csv, [row | common.environment("cpu") for row in rows])


if __name__ == "__main__":
    main()
