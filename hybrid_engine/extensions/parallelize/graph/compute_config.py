"""`ComputeConfig`, the config of `parallelize`, and the rules and errors for all values that users pass to it."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from hybrid_engine.distributed.processes import gather_objects, get_world_size

MOST_WORDS = 100
"""Maximum number of characters of a value in an error: models and tensors are long."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MOST_ALIKE = 30
"""Characters that an error shows before the first difference of two long texts."""
TRACE_STRATEGIES = ("cpu", "cuda", "meta", "cuda_run_cpu_offload", "reuse_cache")
LOWERINGS = ("graph", "eager")
MB = 2**20
ASYNC_BUCKET_MB = 25.0
"""Default size of a bucket of gradients that are reduced during the backward pass, in MB."""


class ValueRule(NamedTuple):
    """A check of a value and its description for the error."""

    accepts: Callable[[Any], bool]
    words: str
    """The text after "must be"."""


def is_count(value: Any) -> bool:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and value - value == 0


def is_text(value: Any) -> bool:
    """Whether a value is a str."""
    return isinstance(value, str)


def is_switch(value: Any) -> bool:
    """Whether a value is True or False."""
    return isinstance(value, bool)


def has_names(value: Any) -> bool:
    """Whether a value is a mapping whose keys are strings."""
    return isinstance(value, Mapping) and all(is_text(key) for key in value)


def is_list_of(value: Any, accepts: Callable[[Any], bool]) -> bool:
    """Whether a value is a list or tuple whose entries are all accepted."""
    return isinstance(value, list | tuple) and all(accepts(entry) for entry in value)


def takes(function: Any, num_arguments: int) -> bool:
    """Whether `function` can be called with this number of arguments; True if its signature is unknown."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * num_arguments)
    except TypeError:
        return False
    except ValueError:
        return True  # a C function without a signature
    return True


COUNT = ValueRule(is_count, "a number of at least 1")


SWITCH = ValueRule(is_switch, "True or False")


TEXT = ValueRule(is_text, "a text")


CALLABLE = ValueRule(callable, "a callable")


def check(name: str, value: Any, rule: ValueRule) -> None:
    """Raises ValueError with the option, its value and the rule, unless the rule accepts the value."""
    if not rule.accepts(value):
        raise ValueError(f"{name}={shown(value)} must be {rule.words}")


def shown(value: Any) -> str:
    """A value as an error shows it, cut to one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."


def name_of(function: Any) -> str:
    """A name for a callable that is the same on every process and in every run; local."""
    if isinstance(function, functools.partial):
        arguments = [words_of(value) for value in function.args]
        arguments += [f"{name}={words_of(value)}" for name, value in sorted(function.keywords.items())]
        return f"partial({', '.join([name_of(function.func), *arguments])})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def words_of(value: Any) -> str:
    """A description of a value that is the same on every process; shape and dtype for a tensor; local."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        named = sorted((repr(name), words_of(entry)) for name, entry in value.items())
        return "{" + ", ".join(f"{name}: {words}" for name, words in named) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(words_of(entry) for entry in value)}]"
    return name_of(value) if callable(value) else ADDRESS.sub("", repr(value))


def words_by_name(option: str, entries: Mapping[str, Any]) -> dict[str, str]:
    """Descriptions of an option that is a dict: one of its names, and one of each entry; local."""
    each = {f"{option}[{name!r}]": words_of(entry) for name, entry in entries.items()}
    return {option: f"a dict of {sorted(entries)}", **each}


def check_alike(own: Mapping[str, str]) -> None:
    """Raises ValueError on all processes unless all those that describe a name describe it alike; collective.

    A process that does not describe a name is not compared for it.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, found in enumerate(gather_objects(dict(own))):
        for name, words in found.items():
            other, expected = first.setdefault(name, (rank, words))
            if words != expected:
                one, two = _differing(expected, words)
                raise ValueError(
                    f"{name}={one} on rank {other} and {two} on rank {rank}; pass the same on all processes"
                )


def _differing(one: str, other: str) -> tuple[str, str]:
    """Excerpts of two texts, each at most one line, that contain the first difference."""
    if max(len(one), len(other)) <= MOST_WORDS:
        return one, other
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - MOST_ALIKE)
    cut = [text[start : start + MOST_WORDS] for text in (one, other)]
    return f"...{cut[0]}...", f"...{cut[1]}..."


OPTIONS_BY_NAME = ValueRule(has_names, "a dict whose keys are texts")


BUCKET_SIZE = ValueRule(
    lambda value: value is None or (is_number(value) and value >= 0), "a number of at least 0, or None"
)


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
        """The config as it is stored with a plan."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    return {str(name): _plain(entry) for name, entry in value.items()} if isinstance(value, Mapping) else value
