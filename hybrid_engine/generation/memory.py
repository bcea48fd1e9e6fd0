"""Memory of a rollout: free memory, what training will take of it, the KV workspace in it, and the plan of its blocks.

`plan_rollout` sizes the KV blocks and state slots of a rollout and the rows that run at once; all checks come before
any work. An engine releases the workspace where training needs its memory. `count_blocks` is the one formula for the
blocks and slots of a rollout, also for the memory plan of a run.
"""

import math
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.containers.cache import CacheShape, ModelCache
from hybrid_engine.containers.device import LastingBuffer, free_and_total_bytes, num_bytes
from hybrid_engine.containers.towers import feature_width
from hybrid_engine.generation.core import Prompt, RolloutPlan, Sequence
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.metrics.memory import format_bytes, read_bytes
from hybrid_engine.optim.optimizer import ZeroOptimizer
from hybrid_engine.zero.sharding import Sharding, local_tensor

if TYPE_CHECKING:
    from hybrid_engine.containers import InferenceModel
    from hybrid_engine.containers.towers import ImageInputs
    from hybrid_engine.generation.model.weights import WeightGatherer

# Share of the free memory that a rollout may take; the rest is for activations and logits.
USABLE_MEMORY = 0.8
STATE_VALUES = 2
"""Values that an optimizer is expected to keep per trained value before its first step: Adam's two moments."""
SERVED_SHARES = {"cpu": 0.5, "cuda": 0.9}
"""Default share of the free memory that a server's KV workspace may take, by device type.

On a CPU, other programs share the host. On a GPU the rest is for activations and logits.
"""
# Host memory of a sample: the Sequence with its lists, and for each token its id and log-probability, as Python objects
# and in the results.
BYTES_PER_SEQUENCE = 1024
BYTES_PER_TOKEN = 80
# Rows decoded at once unless the config sets another number. 256 answers of 128 tokens from a 16M-parameter Llama took
# 12.4, 9.5, 8.5 and 10.6 s at 32, 64, 128 and 256 rows (two Zen 5 cores, torch 2.13): beyond 64 the KV workspace
# doubles for little. The number for a GPU is a guess.
MAX_RUNNING = {"cpu": 64, "cuda": 256}
# On a CPU an automatic block holds a whole sequence, which makes the cache contiguous; rounded up to this many tokens.
BLOCK_GRAIN = 16
# On other devices attention reads through the block table at no cost, and small blocks are shared and waste little.
BLOCK_SIZE = 64
# A live batch on a CPU has small blocks too, where a decode step takes the same time with 16 tokens as with 64. Prompts
# share the full blocks of what they begin with alike, and 16 tokens are less than most templates of chats begin with.
LIVE_BLOCK_SIZE = {"cpu": 16}
NEEDED_SLOTS = 2
"""State slots of one sequence: its own, and that of the prompt which it forks from."""


def usable_memory_bytes(device: torch.device) -> int:
    """Number of bytes that a rollout may allocate on `device` now."""
    free, _ = free_and_total_bytes(device)
    return int(free * USABLE_MEMORY)


class PeakMeter(Protocol):
    """Measures the largest growth of the memory that tensors take."""

    def begin(self, forgets_earlier: bool) -> None:
        """Starts a measurement; without `forgets_earlier` a peak counts only if it exceeds all earlier ones."""

    def growth_bytes(self) -> int:
        """Returns the largest growth since `begin()` in bytes; 0 if an earlier peak hides it."""


