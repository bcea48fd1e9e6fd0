"""Bytes that processes exchange and keep, by formula: `bench_scaling.py` counts them here and for large machines.

P parameters, of which P_root lie in the group that FSDP2 keeps whole between forward and backward (embedding, head,
final norm); b bytes of a parameter as it is computed with; gradients are reduced in fp32. A micro-batches in a step.
N processes, S that share one copy of the shards, t that share one model while they generate. Bytes are the sizes of
what a collective makes or takes whole; a process sends and receives (n-1)/n of that, twice for an all-reduce.
"""

from dataclasses import dataclass

FP32_BYTES = 4
MASTER_AND_MOMENTS_BYTES = 12  # of Adam, of one parameter


@dataclass(frozen=True, kw_only=True)
class Training:
    """One model under ZeRO."""

    num_parameters: int
    num_root_parameters: int
    param_bytes: int
    stage: int
    num_micro_batches: int = 1

    def gathered_bytes(self) -> int:
        """All-gathers of one optimizer step, over the S processes that share the shards."""
        if self.stage == 0:
            return 0
        if self.stage < 3:  # once, after the step
            return self.num_parameters * self.param_bytes
        # Forward, and backward but for what stays whole between them.
        per_pass = 2 * self.num_parameters - self.num_root_parameters
        return per_pass * self.param_bytes * self.num_micro_batches

    def scattered_bytes(self) -> int:
        """Reduce-scatters of one optimizer step, over the S processes."""
        if self.stage == 0:
            return 0
        return self.num_parameters * FP32_BYTES * (self.num_micro_batches if self.stage >= 2 else 1)

    def all_reduced_bytes(self, shard_size: int = 1) -> int:
        """All-reduces of one optimizer step over the groups that hold a copy of the shards each; norms not counted."""
        times = self.num_micro_batches if self.stage >= 2 else 1
        return self.num_parameters * FP32_BYTES * times // (1 if self.stage == 0 else shard_size)

    def kept_bytes(self, shard_size: int) -> float:
        """What a process keeps between steps: parameters, fp32 masters or not, two moments; gradients not counted."""
        own = 1 / shard_size
        parts = {"parameters": own if self.stage == 3 else 1, "optimizer": own if self.stage >= 1 else 1}
        state = MASTER_AND_MOMENTS_BYTES if self.param_bytes < FP32_BYTES else MASTER_AND_MOMENTS_BYTES - FP32_BYTES
        return self.num_parameters * (self.param_bytes * parts["parameters"] + state * parts["optimizer"])

    def rollout_bytes(self, tensor_parallel: int = 1) -> int:
        """What a process receives and holds of the weights for one rollout: all, or its slice."""
        return self.num_parameters * self.param_bytes // tensor_parallel


def ring_seconds(num_bytes: float, num_processes: int, bytes_per_second: float, is_all_reduce: bool = False) -> float:
    """The least time of a collective over a link of that rate."""
    return (2 if is_all_reduce else 1) * num_bytes * (num_processes - 1) / num_processes / bytes_per_second
