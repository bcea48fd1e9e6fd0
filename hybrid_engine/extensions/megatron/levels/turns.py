"""Calls a strategy's methods at each step of generation, for rows at different columns.

b rows, S columns, V logits. `continuation.py` uses this.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from hybrid_engine.distributed.verdict import Partners
from hybrid_engine.extensions.megatron.levels.parameters import CommonInferenceParams, mask_padding, sampling_options
from hybrid_engine.generation.core import Sequence
from hybrid_engine.generation.decode import Drawn
from hybrid_engine.ops import SampleOp, token_logprobs

if TYPE_CHECKING:
    from hybrid_engine.extensions.megatron.levels.strategy import SimpleTextGenerationStrategy

Result = TypeVar("Result")


class Turn(NamedTuple):
    """The tokens and states decided for the rows of one step."""

    tokens: list[int]
    is_done: list[bool]
    num_generated: list[int]
    """Number of tokens of each row's answer so far."""


def first_decides(processes: Partners, decide: Callable[[], Result]) -> Result:
    """Runs `decide` on the first of `processes`; returns its result, or raises its error, on all. Collective."""
    return processes.exchange(processes.agree(lambda: decide() if processes.rank == 0 else None))[0]  # type: ignore


class BatchStatus:
    """The batch in the form that `update_generation_status` takes, extended as tokens are drawn.

    Args:
        tokens: `[b, at least the longest prompt]` int64, padded on the right.
        lengths: `[b]` of the prompts.
    """

    def __init__(
        self,
        strategy: "SimpleTextGenerationStrategy",
        tokens: torch.Tensor,
        lengths: list[int],
        params: CommonInferenceParams,
    ):
        self.strategy = strategy
        width = max(lengths) + params.num_tokens_to_generate
        self.tokens = tokens.new_full((len(tokens), width), strategy.tokenizing.end)
        self.tokens[:, : tokens.shape[1]] = tokens[:, :width]
        self.is_done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        self.num_generated = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)

    def add(self, rows: list[int], columns: list[int], drawn: torch.Tensor) -> Turn:
        """Writes the token `drawn [S]` for each row into its column, and asks the strategy which rows end.

        The strategy is called once for each column. `generation_started` marks the rows whose newest token is there;
        its results for other rows are not used.
        """
        device = self.tokens.device
        of_rows, of_columns = torch.tensor(rows, device=device), torch.tensor(columns, device=device)
        self.tokens[of_rows, of_columns] = drawn.to(device)
        for column in sorted(set(columns)):
            here = torch.zeros_like(self.is_done)
            here[of_rows[of_columns == column]] = True
            answer = self.strategy.update_generation_status(
                self.tokens, here.clone(), column, self.is_done.clone(), self.num_generated.clone()
            )
            is_done, num_generated = self._check(answer)
            self.is_done = torch.where(here, is_done.to(device), self.is_done)
            self.num_generated = torch.where(here, num_generated.to(device), self.num_generated)
        return Turn(drawn.tolist(), self.is_done[of_rows].tolist(), self.num_generated[of_rows].tolist())

    def follow(self, rows: list[int], columns: list[int], turn: Turn) -> None:
        """Records the decision of another process; changes nothing on the process that decided."""
        self.tokens[rows, columns] = torch.tensor(turn.tokens, device=self.tokens.device)
        self.is_done[rows] = torch.tensor(turn.is_done, device=self.tokens.device)
        self.num_generated[rows] = torch.tensor(turn.num_generated, device=self.tokens.device)

    def _check(self, answer: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        is_pair = isinstance(answer, tuple | list) and len(answer) == 2
        if not is_pair or any(getattr(part, "shape", None) != self.is_done.shape for part in answer):
            raise ValueError(
                "update_generation_status() must return is_generation_done_tensor and generated_sequence_lengths, each "
                f"of shape [{len(self.is_done)}], and returned {_describe(answer)}"
            )
        return answer[0].bool(), answer[1].long()


class StrategyChoice:
    """Draws tokens by an overridden `sample_from_logits`, else by the engine's sampler with padding ids masked.

    The first of the processes that share the model chooses for all of them.

    Args:
        first_row: the row of the batch that has `Sequence.row` 0.
        group: the processes that share the model.
    """

    def __init__(
        self,
        strategy: "SimpleTextGenerationStrategy",
        params: CommonInferenceParams,
        status: BatchStatus,
        first_row: int,
        group: Partners,
    ):
        self.strategy, self.params, self.status = strategy, params, status
        self.first_row, self.group = first_row, group
        self.sampler = SampleOp(sampling_options(params))

    def __call__(self, rows: list[Sequence], logits: torch.Tensor) -> Drawn:
        """The choice of a decode step: see `generation/decode.py`."""
        numbers = [self.first_row + row.row for row in rows]
        columns = [len(row) for row in rows]
        turn = first_decides(self.group, lambda: self.status.add(numbers, columns, self._draw(rows, logits)))
        self.status.follow(numbers, columns, turn)
        logprobs = token_logprobs(logits, torch.tensor(turn.tokens, device=logits.device)).tolist()
        return Drawn(turn.tokens, logprobs, [place for place, is_end in enumerate(turn.is_done) if is_end])

    def _draw(self, rows: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
        vocab_size = self.strategy.tokenizing.vocab_size
        if self.strategy.is_overridden("sample_from_logits"):
            drawn = self.strategy.sample_from_logits(logits.clone(), self.params, vocab_size)
            return check_drawn(drawn, logits)
        names = torch.tensor([[row.key, len(row.tokens)] for row in rows], device=logits.device)
        return self.sampler(mask_padding(logits, vocab_size), *names.unbind(1))[0]


def check_drawn(drawn: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`drawn`, the result of `sample_from_logits` for `logits [S, V]`, as `[S]` int64; ValueError if it is invalid."""
    is_ids = isinstance(drawn, torch.Tensor) and not drawn.is_floating_point() and drawn.dtype != torch.bool
    if not is_ids or drawn.shape != logits.shape[:1] or bool(((drawn < 0) | (drawn >= logits.shape[1])).any()):
        raise ValueError(
            f"sample_from_logits() must return [{len(logits)}] token ids from 0 to {logits.shape[1] - 1}, one for each "
            f"row, and returned {_describe(drawn)}"
        )
    return drawn.long()


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(map(_describe, value)) or 'nothing'}"
    if isinstance(value, torch.Tensor):
        limits = f" from {value.min().item()} to {value.max().item()}" if value.numel() else ""
        return f"{value.dtype} {list(value.shape)}{limits}"
    return type(value).__name__