class AllocatorPeak:
    """A PeakMeter of a CUDA device, from the peak of PyTorch's allocator, which user scripts read too."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start, self._earlier = device, 0, 0

    def begin(self, forgets_earlier: bool) -> None:
        """Starts a measurement. See PeakMeter."""
        if forgets_earlier:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)
        self._earlier = 0 if forgets_earlier else torch.cuda.max_memory_allocated(self._device)

    def growth_bytes(self) -> int:
        """Returns the growth of the peak since `begin()`. See PeakMeter."""
        peak = torch.cuda.max_memory_allocated(self._device)
        return peak - self._start if peak > self._earlier else 0


class TrainingMemory:
    """Bytes that training will take on `device` in this process.

    Args:
        sharding: sharding of the model.
        optimizer: None for an engine that only evaluates, which takes nothing.
        gradient_dtype: dtype of the reduced gradients that the optimizer steps with.
        device: device that the model computes on.
        meter: measures peaks; None if that is not possible, as on a CPU: activations then use the share that stays
            free.
    """

    def __init__(
        self,
        sharding: Sharding,
        optimizer: ZeroOptimizer | None,
        gradient_dtype: torch.dtype,
        device: torch.device,
        meter: PeakMeter | None,
    ) -> None:
        self._optimizer, self._device, self._meter = optimizer, device, meter
        trained = optimizer.parameters if optimizer is not None else []
        self._masters = [entry.master for entry in trained if entry.has_master]
        masters = [local_tensor(entry.master) for entry in trained]
        here = [master for master in masters if master.device.type == device.type]
        self._gradient_bytes = sum(master.numel() * gradient_dtype.itemsize for master in masters)
        if sharding.keeps_whole_gradients:
            self._gradient_bytes += sum(entry.param.numel() * entry.param.element_size() for entry in trained)
        self._kept_bytes = self._held_bytes() + STATE_VALUES * sum(master.nbytes for master in here)
        self._peak_bytes: int | None = None
        self._held_at_start: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the peak of the first step is known, or cannot be measured."""
        return self._meter is None or self._optimizer is None or self._peak_bytes is not None

    def missing_bytes(self) -> int:
        """Bytes still to be allocated: masters, optimizer state, gradients and, after a measured step, activations."""
        if self._optimizer is None:
            return 0
        return max(0, self._kept_bytes - self._held_bytes()) + max(self._gradient_bytes, self._peak_bytes or 0)

    def begin(self) -> None:
        """Starts a measurement when training begins; it ends with the next optimizer step."""
        if self._meter is not None and self._optimizer is not None:
            self._meter.begin(forgets_earlier=self._peak_bytes is None)
            self._held_at_start = self._held_bytes()

    def finish_step(self) -> None:
        """Records after an optimizer step the bytes that the optimizer keeps and the peak of the step."""
        if self._optimizer is None or self._optimizer.overflow:
            return
        self._kept_bytes = held = self._held_bytes()
        if self._meter is not None and self._held_at_start is not None:
            passing = self._meter.growth_bytes() - max(0, held - self._held_at_start)
            self._peak_bytes = max(self._peak_bytes or 0, passing)
            self._held_at_start = None

    def _held_bytes(self) -> int:
        """Bytes of masters and optimizer state on the device now."""
        if self._optimizer is None:
            return 0
        state = [v for values in self._optimizer.inner.state.values() for v in values.values() if torch.is_tensor(v)]
        return num_bytes(t for t in (*self._masters, *state) if t.device.type == self._device.type)


