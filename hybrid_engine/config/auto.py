"""Values of "auto" in a config, resolved as the integration of transformers does.

There, the Trainer replaces "auto" by what its TrainingArguments say before DeepSpeed sees the config. Here,
`initialize(args=...)` takes the same object, and each "auto" becomes, in this order:

1. what `args` says, under the name that TrainingArguments has for it (the table below);
2. for a batch size, what follows from the others; for `scheduler.params.warmup_max_lr`, the optimizer's `lr`, also
   that of one which is passed to `initialize`;
3. an error, if only the user can know (the learning rate, the number of steps, the precision, the ZeRO stage);
4. the default, which is DeepSpeed's.

Source of the table: transformers, `integrations/deepspeed.py`, `HfTrainerDeepSpeedConfig`.
"""

from collections.abc import Callable
from typing import Any

AUTO = "auto"
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _num_steps(args: Any) -> int:
    if args.max_steps <= 0:
        raise AttributeError("max_steps is not set: the number of steps is not known yet")
    return args.max_steps


def _num_warmup_steps(args: Any) -> int:
    if args.warmup_steps >= 1:
        return int(args.warmup_steps)
    if args.warmup_steps > 0 and args.max_steps <= 0:
        raise ValueError(
            f'scheduler.params.warmup_num_steps="auto" is warmup_steps={args.warmup_steps} of the steps, whose number '
            f"is not known: max_steps={args.max_steps}; set max_steps, or write the number of steps itself"
        )
    return max(1, args.get_warmup_steps(max(0, args.max_steps)))


FROM_ARGUMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", lambda a: a.per_device_train_batch_size),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", lambda a: a.gradient_accumulation_steps),
    "gradient_clipping": ("max_grad_norm", lambda a: a.max_grad_norm),
    "optimizer.params.lr": ("learning_rate", lambda a: a.learning_rate),
    "optimizer.params.betas": ("adam_beta1, adam_beta2", lambda a: [a.adam_beta1, a.adam_beta2]),
    "optimizer.params.eps": ("adam_epsilon", lambda a: a.adam_epsilon),
    "optimizer.params.weight_decay": ("weight_decay", lambda a: a.weight_decay),
    "scheduler.params.warmup_min_lr": ("0, whatever they say", lambda a: 0),
    "scheduler.params.warmup_max_lr": ("learning_rate", lambda a: a.learning_rate),
    "scheduler.params.warmup_num_steps": ("warmup_steps", _num_warmup_steps),
    "scheduler.params.total_num_steps": ("max_steps", _num_steps),
    "fp16.enabled": ("fp16 or fp16_full_eval", lambda a: bool(a.fp16 or a.fp16_full_eval)),
    "bf16.enabled": ("bf16 or bf16_full_eval", lambda a: bool(a.bf16 or a.bf16_full_eval)),
    "bfloat16.enabled": ("bf16 or bf16_full_eval", lambda a: bool(a.bf16 or a.bf16_full_eval)),
}
"""The value that a key's "auto" becomes, and its name in TrainingArguments."""
ONLY_THE_USER_KNOWS = frozenset(
    {
        "optimizer.type",
        "optimizer.params.lr",
        "scheduler.type",
        "scheduler.params.total_num_steps",
        "fp16.enabled",
        "bf16.enabled",
        "bfloat16.enabled",
        "hybrid_engine.enabled",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    }
)
BLOCKS = frozenset(
    {
        "bf16",
        "bfloat16",
        "fp16",
        "hybrid_engine",
        "optimizer",
        "optimizer.params",
        "scheduler",
        "scheduler.params",
        "zero_optimization",
        "zero_optimization.offload_optimizer",
        "zero_optimization.offload_param",
    }
)
"""Blocks that change what is computed, or where: each of their options may be "auto", the block may not."""


def resolve_auto(config: dict[str, Any], arguments: Any = None) -> dict[str, Any]:
    """A copy of `config` with what "auto" becomes; it stays where the default counts.

    Args:
        config: as read from the file; not changed.
        arguments: TrainingArguments, or any object with some of its attributes.

    Raises:
        ValueError: for an "auto" that nobody but the user can fill in.
    """
    resolved = _resolve_block(config, "", arguments)
    if _find(resolved, "scheduler", "params", "warmup_max_lr") == AUTO:
        rate = _find(resolved, "optimizer", "params", "lr")
        resolved["scheduler"]["params"]["warmup_max_lr"] = rate  # null is the rate of the optimizer that is passed
    sizes = [name for name in BATCH_SIZES[:2] if config.get(name) == AUTO]
    if sizes and all(resolved.get(name, AUTO) == AUTO for name in BATCH_SIZES[:2]):
        raise ValueError(_explain(sizes[0]))
    return resolved


def without_auto(block: dict[str, Any]) -> dict[str, Any]:
    """A copy of `block` without the entries that are still "auto"."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value for key, value in block.items() if value != AUTO
    }


def _resolve_block(block: dict[str, Any], path: str, arguments: Any) -> dict[str, Any]:
    resolved = {}
    for key, value in block.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            value = _resolve_block(value, name, arguments)
        elif value == AUTO and name in BLOCKS:
            raise ValueError(
                f'{name}="auto" must be a block of options; write "auto" for those of them it is meant for'
            )
        elif value == AUTO:
            value = _from_arguments(name, arguments)
            if value is None and name in ONLY_THE_USER_KNOWS:
                raise ValueError(_explain(name))
            value = AUTO if value is None else value
        resolved[key] = value
    return resolved


def _from_arguments(name: str, arguments: Any) -> Any:
    if arguments is None or name not in FROM_ARGUMENTS:
        return None
    try:
        return FROM_ARGUMENTS[name][1](arguments)
    except AttributeError:  # another parser's arguments, or a TrainingArguments that cannot know
        return None


def _explain(name: str) -> str:
    source = f" (it becomes its {FROM_ARGUMENTS[name][0]})" if name in FROM_ARGUMENTS else ""
    return (
        f'{name}="auto" has no value that could be known here; write the value itself, or pass '
        f"transformers' TrainingArguments as initialize(args=...){source}"
    )


def _find(config: Any, *keys: str) -> Any:
    """The value at the end of `keys`; None if one of them is missing."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config
