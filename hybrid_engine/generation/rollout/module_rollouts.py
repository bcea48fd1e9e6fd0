"""Rollouts by the `generate()` of any model, which `Generator` runs if containers cannot.

`ModuleRollouts` hands over whole batches. `answer_sequence` answers one sequence: a logits processor draws each token
by the sequence's own options, as on containers, and masks all other tokens for `generate()`. So row options, guides,
log-probabilities and seeds work on every architecture that transformers generates with.

If each layer is gathered by all processes together, all take the same turns while any has work. Before a turn each
process reports whether it has work; those without work take the turn for the others. `JointTurns` are turns of
containers, with one pass over the layers each. `JointModulePasses` are the forward passes of a module that gathers its
layers itself, whatever code calls them: each pass is a turn.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hybrid_engine.containers.device import LAUNCHES, launching
from hybrid_engine.distributed.verdict import HeldInterrupts, Partners, attempt, holding_interrupts
from hybrid_engine.generation.core import Prompt, RolloutResult, Sequence
from hybrid_engine.generation.model.weights import WeightGatherer
from hybrid_engine.generation.options import GenerationOptions
from hybrid_engine.generation.output import (
    collect_output,
    measure_module_output,
    response_lengths,
    score_by_module,
)
from hybrid_engine.generation.sampling import MixedRows, RowState, is_ended
from hybrid_engine.ops.support_log_prob import read_records
from hybrid_engine.zero.passes import GatheringOrder
from hybrid_engine.zero.sharding import Sharding

# Options with which a row may end without an end-of-sequence token, or its logits depend on other rows or models.
ENDS_OTHERWISE = (
    "assistant_model",
    "constraints",
    "custom_generate",
    "max_time",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "stop_strings",
    "stopping_criteria",
)

NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0,
    "min_new_tokens": None, "sequence_bias": None, "exponential_decay_length_penalty": None,
}  # fmt: skip
"""Neutral values of config options that would change logits before the draw: a sequence has its own."""
LEFT, IDLE, WORKS, FAILED = range(4)
"""States of a process before a turn; the highest one decides what all processes do."""
STREAMED_STAYS = 0.02
"""Seconds after which a live batch without work checks whether other processes have some."""


def answer_sequence(
    generate: Callable[..., Any], sequence: Sequence, device: torch.device, most: int | None = None
) -> None:
    """Continues `sequence` until it ends, by a model's `generate` on `device`; stores an error of its rules in it.

    Args:
        most: maximum number of tokens to draw in this call; None: as many as the sequence may have.

    Raises:
        RuntimeError: the model's logits are not finite.
    """
    left = sequence.options.max_new_tokens - len(sequence.tokens)
    fed = torch.tensor([sequence.prompt.tokens + sequence.tokens], device=device)
    generate(
        fed,
        attention_mask=torch.ones_like(fed),
        max_new_tokens=left if most is None else min(left, most),
        do_sample=False,
        num_beams=1,
        logits_processor=LogitsProcessorList([_Drawing(sequence, device)]),
        stopping_criteria=StoppingCriteriaList([_Ended(sequence)]),
        eos_token_id=None,
        pad_token_id=sequence.options.pad_token_id,
        return_dict_in_generate=False,
        synced_gpus=False,  # the caller keeps processes in step
        **NEUTRAL,
    )


class _Drawing(LogitsProcessor):
    """Draws the next token of one sequence and masks the scores of all others."""

    def __init__(self, sequence: Sequence, device: torch.device):
        self.sequence, self.device = sequence, device
        self.rows: MixedRows | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids [1, P]`, `scores [1, V]` -> `[1, V]`."""
        sequence, logits = self.sequence, scores.float()
        if not bool(logits.isfinite().any()) or bool(logits.isnan().any()):
            raise RuntimeError("the model's logits are not finite; check the weights for NaN or inf")
        if self.rows is None:
            self.rows = MixedRows([sequence], logits.shape[1], logits.device)
        drawn = self.rows.draw(logits, self._state(input_ids, logits))
        token = int(drawn.tokens[0])
        sequence.tokens.append(token)
        sequence.logprobs.append(float(drawn.logprobs[0]))
        if drawn.tops is not None:
            ids, logprobs = drawn.tops[:, 0].tolist()
            sequence.tops.append([(int(number), value) for number, value in zip(ids, logprobs, strict=True)])
        if drawn.supports is not None:
            sequence.supports += read_records(drawn.supports.cpu().numpy())
        if bool(drawn.ends[0]) or is_ended(sequence):
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.options.max_new_tokens:
            sequence.finish_reason = "length"
        return torch.full_like(scores, -torch.inf).index_fill_(1, drawn.tokens, 0.0)

    def _state(self, input_ids: torch.Tensor, logits: torch.Tensor) -> RowState:
        own = torch.tensor(self.sequence.tokens, dtype=torch.int64, device=logits.device)
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).index_fill_(1, input_ids[0], True)
        counts = torch.bincount(own, minlength=logits.shape[1]).int()[None]
        keys = torch.tensor([self.sequence.key], device=logits.device)
        return RowState(keys, torch.tensor([len(own)], device=logits.device), seen, counts)


