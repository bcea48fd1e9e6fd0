"""Continues the prompts of a batch: by the engine's own rollout, or step by step over any wrapped model.

At each step a strategy's methods are called for rows at different columns. `CommonInferenceParams` are the sampling
parameters of `common_generate`; interface: Megatron Core's `inference/common_inference_params.py`.

b rows, S columns, V logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from hybrid_engine.config.checks import check_flag, check_integer, check_number
from hybrid_engine.distributed.verdict import Partners
from hybrid_engine.extensions.megatron.wrapped_model import AbstractModelInferenceWrapper, GPTInferenceWrapper
from hybrid_engine.generation.core import Drawn, Sequence
from hybrid_engine.generation.options import WITHOUT_EFFECT
from hybrid_engine.generation.output import response_lengths
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.generation.rollout.preparing import mixes_rows
from hybrid_engine.ops import SampleOp, SamplingOptions, token_logprobs
from hybrid_engine.ops.sample import filter_logits, first_largest

if TYPE_CHECKING:
    from hybrid_engine.extensions.megatron.backends import SimpleTextGenerationStrategy

Result = TypeVar("Result")
TOKENS_AT_ONCE = 2048
"""Number of tokens that a wrapped model scores at once, at least one row: with 150 000 logits each, 1.2 GB."""
PER_TURN = ("sample_from_logits", "update_generation_status")
"""The methods of a strategy that are called at each step."""


@dataclass
class CommonInferenceParams:
    """Options for continuing prompts, the same for all prompts."""

    use_greedy: bool = False
    """Take the likeliest token; the sampling fields below are then ignored."""
    temperature: float = 1.0
    """Divisor of the logits, applied before filtering; above 0."""
    top_k: int = 0
    """Sample from this number of likeliest tokens; 1 is greedy, 0 is off. Excludes `top_p`."""
    top_p: float = 0.0
    """Sample from the likeliest tokens that together have this probability; 0 is off. Excludes `top_k`."""
    return_log_probs: bool = False
    """Whether the result has `output_log_probs`."""
    num_tokens_to_generate: int = 30
    """Maximum number of tokens added to a prompt, including the end token; 0 returns the prompts."""

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Sets attributes by name: those above, or others that the user's own methods read."""
        for name, value in attribute_value_pair.items():
            setattr(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.use_greedy or self.top_k == 1

    def check(self) -> None:
        """Raises ValueError for the first field that is out of range."""
        check_flag("use_greedy", self.use_greedy)
        check_flag("return_log_probs", self.return_log_probs)
        check_integer("num_tokens_to_generate", self.num_tokens_to_generate, 0)
        check_integer("top_k", self.top_k, 0)
        check_filters(self)
        if not self.is_greedy:
            check_number("temperature", self.temperature, 0)
            if self.temperature == 0:
                raise ValueError("temperature=0 must be above 0; for greedy decoding set use_greedy=True")


def check_filters(params: CommonInferenceParams, num_logits: int | None = None, vocab_size: int | None = None) -> None:
    """Raises ValueError, with the messages of Megatron Core, for invalid filters.

    `num_logits` and `vocab_size` limit `top_k` if they are given.
    """
    if params.top_k > 0 and params.top_p > 0:
        raise ValueError("Cannot have top-p and top-k both greater than zero")
    if not 0 <= params.top_p <= 1:
        raise ValueError("top-p should be in (0,1]")
    if params.is_greedy:
        return
    if num_logits is not None and params.top_k > num_logits:
        raise ValueError("top-k is larger than logit size.")
    if vocab_size is not None and params.top_k > vocab_size:
        raise ValueError("top-k is larger than vocab size.")


def mask_padding(logits: torch.Tensor, vocab_size: int | None) -> torch.Tensor:
    """`logits [S, V]` with -inf for ids from `vocab_size` on, which pad the embedding; a copy if there are any."""
    if vocab_size is None or vocab_size >= logits.shape[-1]:
        return logits
    masked = logits.clone()
    masked[:, vocab_size:] = float("-inf")
    return masked


def sample(logits: torch.Tensor, params: CommonInferenceParams, vocab_size: int | None) -> torch.Tensor:
    """`[S]` int64: tokens drawn from `logits [S, V]` with torch's generator; `logits` is not changed.

    If `params` is greedy, the likeliest token; otherwise temperature, then top-k or top-p.

    Raises:
        ValueError: filters that exclude each other or are out of range.
    """
    check_filters(params)
    if not params.is_greedy:
        check_filters(params, logits.shape[-1], vocab_size)
    logits = mask_padding(logits, vocab_size)
    if params.is_greedy:
        return first_largest(logits)
    scaled = logits.float() / params.temperature
    probabilities = filter_logits(scaled, params.top_k, params.top_p or 1.0, 0.0).softmax(-1)
    return torch.multinomial(probabilities, num_samples=1).flatten()


def sampling_options(params: CommonInferenceParams) -> SamplingOptions:
    """These parameters in the form that the engine's sampler takes."""
    return SamplingOptions(
        do_sample=not params.is_greedy,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
    )


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


@dataclass(frozen=True)
class Continuation:
    """The continuation of one row."""

    tokens: list[int]
    """All drawn tokens, including the end token."""
    num_counted: int
    """Number of tokens that belong to the answer; an end token does not."""


def roll_out(
    strategy: "SimpleTextGenerationStrategy", tokens: torch.Tensor, lengths: list[int], params: CommonInferenceParams
) -> list[Continuation]:
    """Continues all rows of `tokens [b, S]` by the engine's continuous batching; collective, the same on all ranks.

    Processes with a whole model each run their part of the rows. Processes that share a model run all rows of the
    group.
    """
    wrapper = strategy.inference_wrapped_model
    assert isinstance(wrapper, GPTInferenceWrapper)
    generator, partners = wrapper.generator, wrapper.partners
    bounds = _row_bounds(len(tokens), generator)
    first, last = bounds[partners.rank]
    rows = [tokens[row, : lengths[row]] for row in range(first, last)]
    status = choice = None
    if any(map(strategy.is_overridden, PER_TURN)):
        status = BatchStatus(strategy, tokens, lengths, params)
        group = generator.group
        choice = StrategyChoice(strategy, params, status, bounds[partners.rank - group.rank][0], group.layer_partners)
    input_ids, mask = pad_left(rows, tokens, strategy.tokenizing.end)
    options = rollout_options(strategy, generator, params)
    with generator.choosing_by(choice):
        output = wrapper.model.generate(input_ids, attention_mask=mask, **options)
    if status is not None:
        status.num_generated = generator.group.from_last_stage(status.num_generated)
    responses = output.sequences[:, input_ids.shape[1] :]
    continued = []
    for row, response, length, reason in zip(
        range(first, last), responses.tolist(), output.lengths.tolist(), output.finish_reason, strict=True
    ):
        num_counted = length - (reason == "stop") if status is None else int(status.num_generated[row])
        continued.append(Continuation(response[:length], num_counted))
    if generator.group.has_same_prompts:
        return continued
    return [row for part in partners.exchange(continued) for row in part]


def call_transformers(
    strategy: "SimpleTextGenerationStrategy", tokens: torch.Tensor, lengths: list[int], params: CommonInferenceParams
) -> list[Continuation]:
    """Continues all rows of `tokens [b, S]` by the model's own `generate()`; collective, each process runs all rows.

    Raises ValueError if this process does not hold the whole model.
    """
    wrapper, end = strategy.inference_wrapped_model, strategy.tokenizing.end
    assert isinstance(wrapper, GPTInferenceWrapper)
    generator = wrapper.generator
    if not generator.group.has_whole_module:
        raise ValueError(
            "TransformersBackend: this process holds only its part of the model; use NativeBackend, or set "
            f"{generator.group.remedy}"
        )
    options = rollout_options(strategy, generator, params)
    # Each forward pass over streamed layers is collective, even if sampled rows end at different times.
    options["synced_gpus"] = generator.gatherer.is_streamed and generator.partners.size > 1
    rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    batches = [[row] for row in rows] if mixes_rows(generator, len(rows)) else [rows]
    drawn = []
    with wrapper.reading():
        for batch in batches:
            input_ids, mask = pad_left(batch, tokens, end)
            responses = generator.own.generate(input_ids, attention_mask=mask, **options).sequences
            responses = responses[:, input_ids.shape[1] :]
            ends_at = response_lengths(responses, (end,)).tolist()
            drawn += [response[:length] for response, length in zip(responses.tolist(), ends_at, strict=True)]
    return [Continuation(row, len(row) - (row[-1] == end)) for row in drawn]


def collect(
    strategy: "SimpleTextGenerationStrategy",
    prompts_tokens: torch.Tensor,
    prompts_lengths: torch.Tensor,
    continued: list[Continuation],
    params: CommonInferenceParams,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The result of `SimpleTextGenerationStrategy.generate_output_tokens` for the continued rows; collective."""
    lengths, end = prompts_lengths.tolist(), strategy.tokenizing.end
    ends = [length + len(row.tokens) for length, row in zip(lengths, continued, strict=True)]
    tokens = prompts_tokens.new_full((len(ends), max(ends)), end)
    for row, (length, row_end) in enumerate(zip(lengths, ends, strict=True)):
        tokens[row, :length] = prompts_tokens[row, :length]
        tokens[row, length:row_end] = tokens.new_tensor(continued[row].tokens)
    counted = prompts_lengths.new_tensor([row.num_counted for row in continued])
    log_probs = score_rows(strategy.inference_wrapped_model, tokens, ends) if params.return_log_probs else None
    return tokens, prompts_lengths + counted, log_probs


def _row_bounds(num_rows: int, generator: Generator) -> list[tuple[int, int]]:
    """For each process, the first row and the end of the rows that it passes to `generate()`."""
    size = generator.partners.size
    if generator.group.has_same_prompts:
        return [(0, num_rows)] * size
    return [(num_rows * rank // size, num_rows * (rank + 1) // size) for rank in range(size)]


def pad_left(rows: list[torch.Tensor], like: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths, padded on the left, and their mask, as `generate()` takes them."""
    width = max(map(len, rows), default=1)
    input_ids = like.new_full((len(rows), width), end)
    mask = torch.zeros_like(input_ids)
    for place, row in enumerate(rows):
        input_ids[place, width - len(row) :] = row
        mask[place, width - len(row) :] = 1
    return input_ids, mask


def rollout_options(
    strategy: "SimpleTextGenerationStrategy", generator: Generator, params: CommonInferenceParams
) -> dict[str, Any]:
    """Options of `generate()` for `params`; disables all other options that the model's own config sets.

    Padding ids in the model's vocabulary beyond the tokenizer's are never drawn.
    """
    module, end = generator.module, strategy.tokenizing.end
    padding = range(strategy.tokenizing.vocab_size, module.config.get_text_config().vocab_size)
    set_by_model = {name for name, value in module.generation_config.to_dict().items() if value is not None}
    off = {name: None for name in set_by_model - set(WITHOUT_EFFECT) if not name.startswith("_")}
    return {
        **off,
        "max_new_tokens": params.num_tokens_to_generate,
        "min_new_tokens": 0,
        "do_sample": not params.is_greedy,
        "temperature": 1.0 if params.is_greedy else params.temperature,
        "top_k": 0 if params.is_greedy else params.top_k,
        "top_p": 1.0 if params.is_greedy else params.top_p or 1.0,
        "suppress_tokens": list(padding) or None,
        "eos_token_id": end,
        "pad_token_id": end,
        "return_dict_in_generate": True,
    }


def go_in_step(
    strategy: "SimpleTextGenerationStrategy", tokens: torch.Tensor, lengths: list[int], params: CommonInferenceParams
) -> list[Continuation]:
    """Continues the rows of `tokens [b, S]` window by window over any wrapped model; collective, the same on all ranks.

    Prompts of one length run together, so that one window covers them and none waits for a longer prompt to end.
    """
    wrapper = strategy.inference_wrapped_model
    status = BatchStatus(strategy, tokens, lengths, params)
    ends_at = [0] * len(tokens)
    with wrapper.reading():
        for length in sorted(set(lengths)):
            group = [row for row, of_row in enumerate(lengths) if of_row == length]
            _run_group(strategy, status, group, length, params, ends_at)
        wrapper.release()
    counted = status.num_generated.tolist()
    return [
        Continuation(status.tokens[row, lengths[row] : ends_at[row]].tolist(), counted[row])
        for row in range(len(tokens))
    ]


def _run_group(
    strategy: "SimpleTextGenerationStrategy",
    status: BatchStatus,
    group: list[int],
    length: int,
    params: CommonInferenceParams,
    ends_at: list[int],
) -> None:
    """Continues rows with prompts of length `length` until all have ended, as the first process decides."""
    wrapper, vocab_size = strategy.inference_wrapped_model, strategy.tokenizing.vocab_size
    fed = status.tokens[group, : length + params.num_tokens_to_generate]
    wrapper.prep_model_for_inference(fed)
    start, running = 0, list(range(len(group)))
    for end in range(length, length + params.num_tokens_to_generate):
        logits = wrapper(wrapper.get_batch_for_context_window(start, end))[running, -1]

        def decide(logits: torch.Tensor = logits, end: int = end, rows: list[int] = running) -> Turn:
            drawn = check_drawn(strategy.sample_from_logits(logits, params, vocab_size), logits)
            return status.add([group[place] for place in rows], [end] * len(rows), drawn)

        turn = first_decides(wrapper.partners, decide)
        rows = [group[place] for place in running]
        status.follow(rows, [end] * len(rows), turn)
        fed[running, end] = status.tokens[rows, end]
        for row in rows:
            ends_at[row] = end + 1
        running = [place for place, is_done in zip(running, turn.is_done, strict=True) if not is_done]
        if not running:
            break
        start = end


def score_rows(wrapper: AbstractModelInferenceWrapper, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Raw log-probabilities `[b, S - 1]` fp32: entry t is of token t + 1 of `tokens [b, S]`; 0 from a row's length on.

    Collective: all processes of the wrapper score all rows, through its own methods.
    """
    width = tokens.shape[1]
    scores = torch.zeros(len(tokens), width - 1, device=tokens.device)
    if width == 1:
        return scores
    rows_at_once = max(1, TOKENS_AT_ONCE // width)
    with wrapper.reading():
        for first in range(0, len(tokens), rows_at_once):
            rows = tokens[first : first + rows_at_once]
            wrapper.prep_model_for_inference(rows)
            logits = wrapper(wrapper.get_batch_for_context_window(0, width - 1))
            scores[first : first + rows_at_once] = token_logprobs(logits, rows[:, 1:])
        wrapper.release()
    places = torch.arange(1, width, device=tokens.device)
    return scores.masked_fill(places >= torch.tensor(lengths, device=tokens.device)[:, None], 0.0)
