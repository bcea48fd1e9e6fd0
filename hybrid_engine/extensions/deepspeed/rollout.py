"""`deepspeed.runtime.rollout`: prompts in, prompts with answers out, behind an interface that hides who generates.

    rollout = build_rollout(RolloutConfig(), student_engine=engine, tokenizer=tokenizer)
    batch = rollout.generate(RolloutRequest(prompt_ids, prompt_attention_mask), SamplingConfig(max_new_tokens=64))

Names, defaults and meanings are DeepSpeed's (deepspeed/runtime/rollout/base.py and hybrid_engine_rollout.py, 0.19.8 and
the branch after it, which has `adaptive_prefill`).
Ours differs where an option does nothing there: `top_k` filters, and an end-of-sequence token ends its sequence, whose
place another one takes, instead of decoding all to `max_new_tokens`.

B prompts of padded width P, G samples of each, T the longest answer. The dataclasses are not frozen, as DeepSpeed's
are not: scripts derive theirs from them and assign to their fields.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.config.checks import check_choice, check_integer, check_number
from hybrid_engine.engine.hybrid_engine import HybridEngine
from hybrid_engine.generation.output import response_lengths
from hybrid_engine.generation.rollout.preparing import check_left_padded

__all__ = [
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "build_rollout",
]


@dataclass
class RolloutConfig:
    """Which engine generates, and how."""

    engine: str = "hybrid_engine"
    """There is one: the training engine itself."""
    use_graph_capture: bool = False
    """Has no meaning here: `hybrid_engine.enable_cuda_graph` of the engine's config says it."""


@dataclass
class HybridEngineRolloutConfig:
    """DeepSpeed's options of its rollout; none changes a token.

    Only `enable_profiling` asks for what is not there. The others have no meaning here: decode steps are recorded as
    graphs wherever they can be, the samples of a prompt share its prefill, prompts are packed without their padding,
    and the KV workspace is paged and sized from the demand.
    """

    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    adaptive_prefill: bool = False
    prefill_max_tokens: int | None = 65536
    prefill_fixed_cost_ms: float = 25.0
    prefill_token_cost_ms: float = 0.1
    prefill_attention_cost_ms: float = 0.01
    prefill_kv_cost_ms: float = 0.04
    continuous_decode_cost_ms: float = 10.0
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None

    def __post_init__(self) -> None:
        if self.enable_profiling:
            raise ValueError(
                "enable_profiling=True: there is no profile of a single rollout; leave it out and read "
                "engine.latency_stats(), which has the seconds of prefill and decoding"
            )


@dataclass
class SamplingConfig:
    """How answers are drawn."""

    max_new_tokens: int
    """Tokens of the longest answer."""
    temperature: float = 1.0
    """The divisor of logits; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """Probability of the likeliest tokens that are drawn from; 1 is off."""
    top_k: int = -1
    """How many of the likeliest tokens are drawn from; -1 is off."""
    n_samples_per_prompt: int = 1
    """G; with a temperature of 0 they are equal."""
    continuous_batch_size: int | None = None
    """Has no meaning here: waiting rows always enter free places; `hybrid_engine.max_running` is their number."""

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_number("temperature", self.temperature, 0)
        check_number("top_p", self.top_p, 0, 1)
        check_integer("top_k", self.top_k, -1)
        check_integer("n_samples_per_prompt", self.n_samples_per_prompt, 1)
        if self.continuous_batch_size is not None:
            check_integer("continuous_batch_size", self.continuous_batch_size, 1)


@dataclass
class RolloutRequest:
    """Prompts, padded on the left so that answers follow them directly.

    Raises:
        ValueError: other shapes; a prompt without a token; padding after one.
    """

    prompt_ids: torch.Tensor
    """`[B, P]` int64."""
    prompt_attention_mask: torch.Tensor
    """`[B, P]`, 1 for tokens."""

    def __post_init__(self) -> None:
        if self.prompt_ids.dim() != 2:
            raise ValueError(f"prompt_ids has shape {list(self.prompt_ids.shape)}; it must be [batch, prompt length]")
        _check_shape("prompt_attention_mask", self.prompt_attention_mask, self.prompt_ids.shape, "prompt_ids")
        check_left_padded("prompt_attention_mask", self.prompt_attention_mask.bool())


@dataclass
class RolloutBatch:
    """Prompts with their answers, the samples of a prompt in successive rows.

    Raises:
        ValueError: the shapes do not fit together.
    """

    input_ids: torch.Tensor
    """`[B*G, P+T]` int64: the padded prompt, the answer, padding."""
    attention_mask: torch.Tensor
    """`[B*G, P+T]` int64: 1 for the prompt's tokens and the answer's up to its end-of-sequence token."""
    response_start_idx: torch.Tensor
    """`[B*G]` int64: the column of the answer's first token, P."""

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2:
            raise ValueError(f"input_ids has shape {list(self.input_ids.shape)}; it must be [batch, length]")
        _check_shape("attention_mask", self.attention_mask, self.input_ids.shape, "input_ids")
        _check_shape("response_start_idx", self.response_start_idx, self.input_ids.shape[:1], "input_ids' rows")

    @property
    def batch_size(self) -> int:
        """Rows, B*G."""
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        """Tokens of a row, P+T."""
        return self.input_ids.shape[1]


