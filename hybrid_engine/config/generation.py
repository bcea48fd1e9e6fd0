"""The `hybrid_engine` block: how the engine generates."""

from dataclasses import dataclass
from typing import ClassVar

from hybrid_engine.config.checks import check_flag, check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class HybridEngineConfig:
    """`hybrid_engine`: generation inside the training engine."""

    prefix: ClassVar[str] = "hybrid_engine."
    """What messages of generation put before a key, to name it as its user gives it."""
    enabled: bool = False
    """Whether `initialize` returns a `HybridEngine` instead of a `ZeroEngine`."""
    max_out_tokens: int = 512
    """Prompt and answer tokens that one sequence may hold together."""
    inference_tp_size: int = 1
    """Tensor-parallel degree inside `generate()`: so many consecutive processes share the model and their prompts."""
    release_inference_cache: bool = False
    """Whether the KV workspace gives its memory back after each `generate()`; false keeps it where there is room."""
    pin_parameters: bool = True
    """Gather the whole model once around `generate()`, adapters fused, quantised weights dequantised; false streams it
    layer by layer, in the memory of two."""
    enable_cuda_graph: bool = True
    """Whether a decode step is replayed wherever it can be: on a GPU as one graph, on a CPU from a tape of its calls.

    DeepSpeed's default is false.
    """
    tp_gather_partition_size: int = 8
    """Layers whose parts are on their way at a time when processes share the model."""
    max_running: int = 0
    """Rows decoded at once; 0 lets the engine choose. This key and those below are not DeepSpeed's."""
    kv_block_size: int = 0
    """Tokens per block of the KV workspace; 0 lets the engine choose."""
    max_kv_blocks: int = 0
    """Cap on the blocks of the KV workspace; 0 sizes it from the demand and the free memory."""
    training_free_share: float = 0.1
    """The KV workspace stays through `train()` if beside what training takes this share of memory is free; 1: never."""
    print_latency: bool = True
    """Whether `eval()` prints where the iteration's time went, as DeepSpeed's does; `latency_stats()` has it always."""

    exact: bool = False
    """Whether a token's log-probability has the same bits in every batch and in training: docs/exact.md."""

    def __post_init__(self) -> None:
        for name in (
            "enabled",
            "release_inference_cache",
            "pin_parameters",
            "enable_cuda_graph",
            "print_latency",
            "exact",
        ):
            check_flag(f"hybrid_engine.{name}", getattr(self, name))
        for name in ("max_out_tokens", "inference_tp_size", "tp_gather_partition_size"):
            check_integer(f"hybrid_engine.{name}", getattr(self, name), 1)
        for name in ("max_running", "kv_block_size", "max_kv_blocks"):
            check_integer(f"hybrid_engine.{name}", getattr(self, name), 0)
        check_number("hybrid_engine.training_free_share", self.training_free_share, 0, 1)
        if self.inference_tp_size > 1 and not self.pin_parameters:
            raise ValueError(
                f"hybrid_engine.inference_tp_size={self.inference_tp_size} keeps each process's part of the weights "
                "for a whole rollout, which pin_parameters=false forbids; leave pin_parameters at true"
            )
        if self.exact and (self.inference_tp_size > 1 or not self.pin_parameters):
            raise ValueError(
                "hybrid_engine.exact generates with the whole model on each process; use inference_tp_size=1 and "
                "pin_parameters=true"
            )
