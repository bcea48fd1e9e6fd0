"""`deepspeed.checkpointing`: recomputation of activations, by torch.utils.checkpoint.

What DeepSpeed's `configure` sets is set for the process, as there; engines do not read it, their config has the block
`activation_checkpointing`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hybrid_engine.config.reading import read_json
from hybrid_engine.extensions.deepspeed.accelerator import get_accelerator

MODEL_PARALLEL = "model-parallel-rng"
"""The random state for what differs between model-parallel processes: DeepSpeed's and Megatron's name."""
SEED_OFFSET = 2718
"""The number that Megatron adds to the seed for that state."""

_settings: dict[str, bool] = {}


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Says whether `checkpoint` keeps its inputs in the CPU's memory; the other arguments have no meaning here.

    Args:
        deepspeed_config: a config whose block `activation_checkpointing` has `cpu_checkpointing`.
        checkpoint_in_cpu: comes before the config.
    """
    config = deepspeed_config if isinstance(deepspeed_config, (Mapping, type(None))) else read_json(deepspeed_config)
    block = (config or {}).get("activation_checkpointing") or {}
    _settings["cpu"] = bool(block.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu)


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(_settings)


def reset() -> None:
    """Does nothing: there are no buffers between two steps."""


def set_num_layers(nlayers: int) -> None:
    """Does nothing: no buffers are sized by it."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Does nothing: activations are not replicated, there is no tensor parallelism in training."""


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose inner activations are computed again in the backward pass.

    Args:
        use_reentrant: has no meaning here: the pass is never reentrant, which FSDP2 needs.
        kwargs: also what torch.utils.checkpoint.checkpoint takes by name, as `preserve_rng_state`.
    """
    keeps_on_cpu = _settings.get("cpu", False) and torch.cuda.is_available()
    with save_on_cpu(pin_memory=True) if keeps_on_cpu else nullcontext():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


class RandomStates:
    """Random states of the device by name, next to the current one; Megatron's loops draw their dropout from them."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        """Forgets all that `configure` has set."""
        self._states = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        """The random states by name, for a checkpoint."""
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Takes what `get_states` gave."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new one, from `seed`; raises ValueError for a name that there is."""
        if name in self._states:
            raise ValueError(f"the random state {name!r} exists already; call reset() first, or choose another name")
        with _current_state_kept():
            get_accelerator().manual_seed(seed)
            self._states[name] = get_accelerator().get_rng_state()

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, the device draws from the state `name`, which goes on where the last block left it."""
        if name not in self._states:
            raise ValueError(f"there is no random state {name!r}; add() it, or call model_parallel_cuda_manual_seed()")
        with _current_state_kept():
            get_accelerator().set_rng_state(self._states[name])
            try:
                yield
            finally:
                self._states[name] = get_accelerator().get_rng_state()


@contextmanager
def _current_state_kept() -> Iterator[None]:
    state = get_accelerator().get_rng_state()
    try:
        yield
    finally:
        get_accelerator().set_rng_state(state)


_random_states = RandomStates()


def get_cuda_rng_tracker() -> RandomStates:
    """The random states of this process."""
    return _random_states


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the device and the state "model-parallel-rng"; this process is alone in its model-parallel group."""
    _random_states.reset()
    get_accelerator().manual_seed(seed)
    _random_states.add(MODEL_PARALLEL, seed + SEED_OFFSET)