class KVWorkspace:
    """The cache of rollouts, in memory that is freed and allocated again at the same address."""

    def __init__(self) -> None:
        self._buffer = LastingBuffer()
        self.cache: ModelCache | None = None
        """The cache, whether or not its memory is allocated; None before the first rollout."""

    @property
    def allocated_bytes(self) -> int:
        """Number of bytes allocated now."""
        return self._buffer.num_bytes

    @property
    def resident_bytes(self) -> int:
        """Number of allocated bytes that have been written; on a CPU often fewer than are allocated."""
        return self._buffer.resident_bytes

    def take(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> ModelCache:
        """Returns a cache with its memory allocated; reuses the last one if it has as many blocks and slots, or more.

        New memory is zeroed: attention multiplies masked places by zero, which requires finite numbers.
        """
        cache = self.cache
        if cache is None or (cache.dtype, cache.device) != (dtype, device):
            cache = None
        elif self.allocated_bytes > 0 and shape.is_within(cache.shape):
            return cache
        memory = self._buffer.take_zeros((shape.num_bytes(dtype),), torch.uint8, device)
        if cache is None or cache.shape != shape:
            self.cache = cache = ModelCache(shape, dtype, memory)
        return cache

    def release(self) -> None:
        """Frees the memory and keeps its address."""
        self._buffer.release()

    def retake(self) -> None:
        """Allocates released memory again, zeroed; does nothing before the first rollout."""
        if self.cache is not None:
            self.take(self.cache.shape, self.cache.dtype, self.cache.device)


class MemoryLimit(NamedTuple):
    """Limit of a KV workspace: a number of bytes, or a share of the free memory."""

    text: str
    """The user's option, for errors."""
    num_bytes: int | None
    """Limit in bytes; None: `share` applies."""
    share: float = 1.0

    def of(self, free_bytes: int) -> int:
        """Returns the limit in bytes for `free_bytes`; raises ValueError if it exceeds them."""
        if self.num_bytes is None:
            return int(self.share * free_bytes)
        if self.num_bytes > free_bytes:
            raise ValueError(
                f"{self.text} is more than the {format_bytes(free_bytes)} left free by the model; lower it"
            )
        return self.num_bytes


def read_memory(memory: float | str | None, device_type: str, name: str = "memory") -> MemoryLimit:
    """Reads the limit from option `name`: a size such as "6GiB", or a share from 0 to 1; None: that of SERVED_SHARES.

    Raises:
        ValueError: `memory` is neither.
    """
    text = f"{name}={memory}"
    if memory is None:
        return MemoryLimit(text, None, SERVED_SHARES.get(device_type, 0.5))
    is_number = isinstance(memory, int | float) and not isinstance(memory, bool)
    try:
        share = float(memory) if is_number or isinstance(memory, str) else math.nan
    except ValueError:
        return MemoryLimit(text, read_bytes(str(memory), name.replace("_", "-")))
    if not 0 < share <= 1:
        raise ValueError(
            f"{name}={memory!r} must be a fraction of the free memory, above 0 and up to 1, or a size with its unit, "
            "such as 6GiB"
        )
    return MemoryLimit(text, None, share)


class MemoryBudget:
    """The memory of `device`, where a model generates and, unless `training` is None, trains. All methods are local."""

    def __init__(
        self,
        device: torch.device,
        config: HybridEngineConfig,
        gatherer: "WeightGatherer",
        workspace: KVWorkspace,
        training: TrainingMemory | None,
    ) -> None:
        self.device, self._config, self._gatherer = device, config, gatherer
        self._workspace, self._training = workspace, training

    def is_crowded(self, model: "InferenceModel | None") -> bool:
        """Whether the whole weights, with the adapters fused for the containers of `model`, do not fit."""
        if not self._gatherer.asks_for_memory:
            return False
        buffers = 0 if model is None else model.buffer_bytes()
        return self._gatherer.is_crowded(usable_memory_bytes(self.device) - buffers)

    def bytes_to_gather(self, model: "InferenceModel | None") -> int:
        """Bytes of weights and fused adapters that are allocated before the KV workspace."""
        buffers = 0 if model is None else model.buffer_bytes(self._gatherer.is_streamed)
        return self._gatherer.resident_bytes + buffers

    def spare_bytes(self, model: "InferenceModel | None") -> int:
        """Bytes available for a KV workspace: free memory and the current workspace, less what gathering will take."""
        held = self._workspace.resident_bytes
        return usable_memory_bytes(self.device) + held - self.bytes_to_gather(model)

    def served_bytes(self, model: "InferenceModel | None", limit: MemoryLimit) -> int:
        """Bytes for a server's KV workspace: `limit` of the memory that the weights leave free."""
        free, _ = free_and_total_bytes(self.device)
        if self.device.type == "cpu" and limit.num_bytes is None:  # divided among torchrun's processes on this host
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return limit.of(max(0, free + self._workspace.resident_bytes - self.bytes_to_gather(model)))

    @property
    def training_bytes(self) -> int:
        """Bytes that training will take while a KV workspace exists; 0 if it is released before training."""
        if self._training is None or self._config.release_inference_cache:
            return 0
        return self._training.missing_bytes()

    def make_room_for_training(self) -> None:
        """Releases the KV workspace unless training's bytes and a share of the memory are free beyond it."""
        if self._training is None or self._workspace.allocated_bytes == 0:
            return
        free, total = free_and_total_bytes(self.device)
        wanted = self._training.missing_bytes() + self._config.training_free_share * total
        if not self._training.is_known or free < wanted:
            self._workspace.release()

    def describe_kept_workspace(self) -> str:
        """Describes when a KV workspace is kept after a rollout."""
        if self._config.release_inference_cache:
            return "given back after each rollout"
        if self._training is None:
            return "kept between rollouts"
        share, taken = self._config.training_free_share, format_bytes(self._training.missing_bytes())
        return f"kept through training if {share:.0%} of the memory stays free beside the {taken} that takes"


def build_sequences(
    prompts: list[list[int]],
    options: list[GenerationOptions],
    num_samples: int,
    shares_equal: bool = False,
    images: "list[ImageInputs | None] | None" = None,
) -> list[Sequence]:
    """Builds `num_samples` sequences for each prompt, with its `options`; sample g of prompt b has row `b * G + g`.

    `images` are those of each prompt; None: no prompt has any.

    With `shares_equal`, equal prompts that follow each other are prefilled once, because trainers repeat a row for each
    sample of its group. Noise keys are set later.
    """
    sequences: list[Sequence] = []
    prompt = None
    for tokens, of_prompt, own in zip(prompts, options, images or [None] * len(prompts), strict=True):
        salt = b"" if own is None else own.salt
        new = Prompt(tokens, num_tops=of_prompt.rules.prompt_logprobs, images=own, salt=salt)
        if prompt is None or not shares_equal or not new.is_like(prompt):
            prompt = new
        sequences += [Sequence(prompt, len(sequences) + g, of_prompt) for g in range(num_samples)]
    return sequences


def check_lengths(
    prompts: list[list[int]],
    options: list[GenerationOptions],
    config: HybridEngineConfig,
    max_positions: int | None,
) -> None:
    """Raises ValueError if a prompt and its response exceed a limit other than memory.

    `options` has one entry for each prompt; `max_positions` is None for a model without such a limit.
    """
    pairs = zip(map(len, prompts), (of_prompt.max_new_tokens for of_prompt in options), strict=True)
    longest, max_new_tokens = max(pairs, key=sum, default=(0, 1))
    total = longest + max_new_tokens
    if max_positions is not None and total - 1 > max_positions:  # the last token drawn is never fed
        raise ValueError(
            f"max_new_tokens={max_new_tokens} with a prompt of {longest} tokens needs {total - 1} positions, "
            f"more than the model's max_position_embeddings={max_positions}; lower it or shorten the prompt"
        )
    if total > config.max_out_tokens:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} with a prompt of {longest} tokens makes {total}, more than "
            f"max_out_tokens={config.max_out_tokens}; lower it or raise max_out_tokens"
        )


