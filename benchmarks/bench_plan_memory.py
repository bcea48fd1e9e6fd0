"""Peak memory of training steps under plans, as the planner predicts it and as it is.

    python benchmarks/bench_plan_memory.py          # a Llama of 30M parameters, 4 x 128 tokens, fp32, on the CPU
    python benchmarks/bench_plan_memory.py --small

Measured on real processes, each time in fresh ones, from before the module is built until after its second step of
Adam: `tensors`, the bytes of tensors that ops made and that are there at once, at most; `resident`, how much resident
memory rises above what the process has after the same training of a tiny model, with a C library that gives back what
is freed, so that what ops allocate inside themselves and buffers of gloo are in it; and `kept`, the same with glibc's
own choice of what it keeps of freed memory. The process that needs most counts, with stages that of each stage.
"""

from dataclasses import replace
from typing import Any

import common
import torch
from planned_training import TOKENS, on_meta, train
from processes import run_fresh

from hybrid_engine.extensions.parallelize.graph.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.graph.graph import build_graph
from hybrid_engine.extensions.parallelize.planning.autodist import plan_costs
from hybrid_engine.extensions.parallelize.planning.machine import Machine
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.setting import PlanSetting

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
WHAT = ("tensors", "resident", "kept")


def predict(plan: dict[str, Any], config: ComputeConfig, shape: str, num_samples: int) -> list[float]:
    """The bytes that the planner predicts for a process of each stage."""
    graph = build_graph(on_meta(shape), {"sample": torch.zeros(TOKENS[shape], dtype=torch.long)})
    table = Machine.named("h100")
    setting = PlanSetting(
        machine=replace(table, device=replace(table.device, kind="cpu")),
        plan_ngpus=config.plan_ngpus,
        num_units=config.num_units,
        use_zero=config.use_zero,
        num_micro_batches=num_samples,
    )
    return [max(stage.peaks.values()) for stage in plan_costs(Plan.from_json(plan, graph), setting).stages]


def config_for(policy: str, plan_ngpus: int, runtime_ngpus: int, use_zero: bool, num_samples: int) -> ComputeConfig:
    """What `parallelize` is asked for."""
    options: dict[str, dict[str, Any]] = {
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
    given = policy, config, shape, num_samples
    found = {what: run_fresh(train, runtime_ngpus, "cpu", 1, *given, what) for what in WHAT}
    predicted = predict(found["tensors"][0].plan, config, shape, num_samples)
    rows = []
    for stage, expected in enumerate(predicted):
        ranks = [rank for rank in range(runtime_ngpus) if rank % plan_ngpus * len(predicted) // plan_ngpus == stage]
        peaks = {what: max(processes[r].num_bytes for r in ranks) for what, processes in found.items()}
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
            }
        )
        for what, num_bytes in peaks.items():
            rows[-1] |= {f"{what}_mb": round(num_bytes / 1e6, 1), f"to_{what}": round(expected / num_bytes, 3)}
    return rows


def main() -> None:
    parser = common.run_options(__doc__)
    parser.add_argument("--only", help="one policy")
    options = common.parse_run(parser, "plan_memory")
    shape = "small" if options.small else "full"
    print(
        "policy, processes of a unit, of all, ZeRO, samples, stage: predicted MB, tensors, resident, kept; ratios to it"
    )
    for one in CASES:
        if options.only not in (None, one[0]) or (one[0] == "autodist" and options.small):
            continue
        rows = measure(one, shape)
        for row in rows:
            words = [f"{row[f'{what}_mb']:.0f} ({row[f'to_{what}']:.3f})" for what in WHAT]
            case = " ".join(str(row[name]) for name in list(row)[:6])
            print(f"{case}: {row['predicted_mb']:.0f}; {', '.join(words)}", flush=True)
        common.append_rows(options.csv, [row | common.environment("cpu") for row in rows])


if __name__ == "__main__":
    main()
