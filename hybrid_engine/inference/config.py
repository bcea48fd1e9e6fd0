"""The options of `init_inference`: DeepSpeed's keys as a frozen dataclass with checks.

Names, defaults and old names are those of deepspeed/inference/config.py; only the default of `dtype` differs: it is the
model's own.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from hybrid_engine.config.checks import DTYPES, check_flag, check_integer, dtype_name, find_nearest, torch_dtype_of
from hybrid_engine.config.reading import read_json

logger = logging.getLogger("hybrid_engine")

OTHER_NAMES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "tm": "triangular_masking",
    "ckpt_config": "checkpoint_config",
    "injection_dict": "injection_policy",
    "args": "config",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
}
"""Second names of DeepSpeed's options, and Megatron's names."""
OLD_NAMES = {
    "mp_size": ("tensor_parallel", "tp_size"),
    "mpu": ("tensor_parallel", "mpu"),
    "ep_size": ("moe", "ep_size"),
    "ep_group": ("moe", "ep_group"),
    "ep_mp_group": ("moe", "ep_mp_group"),
    "moe_experts": ("moe", "moe_experts"),
    "moe_type": ("moe", "type"),
}
"""Deprecated names, with the block and key that replace each."""


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig:
    """`tensor_parallel`: the processes that share the model."""

    enabled: bool = True
    """False is the same as `tp_size` 1."""
    tp_size: int = 1
    """Processes that share one model."""
    tp_grain_size: int = 64
    """No effect: parts are cut at heads."""
    mpu: Any = None
    """Megatron's parallel state, whose model-parallel group is used if no `tp_group` is given."""
    tp_group: Any = None
    """The process group to share the model in; None: `tp_size` consecutive ranks."""

    def __post_init__(self) -> None:
        check_flag("tensor_parallel.enabled", self.enabled)
        check_integer("tensor_parallel.tp_size", self.tp_size, 1)

    @property
    def size(self) -> int:
        """Processes that share one model."""
        return self.tp_size if self.enabled else 1

    @property
    def group(self) -> Any:
        """The process group that the caller chose, or None."""
        return self.mpu.get_model_parallel_group() if self.tp_group is None and self.mpu is not None else self.tp_group


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """`moe`: experts are found in the model; each process has its part of every expert."""

    enabled: bool = True
    """No effect."""
    ep_size: int = 1
    """Number of processes that experts are distributed over: 1, since each process has its part of all."""
    moe_experts: Any = (1,)
    """No effect: read from the model."""
    type: str = "standard"
    """No effect: read from the model."""
    ep_mp_group: Any = None
    """No effect."""
    ep_group: Any = None
    """No effect."""

    def __post_init__(self) -> None:
        if self.ep_size != 1:
            raise ValueError(
                f"moe.ep_size={self.ep_size} is not supported: every process has its part of each expert; leave it at "
                "1 and set tensor_parallel.tp_size"
            )


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """All options of `init_inference` in addition to the model."""

    dtype: torch.dtype | None = None
    """dtype of the computation; None: the model's."""
    tensor_parallel: TensorParallelConfig = field(default_factory=TensorParallelConfig)
    """The processes that share the model."""
    pipeline_parallel_size: int = 1
    """Stages that the layers are distributed over, on `tensor_parallel.tp_size` processes each. Not in DeepSpeed."""
    max_out_tokens: int | None = None
    """Tokens of prompt and answer of one sequence; None: 1024, or the model's positions if there are fewer."""
    max_running: int = 0
    """Rows that `generate()` decodes at once; 0: chosen by the device. Not in DeepSpeed."""
    min_out_tokens: int = 1
    """No effect: the KV workspace is sized by the request."""
    enable_cuda_graph: bool = True
    """Whether decode steps are replayed if possible: on a GPU as one graph, on a CPU from a tape of its calls.

    DeepSpeed's default is false.
    """
    checkpoint: Any = None
    """A folder or file of safetensors, its index, or a list of files, for a model on the meta device."""
    base_dir: str = ""
    """Folder of `checkpoint`."""
    checkpoint_config: Mapping[str, Any] = field(default_factory=dict)
    """`checkpoint_dir` and `base_dir` instead of the two above."""
    injection_policy: Mapping[Any, Any] | None = None
    """For models without a policy: layer class -> names of the linears whose outputs are added up over processes."""
    injection_policy_tuple: tuple[str, ...] | None = None
    """The same names for every layer class."""
    replace_with_kernel_inject: bool | None = None
    """The model determines whether containers are used; a contradicting value prints a line."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts."""
    quant: Mapping[str, Any] = field(default_factory=dict)
    """Not supported while `enabled`."""
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Not supported: `initialize` generates from sharded weights."""
    keep_module_on_host: bool = False
    """Not supported."""
    save_mp_checkpoint_path: str | None = None
    """Not supported."""
    training_mp_size: int = 1
    """Only 1 is supported."""
    triangular_masking: bool = True
    """No effect: read from the model."""
    use_triton: bool = False
    """No effect: kernels are used on a GPU."""
    triton_autotune: bool = False
    """No effect."""
    set_empty_params: bool = False
    """No effect: a model on the meta device is recognized."""
    return_tuple: bool = True
    """No effect: outputs are the model's."""
    replace_method: str = "auto"
    """No effect; deprecated."""
    transposed_mode: bool = False
    """No effect: weights are read as they are stored."""
    config: Any = None
    """No effect; deprecated."""

    def __post_init__(self) -> None:
        if self.max_out_tokens is not None:
            check_integer("max_out_tokens", self.max_out_tokens, 1)
        check_integer("max_running", self.max_running, 0)
        check_integer("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        if self.pipeline_parallel_size > 1 and self.tensor_parallel.group is not None:
            raise ValueError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} groups consecutive ranks by itself; "
                "leave tensor_parallel.tp_group and mpu out and give tp_size"
            )
        check_flag("enable_cuda_graph", self.enable_cuda_graph)
        if self.replace_with_kernel_inject is not None:
            check_flag("replace_with_kernel_inject", self.replace_with_kernel_inject)
        if self.injection_policy is not None and not isinstance(self.injection_policy, Mapping):
            raise ValueError(
                f"injection_policy={self.injection_policy!r} must be a dict of a layer's class and names of linears; "
                f"write one like {{LayerClass: ('mlp.down_proj',)}}"
            )
        off = {
            "quant": not self.quant.get("enabled", False),
            "zero": not self.zero,
            "keep_module_on_host": not self.keep_module_on_host,
            "save_mp_checkpoint_path": self.save_mp_checkpoint_path is None,
            "training_mp_size": self.training_mp_size == 1,
        }
        for name, is_off in off.items():
            if not is_off:
                raise ValueError(f"{name}={getattr(self, name)!r} is not supported by init_inference; leave it out")


