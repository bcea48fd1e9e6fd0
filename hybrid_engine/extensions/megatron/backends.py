"""The upper two levels: a backend, from texts to a dict of tokens and texts, and the strategy that it calls.

Interface: Megatron Core's `inference/backends/`, `inference/common_generate_function.py` and
`inference/text_generation_strategies/simple_text_generation_strategy.py`.

    strategy = SimpleTextGenerationStrategy(GPTInferenceWrapper(engine), tokenizer)
    result = common_generate(choose_backend(strategy), ["Once upon"], CommonInferenceParams(num_tokens_to_generate=20))

A strategy leads from prompts to tokens, through the model, and back to text. Each method can be overridden separately.
Without overrides, the engine's continuous batching continues the prompts. An overridden `sample_from_logits` or
`update_generation_status` is called at each step for the running rows. An overridden `generate_output_tokens` replaces
all of this.

b rows, S columns, V logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_engine.config.checks import check_integer
from hybrid_engine.config.notices import say_once
from hybrid_engine.extensions.megatron.continuation import (
    PER_TURN,
    CommonInferenceParams,
    Continuation,
    call_transformers,
    collect,
    first_decides,
    go_in_step,
    roll_out,
    sample,
)
from hybrid_engine.extensions.megatron.wrapped_model import AbstractModelInferenceWrapper, GPTInferenceWrapper


class SimpleTextGenerationStrategy:
    """Continues each prompt until its end token or `num_tokens_to_generate`.

    Args:
        inference_wrapped_model: provides the logits.
        tokenizer: from transformers, or with the method names of Megatron's: see `Tokenizing`.
    """

    def __init__(self, inference_wrapped_model: AbstractModelInferenceWrapper, tokenizer: Any):
        self.inference_wrapped_model, self.tokenizer = inference_wrapped_model, tokenizer
        self.tokenizing = Tokenizing(tokenizer)

    def is_overridden(self, name: str) -> bool:
        """Whether a subclass or instance replaces the method `name`."""
        method = getattr(self, name)
        return getattr(method, "__func__", method) is not getattr(SimpleTextGenerationStrategy, name)

    def tokenize_and_pad_input_prompts(
        self, prompts: list[str], num_tokens_to_generate: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank 0's prompts on all ranks: tokens `[b, S]` and their lengths `[b]`, int64; collective.

        Rows are padded on the right with the end token; S is the longest prompt's length plus `num_tokens_to_generate`.

        Raises:
            ValueError: no prompts, or one that is not a string or gives no token.
        """
        wrapper = self.inference_wrapped_model
        ids = first_decides(wrapper.partners, lambda: self._encode(prompts))
        width = max(map(len, ids)) + num_tokens_to_generate
        tokens = torch.full((len(ids), width), self.tokenizing.end, device=wrapper.device)
        for row, of_row in enumerate(ids):
            tokens[row, : len(of_row)] = torch.tensor(of_row)
        return tokens, torch.tensor([len(of_row) for of_row in ids], device=wrapper.device)

    def _encode(self, prompts: list[str]) -> list[list[int]]:
        if not isinstance(prompts, list | tuple) or not prompts:
            raise ValueError(f"prompts is {prompts!r:.80}; pass a list of at least one text")
        for number, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise ValueError(f"prompts[{number}] is a {type(prompt).__name__}; pass texts")
        ids = [self.tokenizing.encode(prompt) for prompt in prompts]
        for number, of_prompt in enumerate(ids):
            if not of_prompt:
                raise ValueError(f"prompts[{number}]={prompts[number]!r:.80} gives no token; pass a text that does")
        return ids

    def sample_from_logits(
        self,
        last_token_logits: torch.Tensor,
        common_inference_params: CommonInferenceParams,
        vocab_size: int | None = None,
    ) -> torch.Tensor:
        """`[b]` int64: the next token of each running row, drawn with torch's generator.

        With `use_greedy` or `top_k=1` it is the likeliest token; otherwise temperature, then top-k or top-p. Ids from
        `vocab_size` on are never drawn. `last_token_logits [b, V]` is not changed.

        Raises:
            ValueError: for top-k and top-p together or out of range.
        """
        return sample(last_token_logits, common_inference_params, vocab_size)

    def update_generation_status(
        self,
        updated_prompts_tokens: torch.Tensor,
        generation_started: torch.Tensor,
        current_context_end_position: int,
        is_generation_done_tensor: torch.Tensor,
        generated_sequence_lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that have ended, `[b]` bool, and the lengths of their answers, `[b]` int64, without end tokens.

        Args:
            updated_prompts_tokens: `[b, S]`, padded on the right.
            generation_started: `[b]` bool: rows whose newest token was generated and is at the position below.
                The returned values of other rows are not used.
            current_context_end_position: a column.
            is_generation_done_tensor, generated_sequence_lengths: `[b]`, before that token.
        """
        newest = updated_prompts_tokens[:, current_context_end_position]
        is_done = is_generation_done_tensor | (generation_started & (newest == self.tokenizing.end))
        return is_done, generated_sequence_lengths + (generation_started & ~is_done)

    def generate_output_tokens(
        self,
        prompts_tokens: torch.Tensor,
        prompts_lengths: torch.Tensor,
        common_inference_params: CommonInferenceParams,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Continues `prompts_tokens [b, S]`, whose rows have `prompts_lengths [b]` tokens; collective.

        Returns:
            tokens `[b, S']`, padded with the end token to the longest row; lengths `[b]` without end tokens; and with
            `return_log_probs` raw log-probabilities `[b, S' - 1]`, otherwise None: entry t is of token t + 1, including
            the prompt, and 0 beyond a row's end.
        """
        params, lengths = common_inference_params, prompts_lengths.tolist()
        params.check()
        if params.num_tokens_to_generate == 0:
            continued = [Continuation([], 0)] * len(lengths)
        elif self._runs_on_containers:
            continued = roll_out(self, prompts_tokens, lengths, params)
        else:
            continued = go_in_step(self, prompts_tokens, lengths, params)
        return collect(self, prompts_tokens, prompts_lengths, continued, params)

    @property
    def _runs_on_containers(self) -> bool:
        wrapper = self.inference_wrapped_model
        return isinstance(wrapper, GPTInferenceWrapper) and wrapper.is_plain and wrapper.generator.model is not None

    def detokenize_generations(self, tokens: torch.Tensor, required_sequence_lengths: torch.Tensor) -> list[str]:
        """The text of each row of `tokens [b, S]` up to its length in `required_sequence_lengths [b]`."""
        pairs = zip(tokens.tolist(), required_sequence_lengths.tolist(), strict=True)
        return [self.tokenizing.decode(ids[:length]) for ids, length in pairs]


class Tokenizing:
    """One interface for both kinds of `tokenizer`.

    Args:
        tokenizer: from transformers (`encode`, `decode`, `eos_token_id`), or one with `tokenize(text) -> ids`,
            `detokenize(ids)`, `eod` and `vocab_size`.

    Raises:
        ValueError: it has neither interface, or no end token.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._is_megatrons = hasattr(tokenizer, "detokenize") and hasattr(tokenizer, "eod")
        kind = type(tokenizer).__name__
        if not self._is_megatrons and not all(hasattr(tokenizer, name) for name in ("encode", "decode")):
            raise ValueError(
                f"tokenizer is a {kind} without encode() and decode(), and without tokenize(), detokenize() and eod; "
                "pass a tokenizer of transformers"
            )
        end = tokenizer.eod if self._is_megatrons else getattr(tokenizer, "eos_token_id", None)
        if end is None:
            raise ValueError(f"tokenizer: {kind} has no end token; set its eos_token, which ends and pads rows")
        self.end: int = int(end)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that are text, from 0 on. A model may have more logits, which pad its embedding."""
        return int(self.tokenizer.vocab_size if self._is_megatrons else len(self.tokenizer))

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, including tokens that the tokenizer adds around it."""
        return list(self.tokenizer.tokenize(text) if self._is_megatrons else self.tokenizer.encode(text))

    def decode(self, ids: list[int]) -> str:
        """The text of a sequence, without special tokens."""
        if self._is_megatrons:
            return self.tokenizer.detokenize(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=True)


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