class RolloutEngine(ABC):
    """Generates for a trainer that does not know how."""

    name: str = "base"

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Answers to the prompts, with the weights of the last `sync_weights`."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Hands the weights of training step `step` to the engine that generates."""

    def shutdown(self) -> None:  # noqa: B027 - most hold nothing
        """Gives back what the engine holds for its rollouts."""


class HybridEngineRollout(RolloutEngine):
    """Rollouts from the training engine's own weights."""

    name = "hybrid_engine"

    def __init__(
        self, engine: HybridEngine, tokenizer: Any, cfg: RolloutConfig | HybridEngineRolloutConfig | None = None
    ) -> None:
        """`tokenizer` is asked for its `eos_token_id` and `pad_token_id` at every rollout; one of them must be set.

        Raises:
            ValueError: an engine that does not generate.
        """
        if not isinstance(engine, HybridEngine):
            raise ValueError(
                f"HybridEngineRollout: the engine is a {type(engine).__name__}, which does not generate; set "
                f"hybrid_engine.enabled in its config"
            )
        self.engine, self.tokenizer, self.cfg = engine, tokenizer, cfg

    @torch.no_grad()
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Collective on several processes, whose numbers of prompts may differ.

        An engine in training mode is in evaluation mode meanwhile, which ends an iteration of its latency line.
        """
        eos, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        if eos is None and pad is None:
            raise ValueError("the tokenizer has neither pad_token_id nor eos_token_id; set tokenizer.pad_token")
        options = {**_options(sampling), "eos_token_id": eos, "pad_token_id": eos if pad is None else pad}
        was_training = self.engine.module.training
        if was_training:
            self.engine.eval()
        try:
            output = self.engine.generate(request.prompt_ids, attention_mask=request.prompt_attention_mask, **options)
        finally:
            if was_training:
                self.engine.train()
        assert isinstance(output, torch.Tensor)
        num_equal = sampling.n_samples_per_prompt if sampling.temperature == 0 else 1
        return _to_batch(request, output.repeat_interleave(num_equal, dim=0), sampling.n_samples_per_prompt, eos)

    def sync_weights(self, step: int) -> None:
        """Does nothing: there is one set of weights."""

    def shutdown(self) -> None:
        """Frees the KV workspace; another rollout takes it again."""
        self.engine.release_inference_cache()


def build_rollout(
    rollout_cfg: RolloutConfig,
    student_engine: HybridEngine | None = None,
    tokenizer: Any = None,
    student_model_path: str | None = None,
) -> RolloutEngine:
    """The rollout engine that `rollout_cfg.engine` names.

    `student_model_path` is for engines that load weights of their own, which this one does not.

    Raises:
        ValueError: another engine than "hybrid_engine"; no engine or no tokenizer.
    """
    check_choice("engine", rollout_cfg.engine, ("hybrid_engine",))
    if student_engine is None or tokenizer is None:
        raise ValueError("build_rollout(): engine='hybrid_engine' needs both student_engine and tokenizer; pass both")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)


def _options(sampling: SamplingConfig) -> dict[str, Any]:
    """A SamplingConfig as options of `generate()`."""
    if sampling.temperature == 0:
        return {"max_new_tokens": sampling.max_new_tokens, "do_sample": False, "num_return_sequences": 1}
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "num_return_sequences": sampling.n_samples_per_prompt,
    }


def _to_batch(request: RolloutRequest, sequences: torch.Tensor, num_samples: int, eos: int | None) -> RolloutBatch:
    """`sequences [B*G, P+T]` with their mask."""
    width = request.prompt_ids.shape[1]
    responses = sequences[:, width:]
    lengths = response_lengths(responses, () if eos is None else (eos,))
    is_token = torch.arange(responses.shape[1], device=lengths.device) < lengths[:, None]
    prompt_mask = request.prompt_attention_mask.bool().repeat_interleave(num_samples, dim=0)
    return RolloutBatch(
        input_ids=sequences,
        attention_mask=torch.cat([prompt_mask.to(is_token.device), is_token], dim=1).long(),
        response_start_idx=torch.full_like(lengths, width),
    )


def _check_shape(name: str, tensor: torch.Tensor, expected: torch.Size, of: str) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be that of {of}, {list(expected)}")
