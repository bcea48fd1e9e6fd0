"""The arithmetic of batch sizes: which follow from which, and what to say when they contradict each other."""

import math

from hybrid_engine.config.checks import check_integer

BATCH_PRODUCT = "train_micro_batch_size_per_gpu * gradient_accumulation_steps * world_size"


def solve_batch_sizes(train: int | None, micro: int | None, steps: int | None, world_size: int) -> dict[str, int]:
    """The three batch sizes from those given (None: not given), by DeepSpeed's rules.

    Any two give the third; one of the first two alone means one accumulation step.

    Raises:
        ValueError: for a value below 1, a division with a remainder, or a triple that contradicts itself.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name, value in zip(names, (train, micro, steps), strict=True):
        if value is not None:
            check_integer(name, value, 1)
    if train is None and micro is None:
        raise ValueError(
            "train_batch_size and train_micro_batch_size_per_gpu are both missing; give one of them: "
            f"train_batch_size = {BATCH_PRODUCT}"
        )
    if steps is None and (train is None or micro is None):
        steps = 1
    if train is None:
        assert micro is not None and steps is not None
        train = micro * steps * world_size
    elif micro is None:
        assert steps is not None
        micro = _divide(train, {"gradient_accumulation_steps": steps, "world_size": world_size})
    elif steps is None:
        steps = _divide(train, {"train_micro_batch_size_per_gpu": micro, "world_size": world_size})
    assert micro is not None and steps is not None
    if train != micro * steps * world_size:
        raise ValueError(
            f"train_batch_size={train} must be {BATCH_PRODUCT}"
            f" = {micro} * {steps} * {world_size} = {micro * steps * world_size}; "
            f"set train_batch_size to {micro * steps * world_size} or remove one of the three"
        )
    return dict(zip(names, (train, micro, steps), strict=True))


def _divide(train: int, factors: dict[str, int]) -> int:
    product = math.prod(factors.values())
    if train % product:
        rest = train % product
        choices = [str(size) for size in (train - rest, train - rest + product) if size > 0]
        raise ValueError(
            f"train_batch_size={train} must be a multiple of {' * '.join(factors)}"
            f" = {' * '.join(map(str, factors.values()))} = {product}, but {train} / {product} leaves {rest}; "
            f"set train_batch_size to {' or '.join(choices)}"
        )
    return train // product
