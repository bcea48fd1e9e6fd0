"""`ComputeConfig`, the config of `parallelize`: number of processes, lowering, and reuse of earlier runs."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from typing import Any

from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.extensions.parallelize.options.values import COUNT, SWITCH, Rule, check, has_names, is_number

TRACE_STRATEGIES = ("cpu", "cuda", "meta", "cuda_run_cpu_offload", "reuse_cache")
LOWERINGS = ("graph", "eager")
OPTIONS_BY_NAME = Rule(has_names, "a dict whose keys are texts")
MB = 2**20
ASYNC_BUCKET_MB = 25.0
"""Default size of a bucket of gradients that are reduced during the backward pass, in MB."""
BUCKET_SIZE = Rule(lambda value: value is None or (is_number(value) and value >= 0), "a number of at least 0, or None")


class ReuseType(Enum):
    """How `parallelize` uses a plan that is already in the folder."""

    MATCH = "match"
    """Use the plan if graph and config are the same, raise an error if they differ, make a plan if there is none."""
    OVERRIDE = "override"
    """Make a new plan."""
    MOO = "moo"
    """Match or override: use the plan if graph and config are the same, otherwise make a new one."""
    GRAPH = "graph"
    """Reuse only the traced graph, if module, sample and `user_config` are the same; always make a new plan.

    If there is no graph, the new one is stored for the next run. Functions that the module's classes call are not
    compared.
    """


class BroadcastGenFilesStrategy(Enum):
    """Data that rank 0 sends with the plan. New files are also written into the folder of every other node."""

    NONE = "none"
    """Weights. No other process reads or writes the folder."""
    ALL = "all"
    """Files, weights and the graph, which the other processes then do not trace."""
    NO_WEIGHTS = "no_weights"
    """Files and the graph. Until `broadcast_weights`, weights are those of each unit's first process."""
    CODE = "code"
    """Files except the graph, which each process traces. Weights as with NO_WEIGHTS."""


@dataclass(frozen=True)
class ComputeConfig:
    """How a module runs. A *unit* is `plan_ngpus` processes that hold it together and take the same input."""

    plan_ngpus: int
    """Number of processes of a unit."""
    runtime_ngpus: int = field(default_factory=get_world_size)
    """Processes of all units, which take different inputs; a multiple of `plan_ngpus`. Default: the world size."""
    _: KW_ONLY
    constant_folding: bool = False
    """Whether ops that read only constants, such as those of a mask, are computed once for each input shape."""
    trace_strategy: str = "cuda_run_cpu_offload"
    """Accepted for existing scripts. Tracing never runs the module, so all strategies are the same."""
    use_zero: bool = False
    """Whether the optimizer's state, gradients and parameters are sharded over units."""
    zero_ngroups: int = 1
    """Number of groups of units. Each group holds a full copy and shards it over its own units; needs `use_zero`."""
    zero_use_reduce_scatter: bool = False
    """Whether each gradient is reduced only to the process that steps it. ZeRO always does this here."""
    inference_only: bool = False
    """Whether the module is never trained."""
    use_end2end: bool = False
    """Whether `forward` takes a sample and returns the loss, so that `train_step` and `infer_step` can run it."""
    use_async_reducer: bool = False
    """Whether `train_step` starts to reduce gradients over units during the last backward pass. ZeRO always does this.
    Needs `use_end2end`.
    """
    reducer_bucket_cap_mb: float | None = None
    """MB (2^20 bytes) of gradients in one reduction, which holds at least one parameter; needs `use_end2end`.

    None and 0 mean 25 with `use_async_reducer`, otherwise all gradients of a dtype. Not allowed with `use_zero`: FSDP2
    has its own buckets.
    """
    lowering: str = "graph"
    """How a plan is carried out. `graph` runs the traced ops on parts of their tensors. `eager` puts hooks on the
    original module, which keeps its class and can generate. Plans that change layouts inside a module's code need
    `graph`.
    """
    pas_config: Mapping[str, Any] = field(default_factory=dict)
    """The policy's options. Names that begin with `_` are free for custom policies."""
    user_config: Mapping[str, Any] = field(default_factory=dict)
    """User settings that the graph depends on."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the option, its value and the rule."""
        self._check_kinds()
        if self.runtime_ngpus % self.plan_ngpus:
            raise ValueError(
                f"runtime_ngpus={self.runtime_ngpus} must be a multiple of plan_ngpus={self.plan_ngpus}; change either"
            )
        if self.trace_strategy not in TRACE_STRATEGIES:
            raise ValueError(f"trace_strategy={self.trace_strategy!r} must be one of {list(TRACE_STRATEGIES)}")
        if self.lowering not in LOWERINGS:
            raise ValueError(f"lowering={self.lowering!r} must be one of {list(LOWERINGS)}")
        if self.zero_ngroups > 1 and self.zero_use_reduce_scatter:
            raise ValueError(
                f"zero_use_reduce_scatter=True holds for zero_ngroups=1 alone, not {self.zero_ngroups}; leave one out"
            )
        if self.num_units % self.zero_ngroups:
            raise ValueError(f"zero_ngroups={self.zero_ngroups} must divide the number of units, {self.num_units}")
        for name in ("use_async_reducer", "reducer_bucket_cap_mb"):
            if getattr(self, name) and not self.use_end2end:
                raise ValueError(f"{name}={getattr(self, name)} needs use_end2end=True; set it, or leave {name} out")
        if self.reducer_bucket_cap_mb and self.use_zero:
            raise ValueError(
                f"reducer_bucket_cap_mb={self.reducer_bucket_cap_mb}: with use_zero=True FSDP2 reduces each layer by "
                "itself; leave one out"
            )
        if self.constant_folding and self.lowering == "eager":
            raise ValueError(
                "constant_folding=True needs lowering='graph', since the module's own code runs under 'eager'; leave "
                "one out"
            )
        for name, without in {"zero_ngroups": 1, "zero_use_reduce_scatter": False}.items():
            if getattr(self, name) != without and not self.use_zero:
                raise ValueError(f"{name}={getattr(self, name)} needs use_zero=True; set it, or leave {name} out")

    def _check_kinds(self) -> None:
        """Raises ValueError for values of the wrong type."""
        for name in ("plan_ngpus", "runtime_ngpus", "zero_ngroups"):
            check(name, getattr(self, name), COUNT)
        for one in fields(self):
            if one.type is bool:
                check(one.name, getattr(self, one.name), SWITCH)
        check("reducer_bucket_cap_mb", self.reducer_bucket_cap_mb, BUCKET_SIZE)
        for name in ("pas_config", "user_config"):
            check(name, getattr(self, name), OPTIONS_BY_NAME)

    @property
    def num_units(self) -> int:
        """Number of units, which take different inputs."""
        return self.runtime_ngpus // self.plan_ngpus

    @property
    def bucket_bytes(self) -> float:
        """Maximum number of bytes of gradients in one reduction."""
        default = ASYNC_BUCKET_MB if self.use_async_reducer else float("inf")
        return (self.reducer_bucket_cap_mb or default) * MB

    def to_json(self) -> dict[str, Any]:
        """The config as it is stored beside a plan."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    return {str(name): _plain(entry) for name, entry in value.items()} if isinstance(value, Mapping) else value