def check_result_fits(prompts: list[list[int]], options: list[GenerationOptions]) -> None:
    """Raises ValueError if the bookkeeping and results of all samples exceed this machine's free memory."""
    num_samples = options[0].num_return_sequences if options else 1
    rows = len(prompts) * num_samples
    most_new = max((of_prompt.max_new_tokens for of_prompt in options), default=0)
    width = max(map(len, prompts), default=0) + most_new
    wanted = rows * (BYTES_PER_SEQUENCE + width * BYTES_PER_TOKEN)
    free = usable_memory_bytes(torch.device("cpu"))
    if wanted > free:
        raise ValueError(
            f"num_return_sequences={num_samples} of {len(prompts)} prompts with "
            f"max_new_tokens={most_new} makes {rows} sequences, whose tokens and log-probabilities take "
            f"about {wanted:,} bytes, and {free:,} are free; ask for fewer at a time"
        )


def plan_rollout(
    model: "InferenceModel",
    sequences: list[Sequence],
    options: GenerationOptions,
    config: HybridEngineConfig,
    spare_bytes: int,
    num_reserved: int = 0,
    training_bytes: int = 0,
    own: slice = slice(None),
    is_in_step: bool = False,
    is_live: bool = False,
) -> RolloutPlan:
    """Sizes the KV workspace from the demand of `sequences` and the memory available for it, `spare_bytes`.

    Args:
        num_reserved: blocks, and state slots, of the workspace that the plan may not use.
        training_bytes: memory left to training if that costs the rollout at most half of its blocks; otherwise the
            workspace is large and must be released before training.
        own: the sequences that this process returns.
        is_in_step: whether all sequences run at once.
        is_live: whether conversations are kept, which take state slots.

    Raises:
        ValueError: not even one sequence fits; names the number of blocks or state slots needed and available.
    """
    distinct = len({id(sequence.prompt) for sequence in sequences})
    num_prompts = len(sequences) // options.num_return_sequences if is_in_step else distinct
    # A process without prompts passes over the layers with the others, in a workspace for one token.
    lengths = [len(sequence) for sequence in sequences] or [1]
    longest = max((sequence.most_fed for sequence in sequences), default=1)
    spare_bytes -= feature_bytes(model, sequences)
    demand = count_blocks(lengths, longest, num_prompts, model.device.type, config, is_in_step=is_in_step)
    block_size, wanted, needed = demand.block_size, demand.wanted, demand.needed
    block_bytes = max(1, model.bytes_per_block(block_size))  # none if no layer keeps anything per token
    max_running, num_slots = _fit_slots(demand, block_bytes, model.bytes_per_slot(), spare_bytes, num_reserved, is_live)
    spare_bytes -= (num_slots + num_reserved) * model.bytes_per_slot()
    affordable = max(0, spare_bytes - num_reserved * block_bytes) // block_bytes
    beside_training = affordable - -(-training_bytes // block_bytes)
    if 2 * beside_training >= wanted:
        affordable = beside_training
    num_blocks = min(wanted, affordable, config.max_kv_blocks or affordable)
    if num_blocks < needed:
        most_new = max((sequence.options.max_new_tokens for sequence in sequences), default=options.max_new_tokens)
        is_capped = 0 < config.max_kv_blocks < min(wanted, affordable)
        raise ValueError(
            f"max_new_tokens={most_new}: {f'{len(lengths)} sequences in step' if is_in_step else 'a sequence'} of "
            f"{longest} tokens needs {needed} KV blocks of "
            f"{block_size} tokens ({needed * block_bytes:,} bytes) and there are {num_blocks} ({spare_bytes:,} bytes "
            f"are free); lower it or {f'raise {config.prefix}max_kv_blocks' if is_capped else 'free memory'}"
        )
    return RolloutPlan(
        sequences,
        own,
        options,
        num_blocks,
        block_size,
        max_running,
        num_slots,
        caches_prefixes=prefix_cache_reason(model, config) is None,
    )


def prefix_cache_reason(model: "InferenceModel", config: HybridEngineConfig) -> str | None:
    """Returns why rollouts of `model` compute every prompt from its first token on; None: prefixes are cached."""
    if not config.prefix_cache:
        return f"{config.prefix}prefix_cache is false"
    if config.exact and not config.kv_block_size and model.device.type == "cpu":
        return "in exact mode each sequence is one block, unless kv_block_size is set"
    if model.bytes_per_slot():
        return "layers keep a state per sequence, which cannot be cut"
    if model.angles.trained_length is not None:
        return "rotary frequencies depend on the length of a sequence"
    return None


def feature_bytes(model: "InferenceModel", sequences: list[Sequence]) -> int:
    """Bytes of the features of all different images, which are kept until the rollout ends."""
    images = [sequence.prompt.images for sequence in sequences]
    num_tokens = sum({own.digest: len(own.places) for own in images if own is not None}.values())
    return num_tokens * feature_width(model.base) * model.dtype.itemsize if num_tokens else 0


def _fit_slots(
    demand: "Demand", block_bytes: int, slot_bytes: int, spare_bytes: int, num_reserved: int, is_live: bool
) -> tuple[int, int]:
    """Returns the number of sequences that decode at once, and of state slots; (demand.max_running, 0) without states.

    Where memory is short, fewer sequences run: each has a slot, and blocks for its longest.

    Raises:
        ValueError: the needed slots and blocks do not fit.
    """
    if not slot_bytes:
        return demand.max_running, 0
    available = spare_bytes - num_reserved * (block_bytes + slot_bytes)
    bytes_needed = demand.needed * block_bytes + demand.needed_slots * slot_bytes
    if available < bytes_needed:
        raise ValueError(
            f"a rollout needs {demand.needed_slots} state slots of {slot_bytes:,} bytes and {demand.needed} KV blocks "
            f"of {demand.block_size} tokens, {bytes_needed:,} bytes in all, and {max(0, available):,} bytes are free; "
            "lower max_new_tokens or free memory"
        )
    wanted = demand.wanted_slots + (demand.max_running if is_live else 0)
    row_bytes = slot_bytes + demand.blocks_of_sequence * block_bytes
    num_slots = max(demand.needed_slots, min(wanted, available // row_bytes))
    if demand.needed_slots < demand.max_running:
        return min(demand.max_running, max(1, num_slots - 1)), num_slots
    return demand.max_running, num_slots


class Demand(NamedTuple):
    """The KV blocks and state slots that a rollout asks for."""

    block_size: int
    """Number of tokens of a block."""
    max_running: int
    """Number of sequences that decode at once."""
    wanted: int
    """Number of blocks with which no sequence waits for blocks."""
    needed: int
    """Number of blocks without which the rollout cannot run."""
    blocks_of_sequence: int
    """Number of blocks of the longest sequence."""
    wanted_slots: int
    """Number of state slots with which no sequence waits for one, if layers keep states."""
    needed_slots: int
    """Number of state slots without which the rollout cannot run."""


def count_blocks(
    lengths: Collection[int],
    longest: int,
    num_prompts: int,
    device_type: str,
    config: HybridEngineConfig,
    *,
    is_in_step: bool = False,
) -> Demand:
    """Counts the blocks of the sequences of `num_prompts` prompts.

    Args:
        lengths: number of tokens of each sequence before its first draw; not empty.
        longest: number of tokens that are fed of the longest sequence.
        num_prompts: a prompt shared by several samples counts once.
        device_type: device that the model computes on.
        config: the user's settings.
        is_in_step: whether all sequences run at once.
    """
    automatic = -(-longest // BLOCK_GRAIN) * BLOCK_GRAIN if device_type == "cpu" else BLOCK_SIZE
    block_size = config.kv_block_size or automatic
    most_running = len(lengths) if is_in_step else config.max_running or MAX_RUNNING.get(device_type, 256)
    max_running = min(most_running, len(lengths))
    per_sequence = -(-longest // block_size)
    kept = kept_prompts = 0
    if num_prompts < len(lengths):  # prompts stay until their last sample has started
        kept_prompts = min(num_prompts, -(-max_running * num_prompts // len(lengths)) + 1)
        kept = kept_prompts * -(-max(lengths) // block_size)
    wanted = max_running * per_sequence + kept
    if is_in_step:
        return Demand(block_size, max_running, wanted, wanted, per_sequence, max_running, max_running)
    slots = max_running + kept_prompts + 1, NEEDED_SLOTS if kept else 1  # one more for a prompt that is fed in chunks
    return Demand(block_size, max_running, wanted, per_sequence + (1 if kept else 0), per_sequence, *slots)