class _Ended(StoppingCriteria):
    def __init__(self, sequence: Sequence):
        self.sequence = sequence

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """`[1]`: whether the sequence has ended."""
        has_ended = self.sequence.finish_reason is not None or self.sequence.error is not None
        return torch.tensor([has_ended], device=input_ids.device)


class JointTurns:
    """The turns of `partners`, which include this process.

    Args:
        take_turn: takes one turn whether or not this process has work; returns its error, or None.
    """

    def __init__(self, partners: Partners, take_turn: Callable[[], BaseException | None]):
        self._partners, self._take_turn = partners, take_turn
        self.has_parted = False
        """Whether the others know of an error, or receive nothing more from this process."""

    def agree(self, state: int) -> int:
        """Returns the highest state of all processes; raises an error of one on all. Collective."""
        self.has_parted = True
        (highest,) = self._partners.highest([state])
        if highest == FAILED:
            self._partners.raise_together(None)
        self.has_parted = False
        return highest

    def meet(self, state: int) -> int:
        """Takes a turn with all if one has work; returns the highest state. Collective; errors are raised on all."""
        highest = self.agree(state)
        if highest == WORKS:
            error = self._take_turn()
            if error is not None:
                self.fail(error)
        return highest

    def fail(self, error: BaseException) -> None:
        """Raises `error` here and a matching one on the others when they meet next; collective."""
        self.has_parted = True
        self._partners.highest([FAILED])
        self._partners.raise_together(error)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """On exit, takes part in the turns of others until all have left; raises an error inside on all."""
        try:
            yield
        except BaseException as error:
            if not self.has_parted:
                self.fail(error)
            raise
        while self.meet(LEFT) != LEFT:
            pass


