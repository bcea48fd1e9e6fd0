"""The lowest level: a model, wrapped so that a strategy can feed it tokens window by window.

Interface: Megatron Core's `inference/model_inference_wrappers/`. b rows, S columns, n columns of a window, V logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_engine.containers import InferenceModel
from hybrid_engine.distributed.verdict import Partners, everyone
from hybrid_engine.generation.batching.memory import usable_memory_bytes
from hybrid_engine.generation.model.scoring import pack
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.ops import Batch, DecodeBatch

OWN_CACHES = ("past_key_values", "cache_params", "state")
"""Names that transformers' models give their caches: most, Mamba and its like, RWKV."""


class AbstractModelInferenceWrapper(ABC):
    """A model that gives logits for windows of columns of a batch of tokens.

    A strategy calls `prep_model_for_inference` once for a batch, and then each window in turn, from the first column:
    `wrapper(wrapper.get_batch_for_context_window(start, end))`.
    """

    @abstractmethod
    def prep_model_for_inference(self, prompts_tokens: torch.Tensor) -> None:
        """Gets ready for `prompts_tokens [b, S]`, which are kept: new tokens are written into them."""

    @abstractmethod
    def get_batch_for_context_window(self, context_start_position: int, context_end_position: int) -> list[Any]:
        """The inputs of `__call__` for columns from start to below end; those before start have been fed."""

    @abstractmethod
    def __call__(self, inference_input: list[Any]) -> torch.Tensor:
        """Logits `[b, n, V]` of the window; collective where processes share the model."""

    @property
    def partners(self) -> Partners:
        """The processes that generate together."""
        return everyone()

    @property
    def device(self) -> torch.device:
        """Where the model's tokens belong."""
        return torch.device("cpu")

    def release(self) -> None:  # noqa: B027
        """Forgets the batch, where something is kept of it."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the model's weights stay where forward passes find them; windows outside of it fetch them each."""
        yield