DeepSpeedInferenceConfig = InferenceConfig
"""DeepSpeed's name of it."""


def read_config(config: dict[str, Any] | str | os.PathLike[str] | None, kwargs: dict[str, Any]) -> InferenceConfig:
    """The options of `config`, a dict or the path of a JSON file, and of `kwargs` together.

    Raises ValueError for an unknown key, one given twice with different values, or an invalid value.
    """
    given = _canonical({} if config is None else dict(config) if isinstance(config, Mapping) else read_json(config))
    for name, value in _canonical(kwargs).items():
        if isinstance(value, Mapping) and isinstance(given.get(name), Mapping):
            value = _merged(name, given[name], value)
        elif name in given and given[name] != value:
            raise ValueError(
                f"{name} is {given[name]!r} in the config and {value!r} as a keyword; give it in one of the two"
            )
        given[name] = value
    for name, block in (("tensor_parallel", TensorParallelConfig), ("moe", MoEConfig)):
        if name in given:
            given[name] = _read_block(name, block, given[name])
    if given.get("dtype") is not None:
        given["dtype"] = _read_dtype(given["dtype"])
    return InferenceConfig(**{name: value for name, value in given.items() if value is not None})


def _canonical(given: dict[str, Any]) -> dict[str, Any]:
    """Options by their current names; None means that an option was not given."""
    known = [option.name for option in fields(InferenceConfig)]
    result: dict[str, Any] = {}
    for key, value in given.items():
        name = OTHER_NAMES.get(key, key)
        if key in OLD_NAMES:
            block, inner = OLD_NAMES[key]
            name, value = block, None if value is None else {inner: value}
        if name not in known:
            nearest = find_nearest(key, [*known, *OTHER_NAMES, *OLD_NAMES])
            hint = f"did you mean {nearest}?" if nearest else f"the options are {', '.join(known)}"
            raise ValueError(f"{key} is not an option of init_inference; {hint}")
        if value is None:
            continue
        if name == "moe" and isinstance(value, bool):
            value = {"enabled": value}
        if isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            value = _merged(name, result[name], value)
        elif name in result and result[name] != value:
            raise ValueError(f"{key}={value!r} and {name}={result[name]!r} are the same option; give one of them")
        result[name] = value
    return result


def _merged(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key in one.keys() & other.keys():
        if one[key] != other[key]:
            raise ValueError(f"{name}.{key} is given as {one[key]!r} and as {other[key]!r}; give one of them")
    return {**one, **other}


def _read_block(name: str, block: type, value: Any) -> Any:
    if isinstance(value, block):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f'{name}={value!r} must be a block of options; write it like {{"tp_size": 2}}')
    options = {"moe_experts" if key == "num_experts" else key: inner for key, inner in value.items()}
    known = [option.name for option in fields(block)]
    for key in options:
        if key not in known:
            nearest = find_nearest(key, known)
            hint = f"did you mean {name}.{nearest}?" if nearest else f"its options are {', '.join(known)}"
            raise ValueError(f"{name}.{key} is not an option of init_inference; {hint}")
    return block(**options)


def _read_dtype(value: Any) -> torch.dtype:
    name = dtype_name(value)
    if name is None:
        raise ValueError(f"dtype={value!r} is not supported; use one of {', '.join(DTYPES)}, or leave it out")
    return torch_dtype_of(name)