class JointModulePasses(JointTurns):
    """The forward passes of `module`, which is sharded as `sharding` says and gathers its layers itself.

    All weights outside the layers must be gathered. A process without work passes a single token through the module.
    """

    def __init__(self, module: nn.Module, sharding: Sharding, partners: Partners):
        super().__init__(partners, self._pass_for_others)
        self._module, self._sharding = module, sharding
        base = getattr(module, "get_base_model", lambda: module)()
        self._entrances = list(dict.fromkeys([module, base]))  # peft's generate() calls the base model
        self._depth = 0
        self._held: HeldInterrupts | None = None

    @contextmanager
    def joined(self) -> Iterator["JointModulePasses"]:
        """Inside, each pass waits for one of every other process, and so does the exit. Raises an error on all."""
        with holding_interrupts() as self._held, ExitStack() as hooks:
            self._order = GatheringOrder(self._sharding.fsdp_modules())
            hooks.callback(self._order.remove)
            for entrance in self._entrances:
                hooks.callback(entrance.register_forward_pre_hook(self._enter, prepend=True).remove)
                hooks.callback(entrance.register_forward_hook(self._leave).remove)
            with self.leaving(), self.ending_pass():
                yield self

    @contextmanager
    def ending_pass(self) -> Iterator[None]:
        """After an error in a pass, gathers its remaining layers, because the others still gather them in theirs."""
        try:
            yield
        except BaseException:
            if self._depth > 0:
                self._depth = 0
                attempt(self._order.gather_rest)
            raise

    def _enter(self, *unused: Any) -> None:
        if self._depth == 0:
            assert self._held is not None
            self._held.pass_on()
            self.agree(WORKS)
            self._order.begin()
        self._depth += 1

    def _leave(self, *unused: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._order.complete()

    def _pass_for_others(self) -> BaseException | None:
        """A pass over one token; the hooks treat it as nested in another pass, so they do not act."""
        assert self._held is not None
        self._order.begin()
        self._depth = 1

        def take_pass() -> None:
            with self.ending_pass():
                token = torch.zeros(1, 1, dtype=torch.int64, device=next(self._module.parameters()).device)
                self._module(input_ids=token, attention_mask=torch.ones_like(token))

        _, error = attempt(take_pass)
        if error is None:
            self._order.complete()
        self._depth = 0
        return error or attempt(self._held.pass_on)[1]


class _LettingOthersRecord(StoppingCriteria):
    """Ends no row; lets threads that wait to record a graph do so between two tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """`[B]`, all False."""
        LAUNCHES.let_others_in()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class ModuleRollouts:
    """Runs rollouts by the model's own `generate()`, in its own padded batches."""

    def __init__(self, module: nn.Module, gatherer: WeightGatherer, partners: Partners):
        """`partners`: processes whose layers are gathered with this one's, if layers are gathered one by one."""
        # The class's method: on the module itself an engine's generate() may have replaced it.
        self._module_generate = type(module).generate.__get__(module)
        self.module = module
        self.gatherer, self.partners = gatherer, partners

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own `generate()`; other threads may record graphs only between two tokens.

        It may draw from PyTorch's generators, and only it knows when. A model that is not from transformers gets no
        stopping criteria.
        """
        if self._device.type == "cuda" and hasattr(self.module, "prepare_inputs_for_generation"):
            criteria = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), _LettingOthersRecord()])
            kwargs["stopping_criteria"] = criteria
        with launching(self._device):
            return self._module_generate(*args, **kwargs)

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def gather(self, release: ExitStack) -> None:
        """Gathers weights for forward passes of the module: whole, or layer by layer in each pass."""
        release.enter_context(self.gatherer.gathered_for_forward())

    def joint_passes(self) -> JointModulePasses | None:
        """Returns the passes that keep processes in step if layers are gathered one by one, otherwise None.

        With whole weights no process waits for others, as transformers would for every token of a module under FSDP2.
        """
        if not self.gatherer.is_streamed or self.partners.size == 1:
            return None
        return JointModulePasses(self.module, self.gatherer.sharding, self.partners)

    def _in_step(self) -> AbstractContextManager[object]:
        passes = self.joint_passes()
        return nullcontext() if passes is None else passes.joined()

    def run(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        options: GenerationOptions,
        seed: int | None,
        kwargs: dict[str, Any],
    ) -> RolloutResult:
        """Runs a rollout of the prompts `input_ids`.

        `seed` holds for this call alone, None draws from torch's generators.
        """
        if len(input_ids) == 0:
            return self._run_empty(input_ids, options)
        # Only this process's GPU: reading the generators of others would take memory there.
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            with self._in_step():
                output = self._generate(input_ids, mask.to(input_ids.dtype), options, kwargs)
        responses = getattr(output, "sequences", output)[:, input_ids.shape[1] :]
        num_tokens = int(response_lengths(responses, options.eos_token_ids).sum())
        return RolloutResult(output, num_samples=len(responses), generated_tokens=num_tokens)

    def score(self, prompts: Iterable[Prompt], device: torch.device) -> None:
        """Scores those of `prompts` that request it, by the forward of the model on `device`."""
        score_by_module(self.module, prompts, self.module.config.get_text_config().vocab_size, device)  # type: ignore[union-attr, operator]

    def run_sequences(
        self, input_ids: torch.Tensor, sequences: list[Sequence], options: GenerationOptions, device: torch.device
    ) -> RolloutResult:
        """Answers `sequences` one after the other on `device`; `options` are those of all rows."""
        with self._in_step():
            self.score((sequence.prompt for sequence in sequences), device)
            for sequence in sequences:
                answer_sequence(self.generate, sequence, device)
                if sequence.error is not None:
                    raise sequence.error
        output = collect_output(input_ids, sequences, options)
        return RolloutResult(
            output if options.return_dict else output.sequences,
            num_samples=len(sequences),
            generated_tokens=sum(len(sequence.tokens) for sequence in sequences),
        )

    def _run_empty(self, input_ids: torch.Tensor, options: GenerationOptions) -> RolloutResult:
        """Returns an output without rows, which transformers cannot generate; other processes may have some."""
        with self._in_step():
            pass
        output = collect_output(input_ids, [], options)
        return RolloutResult(output if options.return_dict else output.sequences, num_samples=0)

    def _generate(
        self, input_ids: torch.Tensor, mask: torch.Tensor, options: GenerationOptions, kwargs: dict[str, Any]
    ) -> Any:
        """Calls `generate`.

        Measures log-probabilities like a native rollout if only end-of-sequence tokens end rows.
        """
        kwargs = {**kwargs, "synced_gpus": False}  # see joint_passes()
        is_plain = options.return_dict and options.num_beams == 1 and not any(map(kwargs.get, ENDS_OTHERWISE))
        if not is_plain or any(name.startswith("output_") and value for name, value in kwargs.items()):
            return self.generate(input_ids, attention_mask=mask, **kwargs)
        output = self.generate(input_ids, attention_mask=mask, **kwargs, output_logits=True)
        return measure_module_output(output.sequences, output.logits, input_ids.shape[1], options)
