"""The policies by name, the options that each accepts, and the checks of the plans that they make.

`parallelize` makes its plan by `plan_by`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from hybrid_engine.extensions.parallelize.graph.graph import Graph
from hybrid_engine.extensions.parallelize.library.rules import call_of
from hybrid_engine.extensions.parallelize.options.compute_config import ComputeConfig
from hybrid_engine.extensions.parallelize.planning.autodist import autodist
from hybrid_engine.extensions.parallelize.planning.explaining import explain
from hybrid_engine.extensions.parallelize.planning.options import OPTION_NAMES, Options
from hybrid_engine.extensions.parallelize.planning.plan import Plan
from hybrid_engine.extensions.parallelize.planning.stage_policies import (
    STAGE_OPTIONS,
    batch_plan,
    check_pipeline,
    check_pipeline_and_batch,
    replicated_plan,
    stages_and_batch,
    stages_of_equal_size,
)
from hybrid_engine.extensions.parallelize.planning.tensor_parallel import tensor_parallel

Policy = Callable[[Graph, ComputeConfig], Plan | None]


def check_one_process(config: ComputeConfig) -> None:
    """Raises ValueError unless a unit is one process."""
    if config.plan_ngpus != 1:
        raise ValueError(
            f"policy 'dp' needs plan_ngpus=1, not {config.plan_ngpus}; use 'data' or 'tp' for larger units"
        )


def check_no_seed(config: ComputeConfig) -> None:
    """Raises ValueError for the option `seed` of earlier releases, whose `tp` drew a random split for each op."""
    if "seed" in config.pas_config:
        raise ValueError(
            f"pas_config['seed']={config.pas_config['seed']!r}: policy 'tp' is tensor parallelism (heads, columns then "
            "rows, vocabulary) and draws nothing; leave seed out, or pass a callable that returns the Plan to try"
        )


def data_parallel(graph: Graph, config: ComputeConfig) -> Plan:
    """`dp`: every process has the whole module."""
    return replicated_plan(graph, (1,))


def split_batch(graph: Graph, config: ComputeConfig) -> Plan:
    """`data`: dimension 0 of the arguments is split inside the unit."""
    return batch_plan(graph, (config.plan_ngpus,))


POLICIES: Mapping[str, Policy] = {
    "dp": data_parallel,
    "tp": tensor_parallel,
    "data": split_batch,
    "pp": stages_of_equal_size,
    "hybrid": stages_and_batch,
    "autodist": autodist,
}
CHECKS: Mapping[str, Callable[[ComputeConfig], Any]] = {
    "dp": check_one_process,
    "tp": check_no_seed,
    "data": lambda config: None,
    "pp": check_pipeline,
    "hybrid": check_pipeline_and_batch,
    "autodist": lambda config: Options.of(config.pas_config),
}
"""Checks of each policy's option values that run before a module is traced."""
OPTIONS: Mapping[str, frozenset[str]] = {
    "dp": frozenset(),
    "tp": frozenset({"seed"}),  # whose check names the remedy
    "data": frozenset(),
    "pp": STAGE_OPTIONS - {"pipeline_nstages"},
    "hybrid": STAGE_OPTIONS,
    "autodist": OPTION_NAMES,
}


def plan_by(policy: str | Policy, graph: Graph, config: ComputeConfig) -> Plan:
    """The plan that a policy makes, checked; ValueError for an unknown policy or option, or for an invalid plan.

    A callable receives the graph and the config and returns a plan.
    """
    if not isinstance(policy, str):
        plan = policy(graph, config)
        if not isinstance(plan, Plan):
            raise ValueError(f"pas_policy={policy} returned {type(plan).__name__}; return a hybrid_engine Plan")
        if not isinstance(plan.graph, Graph) or plan.graph.signature != graph.signature:
            raise ValueError(f"pas_policy={policy} returned a plan of another graph; make it for the one it is given")
    else:
        check_policy(policy, config)
        plan = POLICIES[policy](graph, config)
        if policy == "autodist" and plan is not None and config.pas_config.get("verbose"):
            print(explain(plan, config))
        assert plan is not None, f"{policy=}"
    plan.check()
    check_runs(plan, config)
    return plan


def check_runs(plan: Plan, config: ComputeConfig) -> None:
    """Raises ValueError for a plan that cannot run under this config."""
    if plan.plan_ngpus != config.plan_ngpus:
        raise ValueError(f"the plan is for {plan.plan_ngpus} processes, plan_ngpus={config.plan_ngpus}; change either")
    plan.check_runs()
    _check_gradients(plan, config)
    if not plan.stages:
        return
    if not config.use_end2end:
        raise ValueError("a plan with stages needs use_end2end=True: train_step alone runs them; set it")
    if config.inference_only != (plan.schedule == "infer_pipe"):
        raise ValueError(
            f"inference_only={config.inference_only} does not go with the schedule {plan.schedule!r}; 'infer_pipe' is "
            "for inference_only=True, all others are for training"
        )
    if config.use_zero and plan.schedule == "1f1b_interleaved":
        raise ValueError("use_zero=True does not go with '1f1b_interleaved'; take '1f1b', or leave use_zero out")


def _check_gradients(plan: Plan, config: ComputeConfig) -> None:
    """Raises ValueError for sparse gradients that would have to be summed or split."""
    if config.inference_only:
        return
    is_alone = config.num_units == 1 and (plan.plan_ngpus == len(plan.stages) or plan.plan_ngpus == 1)
    num_readers = Counter(key for op in plan.graph.ops.values() for key in set(op.inputs))
    for op in plan.graph.ops.values():
        trained = [key for key in op.inputs if key in plan.graph.requires_grad]
        # Other stages may also have a copy of a parameter that other ops read.
        is_summed = not is_alone or (plan.stages and any(num_readers[key] > 1 for key in trained))
        if trained and is_summed and call_of(op.node).arguments.get("sparse"):
            raise ValueError(
                f"{op.key} has sparse=True, and sparse gradients are not added up over processes; pass sparse=False to "
                f"the embedding at {op.path!r}"
            )


def check_policy(policy: str | Policy, config: ComputeConfig) -> None:
    """Raises ValueError for an unknown policy, and for wrong options of a known one; reads no file."""
    if isinstance(policy, str):
        _check_names(policy, config.pas_config)
        CHECKS[policy](config)


def _check_names(policy: str, options: Mapping[str, Any]) -> None:
    if policy not in POLICIES:
        raise ValueError(f"pas_policy={policy!r} must be one of {sorted(POLICIES)}, or a callable")
    for name in options:
        if not name.startswith("_") and name not in OPTIONS[policy]:
            near = get_close_matches(name, OPTIONS[policy], 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = sorted(OPTIONS[policy])
            raise ValueError(
                f"pas_config[{name!r}] is no option of {policy!r}; {hint}it has {known}; free ones begin with _"
            )
