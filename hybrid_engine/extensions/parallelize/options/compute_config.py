"""What `parallelize` is asked for: how many processes, and what of earlier runs is used again."""

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
"""Of gradients that are reduced while the backward pass goes on, where nobody says how many."""
BUCKET_SIZE = Rule(lambda value: value is None or (is_number(value) and value >= 0), "a number of at least 0, or None")


class ReuseType(Enum):
    """What is done with a plan that lies in the folder."""

    MATCH = "match"
    """Used when graph and config are the same, an error when not, made when there is none."""
    OVERRIDE = "override"
    """Made anew."""
    MOO = "moo"
    """Match or override: used when graph and config are the same, else made anew."""
    GRAPH = "graph"
    """The traced graph alone is used again, where module, sample and `user_config` are the same; the plan is made anew.

    It is kept for the next time where there is none. Functions that the module's classes call are not compared.
    """


class BroadcastGenFilesStrategy(Enum):
    """What rank 0 sends besides the plan; what it made anew is written into the folder of every other node too."""

    NONE = "none"
    """Its weights; no other process reads or writes the folder."""
    ALL = "all"
    """Files, its weights and the graph, which nobody else traces then."""
    NO_WEIGHTS = "no_weights"
    """Files and the graph; weights are those of each unit's first process until `broadcast_weights`."""
    CODE = "code"
    """Files but for the graph, which each process traces; weights as with NO_WEIGHTS."""


@dataclass(frozen=True)
class ComputeConfig:
    """How a module is run. A *unit* is `plan_ngpus` processes that hold the module together and take the same input."""

    plan_ngpus: int
    """Processes of a unit."""
    runtime_ngpus: int = field(default_factory=get_world_size)
    """Processes of all units, which take different inputs; a multiple of `plan_ngpus`. Default: all that there are."""
    _: KW_ONLY
    constant_folding: bool = False
    """Whether ops that read nothing but constants, as those of a mask, are computed once for all passes of a shape."""
    trace_strategy: str = "cuda_run_cpu_offload"
    """For scripts that give one: tracing never runs the module, so that all strategies are the same."""
    use_zero: bool = False
    """Whether units share the optimizer's state, gradients and parameters out among them."""
    zero_ngroups: int = 1
    """Groups of units, each of which holds all and shares it out among its units alone; needs `use_zero`."""
    zero_use_reduce_scatter: bool = False
    """Whether gradients are reduced to the process that steps them alone, which ZeRO does here in any case."""
    inference_only: bool = False
    """Whether the module is never trained."""
    use_end2end: bool = False
    """Whether `forward` takes a sample and returns the loss: `train_step` and `infer_step` run it."""
    use_async_reducer: bool = False
    """Whether `train_step` begins to reduce gradients over units within the last backward pass, as ZeRO does in any
    case; needs `use_end2end`."""
    reducer_bucket_cap_mb: float | None = None
    """MB (2^20 bytes) of gradients that are reduced at once, of one parameter at least; needs `use_end2end`.

    None and 0: 25 with `use_async_reducer`, else all of a dtype. Not with `use_zero`: FSDP2 has buckets of its own.
    """
    lowering: str = "graph"
    """What a plan becomes: `graph`, the traced ops on parts, or `eager`, hooks on the original module, which stays one
    of its class and generates; plans that change layouts inside a module's code are for `graph` alone."""
    pas_config: Mapping[str, Any] = field(default_factory=dict)
    """The policy's options; free ones begin with `_`."""
    user_config: Mapping[str, Any] = field(default_factory=dict)
    """What of the user's makes the graph what it is."""

    def __post_init__(self) -> None:
        """ValueError names the option, its value and the rule."""
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
        """ValueError for values of another kind than their options'."""
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
        """Groups of processes that take different inputs."""
        return self.runtime_ngpus // self.plan_ngpus

    @property
    def bucket_bytes(self) -> float:
        """The most bytes of gradients that are reduced at once."""
        default = ASYNC_BUCKET_MB if self.use_async_reducer else float("inf")
        return (self.reducer_bucket_cap_mb or default) * MB

    def to_json(self) -> dict[str, Any]:
        """What a plan was made for, in the words of its file."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    return {str(name): _plain(entry) for name, entry in value.items()} if isinstance(value, Mapping) else value