class GPTInferenceWrapper(AbstractModelInferenceWrapper):
    """A causal model of an engine: its containers, or the model's own forward where it has none.

    Keys and values are kept for all rows from `prep_model_for_inference` to `release`.
    """

    def __init__(self, model: Any, args: Any = None):
        """Wraps what `initialize` or `init_inference` returned; `args`, Megatron's options, are the model's own here.

        Raises ValueError for anything else.
        """
        if not isinstance(getattr(model, "generator", None), Generator):
            raise ValueError(
                f"model is a {type(model).__name__}, which generates by no engine; pass what hybrid_engine.initialize "
                "(with hybrid_engine.enabled) or hybrid_engine.init_inference returns for it"
            )
        self.model, self.args = model, args
        self.prompts_tokens = torch.empty(0, 0, dtype=torch.int64)
        self._state: torch.Tensor | dict[str, Any] | None = None  # the containers' keys and values, or the module's own
        self._num_fed = 0  # columns
        self._is_reading = False

    @property
    def generator(self) -> Generator:
        """The engine's generator."""
        return self.model.generator

    @property
    def is_plain(self) -> bool:
        """Whether none of the three methods is a subclass's, so that the engine may run its model without them."""
        names = ("prep_model_for_inference", "get_batch_for_context_window", "__call__")
        return all(getattr(type(self), name) is getattr(GPTInferenceWrapper, name) for name in names)

    @property
    def partners(self) -> Partners:
        """The processes that generate together."""
        return self.generator.partners

    @property
    def device(self) -> torch.device:
        """Where the model's tokens belong."""
        return self.generator.device

    def prep_model_for_inference(self, prompts_tokens: torch.Tensor) -> None:
        """Keeps `prompts_tokens [b, S]` int64 and forgets the keys and values of the batch before.

        Raises ValueError where the model is in training mode, S is more than it can hold or memory does not suffice.
        """
        if self.generator.module.training:
            raise ValueError("prep_model_for_inference(): the engine is in training mode; call engine.eval() first")
        if prompts_tokens.dim() != 2 or 0 in prompts_tokens.shape:
            raise ValueError(f"prompts_tokens has shape {list(prompts_tokens.shape)}; pass [rows, tokens], none empty")
        containers = self.generator.model
        longest = None if containers is None else containers.max_positions
        if longest is not None and prompts_tokens.shape[1] > longest + 1:  # the last one need not be fed
            raise ValueError(
                f"prompts_tokens has {prompts_tokens.shape[1]} columns and the model {longest} positions; shorten the "
                "prompts or lower num_tokens_to_generate"
            )
        self.release()
        if containers is not None:
            _check_memory(containers, prompts_tokens)
        self.prompts_tokens = prompts_tokens

    def release(self) -> None:
        """Forgets the batch, and gives the memory of its keys and values back."""
        self.prompts_tokens = self.prompts_tokens.new_empty(0, 0)
        self._state, self._num_fed = None, 0

    def get_batch_for_context_window(self, context_start_position: int, context_end_position: int) -> list[Any]:
        """Tokens and positions of the window, `[b, n]` int64 each.

        Raises ValueError for an empty window, or one that leaves tokens out.
        """
        start, end, width = context_start_position, context_end_position, self.prompts_tokens.shape[1]
        if not 0 <= start < end <= width:
            raise ValueError(f"the window from {start} to {end} must lie in 0..{width} and hold a token")
        tokens = self.prompts_tokens[:, start:end]
        positions = torch.arange(start, end, device=tokens.device).expand(len(tokens), -1)
        return [tokens, positions]

    def __call__(self, inference_input: list[Any]) -> torch.Tensor:
        """Logits `[b, n, V]` fp32 for what `get_batch_for_context_window` gave; collective as `generate()` is.

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
        """Inside, the weights stay gathered and adapters fused for any number of windows; collective."""
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
        """The module's own forward; it is fed all tokens again where its cache does not go on by such a window.

        Recurrent layers go on by single columns only: more, and they begin from nothing without a word.
        """
        module = self.generator.module
        is_rotary = getattr(module.config.get_text_config(), "rope_parameters", None) is not None  # type: ignore[union-attr, operator]
        # Bamba would count them from 0 again; where they are embedded, some models count from another number.
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
        """The first window: whole rows one after the other, row r in block r."""
        (num_rows, length), device = tokens.shape, tokens.device
        width = self.prompts_tokens.shape[1]
        model.prepare_positions(width)
        self._state = torch.zeros(model.kv_shape(num_rows, width), dtype=model.dtype, device=device)
        batch = pack(tokens.reshape(-1), [length] * num_rows)
        return model.forward(batch, self._state, self.generator.layers()).unflatten(0, (num_rows, length))

    def _feed(self, model: InferenceModel, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """A later window, which sees those before it; a single column is a decode step."""
        assert self._state is not None
        (num_rows, num_columns), device = tokens.shape, tokens.device
        batch: Batch = pack(tokens.reshape(-1), [num_columns] * num_rows, num_before=start)
        if num_columns == 1:
            batch = DecodeBatch(
                tokens=tokens.reshape(-1),
                positions=torch.full((num_rows,), start, device=device),
                block_tables=torch.arange(num_rows, device=device)[:, None],
                context=start + 1,
                is_identity=True,
            )
        return model.forward(batch, self._state, self.generator.layers()).unflatten(0, tokens.shape)


def _own_cache(output: Any) -> dict[str, Any] | None:
    """The cache in a module's `output`, as its forward takes it; None: there is none."""
    if getattr(output, "state", None) is not None and len(output.logits) > 1:
        return None  # RWKV's forward mixes up the states of rows where it goes on by single columns
    found = {name: cache for name in OWN_CACHES if (cache := getattr(output, name, None)) is not None}
    return found or None


def _check_memory(model: InferenceModel, tokens: torch.Tensor) -> None:
    wanted = torch.Size(model.kv_shape(*tokens.shape)).numel() * model.dtype.itemsize
    free = usable_memory_bytes(model.device)
    if wanted > free:
        raise ValueError(
            f"prompts_tokens {list(tokens.shape)}: keys and values of all of them take {wanted:,} bytes, and {free:,} "
            "are free; pass fewer rows at a time"
        )
