"""The lowest level: a wrapped model, which a strategy can feed with tokens window by window.

Interface: Megatron Core's `inference/model_inference_wrappers/`. b rows, S columns, n columns of a window, V logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_engine.containers import InferenceModel
from hybrid_engine.containers.cache import ModelCache
from hybrid_engine.distributed.verdict import Partners, everyone
from hybrid_engine.generation.memory import usable_memory_bytes
from hybrid_engine.generation.output import pack
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.ops import Batch, DecodeBatch

OWN_CACHES = ("past_key_values", "cache_params", "state")
"""Names of caches in transformers' models: most models, Mamba and similar ones, RWKV."""


class AbstractModelInferenceWrapper(ABC):
    """A model that returns logits for windows of columns of a batch of tokens.

    A strategy calls `prep_model_for_inference` once per batch, and then each window in turn, from the first column:
    `wrapper(wrapper.get_batch_for_context_window(start, end))`.
    """

    @abstractmethod
    def prep_model_for_inference(self, prompts_tokens: torch.Tensor) -> None:
        """Prepares for `prompts_tokens [b, S]` and keeps this tensor: the caller writes new tokens into it."""

    @abstractmethod
    def get_batch_for_context_window(self, context_start_position: int, context_end_position: int) -> list[Any]:
        """The inputs of `__call__` for columns from start to below end; the columns before start were fed already."""

    @abstractmethod
    def __call__(self, inference_input: list[Any]) -> torch.Tensor:
        """Logits `[b, n, V]` of the window; collective if processes share the model."""

    @property
    def partners(self) -> Partners:
        """The processes that generate together."""
        return everyone()

    @property
    def device(self) -> torch.device:
        """The device of the model's tokens."""
        return torch.device("cpu")

    def release(self) -> None:  # noqa: B027
        """Frees the state of the batch, if there is any."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which weights stay available for forward passes; windows outside it fetch them each time."""
        yield


class GPTInferenceWrapper(AbstractModelInferenceWrapper):
    """A causal model of an engine: runs its containers, or the model's own forward if it has none.

    Keys and values are kept for all rows from `prep_model_for_inference` to `release`.
    """

    def __init__(self, model: Any, args: Any = None):
        """Wraps the result of `initialize` or `init_inference`; `args`, Megatron's options, is only stored.

        Raises ValueError for anything else.
        """
        if not isinstance(getattr(model, "generator", None), Generator):
            raise ValueError(
                f"model is a {type(model).__name__}, which generates by no engine; pass what hybrid_engine.initialize "
                "(with hybrid_engine.enabled) or hybrid_engine.init_inference returns for it"
            )
        self.model, self.args = model, args
        self.prompts_tokens = torch.empty(0, 0, dtype=torch.int64)
        self._state: ModelCache | dict[str, Any] | None = None  # the containers' cache, or a module's
        self._num_fed = 0  # columns
        self._is_reading = False

    @property
    def generator(self) -> Generator:
        """The engine's generator."""
        return self.model.generator

    @property
    def is_plain(self) -> bool:
        """Whether no subclass overrides one of the three methods, so that the engine may run its model without them."""
        names = ("prep_model_for_inference", "get_batch_for_context_window", "__call__")
        return all(getattr(type(self), name) is getattr(GPTInferenceWrapper, name) for name in names)

    @property
    def partners(self) -> Partners:
        """The processes that generate together."""
        return self.generator.partners

    @property
    def device(self) -> torch.device:
        """The device of the model's tokens."""
        return self.generator.device

    def prep_model_for_inference(self, prompts_tokens: torch.Tensor) -> None:
        """Keeps `prompts_tokens [b, S]` int64 and drops the keys and values of the previous batch.

        Raises ValueError if the model is in training mode, if S exceeds its positions, or if memory does not suffice.
        """
        if self.generator.module.training:
            raise ValueError("prep_model_for_inference(): the engine is in training mode; call engine.eval() first")
        if prompts_tokens.dim() != 2 or 0 in prompts_tokens.shape:
            raise ValueError(f"prompts_tokens has shape {list(prompts_tokens.shape)}; pass [rows, tokens], none empty")
        containers = self.generator.model
        longest = None if containers is None else containers.max_positions
        if longest is not None and prompts_tokens.shape[1] > longest + 1:  # the last column need not be fed
            raise ValueError(
                f"prompts_tokens has {prompts_tokens.shape[1]} columns and the model {longest} positions; shorten the "
                "prompts or lower num_tokens_to_generate"
            )
        self.release()
        if containers is not None:
            _check_memory(containers, prompts_tokens)
        self.prompts_tokens = prompts_tokens

    def release(self) -> None:
        """Drops the batch, and frees the memory of its keys and values."""
        self.prompts_tokens = self.prompts_tokens.new_empty(0, 0)
        self._state, self._num_fed = None, 0

    def get_batch_for_context_window(self, context_start_position: int, context_end_position: int) -> list[Any]:
        """Tokens and positions of the window, `[b, n]` int64 each.

        Raises ValueError for an empty window, or one outside the batch.
        """
        start, end, width = context_start_position, context_end_position, self.prompts_tokens.shape[1]
        if not 0 <= start < end <= width:
            raise ValueError(f"the window from {start} to {end} must lie in 0..{width} and hold a token")
        tokens = self.prompts_tokens[:, start:end]
        positions = torch.arange(start, end, device=tokens.device).expand(len(tokens), -1)
        return [tokens, positions]

    def __call__(self, inference_input: list[Any]) -> torch.Tensor:
        """Logits `[b, n, V]` fp32 for the result of `get_batch_for_context_window`; collective like `generate()`.

        Raises ValueError for a window that does not begin where the last one ended.
        """
        tokens, positions = inference_input
        start, end = int(positions[0, 0]), int(positions[0, -1]) + 1
        if start != self._num_fed and start > 0:
            raise ValueError(
                f"the window begins at {start} and the last one ended at {self._num_fed}; feed all in turn"
            )
        with self.reading():
            containers = self.generator.model
            if containers is None:
                logits = self._run_module(tokens, positions)
            elif start == 0:
                logits = self.generator.group.agree(lambda: self._prefill(containers, tokens))
            else:
                logits = self.generator.group.agree(lambda: self._feed(containers, tokens, start))
        self._num_fed = end
        return logits

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which the weights stay gathered and adapters fused for any number of windows; collective."""
        if self._is_reading:
            yield
            return
        with self.model.reading_weights():
            self._is_reading = True
            try:
                yield
            finally:
                self._is_reading = False

    def _run_module(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Runs the module's own forward; feeds all tokens again if its cache cannot continue by this window.

        Recurrent layers continue by single columns only: with more columns, they silently restart from an empty state.
        """
        module = self.generator.module
        is_rotary = getattr(module.config.get_text_config(), "rope_parameters", None) is not None  # type: ignore[union-attr, operator]
        # Bamba would count positions from 0 again. Models with position embeddings may count from another number.
        where = {"position_ids": positions} if is_rotary and "position_ids" in self.generator.accepted_names else {}
        if positions[0, 0] == 0:
            output = module(input_ids=tokens, use_cache=True)
        elif isinstance(self._state, dict) and tokens.shape[1] == 1:
            output = module(input_ids=tokens, use_cache=True, **self._state, **where)
        else:
            output = module(input_ids=self.prompts_tokens[:, : int(positions[0, -1]) + 1], use_cache=True)
        self._state = _own_cache(output)
        return output.logits[:, -tokens.shape[1] :].float()

    def _prefill(self, model: InferenceModel, tokens: torch.Tensor) -> torch.Tensor:
        """The first window: whole rows one after the other, row r in block and slot r."""
        num_rows, length = tokens.shape
        width = self.prompts_tokens.shape[1]
        model.prepare_positions(width)
        self._state = cache = model.new_cache(num_rows, width, num_rows)
        batch = pack(tokens.reshape(-1), [length] * num_rows)
        return model.forward(batch, cache, self.generator.layers()).unflatten(0, (num_rows, length))

    def _feed(self, model: InferenceModel, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """A later window, which attends to those before it; a single column is a decode step."""
        assert isinstance(self._state, ModelCache)
        (num_rows, num_columns), device = tokens.shape, tokens.device
        batch: Batch = pack(tokens.reshape(-1), [num_columns] * num_rows, num_before=start)
        if num_columns == 1:
            batch = DecodeBatch(
                tokens=tokens.reshape(-1),
                positions=torch.full((num_rows,), start, device=device),
                block_tables=torch.arange(num_rows, device=device)[:, None],
                context=start + 1,
                is_identity=True,
                state_slots=torch.arange(num_rows, device=device),
            )
        return model.forward(batch, self._state, self.generator.layers()).unflatten(0, tokens.shape)


def _own_cache(output: Any) -> dict[str, Any] | None:
    """The cache in a module's `output`, in the form that its forward takes; None if there is none."""
    if getattr(output, "state", None) is not None and len(output.logits) > 1:
        return None  # RWKV's forward mixes the states of rows in single-column steps
    found = {name: cache for name in OWN_CACHES if (cache := getattr(output, name, None)) is not None}
    return found or None


def _check_memory(model: InferenceModel, tokens: torch.Tensor) -> None:
    num_rows, width = tokens.shape
    wanted = model.cache_shape(num_rows, width, num_rows).num_bytes(model.dtype)
    free = usable_memory_bytes(model.device)
    if wanted > free:
        raise ValueError(
            f"prompts_tokens {list(tokens.shape)}: keys and values of all of them take {wanted:,} bytes, and {free:,} "
            "are free; pass fewer rows at a time"
        )
