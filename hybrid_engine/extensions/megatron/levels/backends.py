"""The highest level: prompts as text in, a dict of tokens and texts out.

Interface: Megatron Core's `inference/backends/` and `inference/common_generate_function.py`.

    strategy = SimpleTextGenerationStrategy(GPTInferenceWrapper(engine), tokenizer)
    result = common_generate(choose_backend(strategy), ["Once upon"], CommonInferenceParams(num_tokens_to_generate=20))
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_engine.config.checks import check_integer
from hybrid_engine.config.notices import say_once
from hybrid_engine.extensions.megatron.levels.continuation import PER_TURN, Continuation, call_transformers, collect
from hybrid_engine.extensions.megatron.levels.parameters import CommonInferenceParams
from hybrid_engine.extensions.megatron.levels.strategy import SimpleTextGenerationStrategy
from hybrid_engine.extensions.megatron.levels.wrapped_model import GPTInferenceWrapper


class AbstractBackend(ABC):
    """Base class of the backends that `common_generate` runs prompts through."""

    @abstractmethod
    def generate(self, prompts: list[str], common_inference_params: CommonInferenceParams) -> dict[str, Any]:
        """Continues the prompts; collective.

        Returns:
            On rank 0: `prompts_tokens_with_generations [b, S]` int64, padded with the end token;
            `prompts_plus_generations_detokenized`, b texts; `output_log_probs [b, S - 1]` fp32, or None. On other
            ranks an empty dict.
        """


def common_generate(
    inference_backend: AbstractBackend, prompts: list[str], common_inference_params: CommonInferenceParams | None = None
) -> dict[str, Any]:
    """Continues `prompts` by `inference_backend`, see `AbstractBackend.generate`; uses default parameters if None."""
    return inference_backend.generate(prompts, common_inference_params or CommonInferenceParams())


def choose_backend(strategy: SimpleTextGenerationStrategy, random_seed: int | None = None) -> AbstractBackend:
    """The native backend, or transformers' `generate()` if the model has no containers; a message says why.

    A strategy that overrides the loop or one of its steps always runs natively, because transformers would not call it.
    """
    wrapper = strategy.inference_wrapped_model
    is_own = any(map(strategy.is_overridden, (*PER_TURN, "generate_output_tokens")))
    if not isinstance(wrapper, GPTInferenceWrapper) or not wrapper.is_plain or wrapper.generator.model is not None:
        return NativeBackend(strategy, random_seed)
    if is_own:
        return NativeBackend(strategy, random_seed)
    say_once(f"prompts go to transformers' generate(): {wrapper.generator.fallback_reason}")
    return TransformersBackend(strategy, random_seed)


class NativeBackend(AbstractBackend):
    """Runs the strategy's methods.

    Args:
        random_seed: for all random draws of a call; None: torch's generator continues.
    """

    def __init__(self, text_generation_strategy: SimpleTextGenerationStrategy, random_seed: int | None = None):
        if random_seed is not None:
            check_integer("random_seed", random_seed, -(2**63), 2**63 - 1)
        self.text_generation_strategy, self.random_seed = text_generation_strategy, random_seed

    def generate(self, prompts: list[str], common_inference_params: CommonInferenceParams) -> dict[str, Any]:
        """See `AbstractBackend`; raises ValueError before any work for parameters out of range."""
        strategy, params = self.text_generation_strategy, common_inference_params
        params.check()
        with _seeded(self.random_seed, strategy.inference_wrapped_model.device):
            tokens, lengths = strategy.tokenize_and_pad_input_prompts(prompts, params.num_tokens_to_generate)
            continued = self._continue(tokens, lengths, params)
        if strategy.inference_wrapped_model.partners.rank != 0:
            return {}
        tokens, lengths, log_probs = continued
        return {
            "prompts_tokens_with_generations": tokens,
            "prompts_plus_generations_detokenized": strategy.detokenize_generations(tokens, lengths),
            "output_log_probs": log_probs,
        }

    def _continue(
        self, tokens: torch.Tensor, lengths: torch.Tensor, params: CommonInferenceParams
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.text_generation_strategy.generate_output_tokens(tokens, lengths, params)


class TransformersBackend(NativeBackend):
    """Runs the model's own `generate()` between the strategy's tokenization and detokenization.

    Raises ValueError for a strategy with an overridden method that this would not call.
    """

    def __init__(self, text_generation_strategy: SimpleTextGenerationStrategy, random_seed: int | None = None):
        super().__init__(text_generation_strategy, random_seed)
        for name in (*PER_TURN, "generate_output_tokens"):
            if text_generation_strategy.is_overridden(name):
                raise ValueError(
                    f"TransformersBackend: {type(text_generation_strategy).__name__} overrides {name}, which "
                    "transformers' generate() does not call; use NativeBackend"
                )
        if not isinstance(text_generation_strategy.inference_wrapped_model, GPTInferenceWrapper):
            kind = type(text_generation_strategy.inference_wrapped_model).__name__
            raise ValueError(f"TransformersBackend: {kind} has no model with generate(); use NativeBackend")

    def _continue(
        self, tokens: torch.Tensor, lengths: torch.Tensor, params: CommonInferenceParams
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        strategy = self.text_generation_strategy
        continued = [Continuation([], 0)] * len(tokens)
        if params.num_tokens_to_generate > 0:
            continued = call_transformers(strategy, tokens, lengths.tolist(), params)
        return collect(strategy, tokens, lengths, continued, params)


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators of the CPU and of `device`, and restores them afterwards; does nothing for None."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield
