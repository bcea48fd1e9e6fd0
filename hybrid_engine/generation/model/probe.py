"""Runs containers and the module's forward over the same tokens, and checks that they compute the same function.

The narrow probe is a few tokens of one sequence, prefilled and decoded one by one. It runs whenever containers are
built, also with attention windows shortened to its few tokens, and at the positions where rope's frequencies change.
The wide probe covers the conditions of large rollouts: more than one split of attention's context, tiles of many rows,
a recorded step. Containers that differ from the module by more than rounding explains are not used.
`container_probe.py` runs both; engines report the `LogprobDifference` that they measure.

All rows of the wide probe's decode steps are places of one sequence, so its keys and values are computed only once. If
layers keep states, each row has a slot, with the state that a prefill of the tokens before its place leaves. R rows, V
vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.ops import DecodeBatch, PrefillBatch, token_logprobs

Parameters = list[tuple[dict[str, Any], str, Any]]
"""The dictionary that holds a parameter, its name there, and the parameter."""
MAX_ROUNDING_FP32 = 1e-3
"""Largest difference that counts as rounding in fp32, where about 1e-6 is measured."""
MAX_TIMES_OWN_ERROR = 4.0
"""The bound in 16 bits, in units of the model's own largest error, which may be another token's."""
NUM_EXCUSED = 10
"""In 16 bits, one of this many places may differ more if rounding alone sends a token to other experts."""
NUM_NARROW_TOKENS = 12
NUM_OWN_TOKENS = 64
"""Tokens over which the narrow probe takes the model's own error: the largest of eleven varies too much."""
NUM_WIDE_TOKENS = 320
WIDE_ROWS = (1, 8, 64, 128)
NUM_RECORDED_ROWS = 8
MAX_STATE_TOKENS, MAX_STATE_BYTES = 8192, 2**30
"""Tokens of one pass that computes the states before the places of a decode step, and bytes of these states."""
NUM_EXACT_TOKENS, EXACT_BLOCK_SIZE, EXACT_ROWS = 80, 32, (1, 8, 33)
"""More keys than one chunk of `fixed_attention.py`, more rows than one piece of `fixed_shapes.py`."""
Found = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Source to log-probabilities of tokens, and the places of the tokens before them in the sequence."""
LayerPass = Callable[[], Iterable[InferenceLayer]]
"""Called once per forward pass of the containers; yields their layers in order, with readable weights."""
SHORT_WINDOW = 4
WINDOW_NAMES = ("sliding_window", "window_size", "attention_chunk_size")
"""Names of windows in configs and modules, whether or not the policy knows that the family has one."""


@dataclass(frozen=True)
class LogprobDifference:
    """Absolute difference of log-probabilities, rollout against trainer, per token."""

    mean: float
    max: float
    past_switch: "LogprobDifference | None" = None
    """The difference around the length that changes rope's frequencies, where both must differ; None: none does."""


def describe_switch(difference: LogprobDifference, length: int) -> str:
    """Describes in one line how far rollouts that grow beyond `length` tokens are from the trainer."""
    return (
        f"rollouts that grow beyond {length} tokens: rope's frequencies change there, in the rollout for the tokens "
        "that follow, in the trainer's forward for all of them; around that length log-probabilities are "
        f"{difference.mean:.2g} apart in the mean and {difference.max:.2g} at most"
    )


def compare_logprobs(
    rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, world_size: int = 1
) -> LogprobDifference:
    """Compares at the places where `mask` is True, which has the others' shape, over `world_size` processes.

    Collective if there are several, so that all make the same decision.
    """
    difference = (rollout.detach().float() - trainer.detach().float()).abs()[mask.bool()].double()
    total = torch.stack([difference.sum(), torch.tensor(float(difference.numel())).to(difference)])
    largest = torch.cat([difference, difference.new_zeros(1)]).max()
    if world_size > 1:
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return LogprobDifference((total[0] / total[1].clamp(min=1)).item(), largest.item())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, the module is in eval mode; on exit, every submodule gets its own mode back."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes:
            submodule.training = mode


@contextmanager
def widened(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, forward passes of `module` compute in fp32; `layers` are the parts that are widened as one."""
    handles: list[Any] = []
    for unit in _units(module, set(layers)):
        kept: Parameters = []
        handles.append(unit.register_forward_pre_hook(_widening(kept), with_kwargs=True))
        # Runs first of all hooks, before FSDP2 frees the gathered parameters, and also after an error.
        handles.append(unit.register_forward_hook(_restoring(kept), prepend=True, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _units(module: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields the parts to widen while they run: layers, and modules outside them that have parameters of their own."""
    if module in layers:
        yield module
        return
    if any(parameter is not None for parameter in module._parameters.values()):
        yield module
    for child in module.children():
        yield from _units(child, layers)


def _widening(kept: Parameters) -> Any:
    def widen(unit: nn.Module, args: Any, kwargs: Any) -> Any:
        for part in unit.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    kept.append((part._parameters, name, parameter))
                    part._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)
        return tree_map(_wide, (args, kwargs))

    return widen


def _restoring(kept: Parameters) -> Any:
    def restore(*_: Any) -> None:
        for parameters, name, parameter in kept:
            parameters[name] = parameter
        kept.clear()

    return restore


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


@torch.no_grad()
def probe_containers(
    module: nn.Module, model: InferenceModel, layers: LayerPass, world_size: int = 1
) -> LogprobDifference:
    """Runs the narrow probe; weights must be gathered, or `layers` gathers each layer.

    Collective over `world_size` processes, which come to the same verdict. Returns the difference within the real
    windows; its `past_switch` is how far rollout and trainer must differ at lengths that change rope.

    Raises:
        UnsupportedModelError: they compute different functions.
    """
    with _naming_dtypes(module):
        difference = _probe_beginning(module, model, layers, world_size)
        _probe_windows(module, model, layers, world_size)
        return replace(difference, past_switch=_probe_rope_switch(module, model, layers, world_size))


@contextmanager
def _naming_dtypes(module: nn.Module) -> Iterator[None]:
    """Inside, an error of containers or the module's forward becomes UnsupportedModelError if dtypes explain it.

    This happens if weights have several dtypes, or hooks give a module another dtype than that of its weights.
    """
    try:
        yield
    except RuntimeError as error:
        if "dtype" not in str(error) and "scalar type" not in str(error):
            raise
        of_dtypes = {str(p.dtype).removeprefix("torch."): name for name, p in module.named_parameters()}
        examples = ", ".join(f"{dtype} ({name})" for dtype, name in of_dtypes.items())
        raise UnsupportedModelError(
            f"a forward pass mixes dtypes ({str(error).splitlines()[0]}); the weights are {examples}; cast them alike, "
            "or generate under torch.autocast"
        ) from error


def _probe_beginning(module: nn.Module, model: InferenceModel, layers: LayerPass, world_size: int) -> LogprobDifference:
    """Probes the narrow probe's tokens as they are, decoded one by one."""
    tokens = _tokens(model, NUM_NARROW_TOKENS)
    num_prefilled = max(1, len(tokens) // 2)
    passes = _ProbePasses(model, layers, tokens, len(tokens))
    logits = [passes.prefill(num_prefilled)]
    logits += [passes.decode_next(position) for position in range(num_prefilled, len(tokens) - 1)]
    found = token_logprobs(torch.cat(logits)[: len(tokens) - 1], tokens[1:])
    places = torch.arange(len(tokens) - 1, device=tokens.device)
    if model.dtype != torch.float32:
        tokens = _tokens(model, NUM_OWN_TOKENS)
    return _judge(module, model, tokens, {"prefill and decode": (found, places)}, world_size)


def _probe_windows(module: nn.Module, model: InferenceModel, layers: LayerPass, world_size: int) -> None:
    """Probes short windows, or a sequence longer than the real ones if the module's windows cannot be changed.

    This applies to GPT-Neo, whose masks are built with the module.
    """
    tokens = _tokens(model, NUM_NARROW_TOKENS if model.dtype == torch.float32 else NUM_OWN_TOKENS)
    with short_windows(module, model) as has_windows:
        if not has_windows:
            return
        shortened = _module_logprobs(module, tokens)
    plain = _module_logprobs(module, tokens)
    if compare_logprobs(shortened, plain, torch.ones_like(plain), world_size).max > 0.0:
        with short_windows(module, model):
            _judge(module, model, tokens, _all_places(model, layers, tokens, "short windows"), world_size)
        return
    window = widest_window(model)
    tokens = _tokens(model, window + NUM_NARROW_TOKENS)
    if 0 < window < len(tokens):
        _judge(module, model, tokens, _all_places(model, layers, tokens, "windows"), world_size)


def _probe_rope_switch(
    module: nn.Module, model: InferenceModel, layers: LayerPass, world_size: int
) -> LogprobDifference | None:
    """Probes the positions around the length at which rope's frequencies change; None if they never do.

    A prompt beyond this length must be computed as the module computes it. A response that grows beyond it cannot be:
    its keys were rotated by the lengths that its row had, in transformers' `generate()` as well as here, and a forward
    pass rotates them all by the last one. Returns this difference over the few tokens before and after.
    """
    length = model.angles.trained_length
    if length is None:
        return None
    num_tokens = NUM_NARROW_TOKENS if model.dtype == torch.float32 else NUM_OWN_TOKENS
    tokens = _some_tokens(num_tokens, model.vocab_size, model.device)
    num_before = min(length, num_tokens // 2)
    first = length - num_before
    with model.angles.shifted(first):
        passes = _ProbePasses(model, layers, tokens, len(tokens))
        prompt = {"a prompt at which rope changes": passes.prefill_all()}
        _judge(module, model, tokens, prompt, world_size, first)
        if model.recompute_length is None:
            grown = passes.decode(list(range(num_tokens - 1)))
        else:
            grown = torch.cat([passes.prefill(num_before), passes.prefill(num_tokens)[num_before:-1]])
        trainer = _module_logprobs(module, tokens, first)
        found = token_logprobs(grown, tokens[1:])
        return compare_logprobs(found, trainer, torch.ones_like(trainer), world_size)


def _all_places(model: InferenceModel, layers: LayerPass, tokens: torch.Tensor, what: str) -> Found:
    """Computes every token's log-probability by one prefill, and by one step that decodes all of them."""
    passes = _ProbePasses(model, layers, tokens, len(tokens))
    prefilled, places = passes.prefill_all()
    decoded = token_logprobs(passes.decode(places.tolist()), tokens[1:])
    return {f"prefill, {what}": (prefilled, places), f"decode, {what}": (decoded, places)}


@torch.no_grad()
def probe_widely(
    module: nn.Module,
    model: InferenceModel,
    layers: LayerPass,
    block_size: int,
    recorder: Any = None,
    world_size: int = 1,
) -> LogprobDifference:
    """Runs the wide probe on KV blocks of `block_size` tokens; collective, and raises as the narrow one does.

    `recorder` records a step, as `CudaGraphs` does; None if steps are not recorded.
    """
    tokens = _tokens(model, NUM_WIDE_TOKENS)
    passes = _ProbePasses(model, layers, tokens, block_size)
    found = {"prefill": passes.prefill_all()}
    for num_rows in WIDE_ROWS:
        rows = _spread(num_rows, len(tokens))
        places = torch.tensor(rows, device=tokens.device)
        found[f"decode of {num_rows} rows"] = token_logprobs(passes.decode(rows), tokens[places + 1]), places
    if recorder is not None:
        rows = _spread(NUM_RECORDED_ROWS, len(tokens))
        places = torch.tensor(rows, device=tokens.device)
        found["a recorded step"] = token_logprobs(passes.replay(rows, recorder), tokens[places + 1]), places
    return _judge(module, model, tokens, found, world_size)


@torch.no_grad()
def probe_bits(
    module: nn.Module,
    model: InferenceModel,
    layers: LayerPass,
    run_trainer: Callable[..., Any],
    world_size: int = 1,
) -> LogprobDifference:
    """Runs exact mode's probe: prefill, decode in several batch sizes and the trainer's forward must give equal bits.

    Collective like the narrow probe.

    Raises:
        UnsupportedModelError: the bits differ on this machine.
    """
    tokens = _tokens(model, NUM_EXACT_TOKENS)
    passes = _ProbePasses(model, layers, tokens, EXACT_BLOCK_SIZE)
    found = [token_logprobs(passes.prefill(len(tokens))[:-1], tokens[1:])]
    places = [torch.arange(len(tokens) - 1, device=tokens.device)]
    for num_rows in EXACT_ROWS:
        places.append(torch.tensor(_spread(num_rows, len(tokens)), device=tokens.device))
        found.append(token_logprobs(passes.decode(places[-1].tolist()), tokens[places[-1] + 1]))
    with evaluating(module):
        logits = run_trainer(input_ids=tokens.repeat(2, 1)).logits[1]
    trainer = token_logprobs(logits[:-1], tokens[1:])[torch.cat(places)]
    difference = compare_logprobs(torch.cat(found), trainer, torch.ones_like(trainer), world_size)
    if difference.max != 0.0:
        raise UnsupportedModelError(f"rollout and trainer are {difference.max:.3g} apart in log-probability")
    return difference


@torch.no_grad()
def probe_module(module: nn.Module, generate: Callable[..., Any], world_size: int = 1) -> LogprobDifference:
    """Compares the log-probabilities of a module's own cached `generate()` with those of one forward pass of it.

    Uses a few tokens; collective over `world_size` processes.
    """
    device = next(module.parameters()).device
    vocab_size = module.config.get_text_config().vocab_size
    prompt = _some_tokens(NUM_NARROW_TOKENS // 2, vocab_size, device)
    lengths = {"max_new_tokens": NUM_NARROW_TOKENS // 2, "min_new_tokens": NUM_NARROW_TOKENS // 2}
    with evaluating(module):
        output = generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=True,
            **lengths,
        )
    tokens = output.sequences[0]
    found = token_logprobs(torch.cat(output.logits), tokens[len(prompt) :])
    trainer = _module_logprobs(module, tokens)[len(prompt) - 1 :]
    return compare_logprobs(found, trainer, torch.ones_like(trainer), world_size)


def _tokens(model: InferenceModel, most: int) -> torch.Tensor:
    limits = [limit for limit in (model.max_positions, model.angles.trained_length) if limit is not None]
    return _some_tokens(min([most, *limits]), model.vocab_size, model.device)


def _some_tokens(number: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(number, device=device) * 7919 + 11) % vocab_size


def _spread(num_rows: int, length: int) -> list[int]:
    """Returns places over the whole sequence, the last one first; the last token has no successor."""
    return [int(place) for place in torch.linspace(length - 2, 0, num_rows)]


class _ProbePasses:
    """Forward passes of containers over one sequence, with its keys and values."""

    def __init__(self, model: InferenceModel, layers: LayerPass, tokens: torch.Tensor, block_size: int):
        self.model, self.layers, self.tokens, self.block_size = model, layers, tokens, block_size
        num_blocks = -(-len(tokens) // block_size)
        self.table = torch.arange(num_blocks, device=tokens.device)
        model.prepare_positions(len(tokens))
        self.rows_at_once, slot_bytes = max(*WIDE_ROWS, len(tokens)), model.bytes_per_slot()
        if slot_bytes:
            self.rows_at_once = max(NUM_RECORDED_ROWS, min(self.rows_at_once, MAX_STATE_BYTES // slot_bytes))
        self.cache = model.new_cache(num_blocks, block_size, 1 + self.rows_at_once)

    def prefill(self, length: int) -> torch.Tensor:
        """Returns logits `[length, V]` after each of the first `length` tokens; their state is left in slot 0."""
        return self._prefill([length], [0])

    def _prefill(self, lengths: list[int], slots: list[int]) -> torch.Tensor:
        """Feeds the first tokens of the sequence, as many as each of `lengths`; their states are left in `slots`."""
        device = self.tokens.device
        places = torch.cat([torch.arange(length, device=device) for length in lengths])
        sizes = torch.tensor(lengths, device=device)
        batch = PrefillBatch(
            tokens=self.tokens[places],
            positions=places,
            write_blocks=places // self.block_size,
            write_offsets=places % self.block_size,
            lengths=tuple(lengths),
            starts=nn.functional.pad(sizes.cumsum(0), (1, 0)).int(),
            wanted=torch.arange(len(places), device=device),
            row_lengths=sizes.repeat_interleave(sizes),
            state_slots=torch.tensor(slots, device=device),
        )
        return self.model.forward(batch, self.cache, self.layers())

    def prefill_all(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probabilities of all tokens but the first, and the places before them."""
        places = torch.arange(len(self.tokens) - 1, device=self.tokens.device)
        return token_logprobs(self.prefill(len(self.tokens))[:-1], self.tokens[1:]), places

    def decode_next(self, place: int) -> torch.Tensor:
        """Returns logits `[1, V]` after the token at `place`, which follows those that were fed last."""
        return self._decode([place], torch.zeros(1, dtype=torch.int64, device=self.tokens.device), is_identity=True)

    def decode(self, rows: list[int]) -> torch.Tensor:
        """Returns logits `[R, V]` after the tokens at `rows`; the keys and values before them must exist."""
        pieces = [rows[first : first + self.rows_at_once] for first in range(0, len(rows), self.rows_at_once)]
        return torch.cat([self._decode(piece, self._take_states(piece)) for piece in pieces])

    def _decode(self, rows: list[int], slots: torch.Tensor, is_identity: bool = False) -> torch.Tensor:
        places = torch.tensor(rows, device=self.tokens.device)
        batch = self._batch(self.tokens[places], places, slots, max(rows) + 1, is_identity)
        return self.model.forward(batch, self.cache, self.layers())

    def _take_states(self, rows: list[int]) -> torch.Tensor:
        """Returns a slot for each row `[R]`, with the state before its token if layers keep states."""
        slots = torch.arange(1, len(rows) + 1, device=self.tokens.device)
        if not self.cache.num_slots:
            return slots
        for state in (state for layer in self.cache.layers for state in layer.states):
            state.zero_()
        fed = [(place, slot) for slot, place in enumerate(rows, 1) if place > 0]
        num_at_once = max(1, MAX_STATE_TOKENS // len(self.tokens))
        for first in range(0, len(fed), num_at_once):
            places, of_places = zip(*fed[first : first + num_at_once], strict=True)
            self._prefill(list(places), list(of_places))
        return slots

    def replay(self, rows: list[int], recorder: Any) -> torch.Tensor:
        """Returns the logits `[R, V]` of `decode` from a step that was recorded for other rows."""
        wanted = torch.tensor(rows, device=self.tokens.device)
        places = torch.full_like(wanted, max(rows))
        tokens = self.tokens[places]
        slots = self._take_states(rows)
        outputs: list[torch.Tensor] = []

        def run() -> None:
            batch = self._batch(tokens, places, slots, max(rows) + 1)
            outputs[:] = [self.model.forward(batch, self.cache, self.layers())]

        run()  # compiles
        replay = recorder.capture(run) if self.model.can_be_recorded else run
        tokens.copy_(self.tokens[wanted])
        places.copy_(wanted)
        self._take_states(rows)
        replay()
        return outputs[0].clone()

    def _batch(
        self, tokens: torch.Tensor, places: torch.Tensor, slots: torch.Tensor, context: int, is_identity: bool = False
    ) -> DecodeBatch:
        return DecodeBatch(
            tokens=tokens,
            positions=places,
            block_tables=self.table.repeat(len(tokens), 1),
            context=context,
            is_identity=is_identity,
            state_slots=slots,
        )


def _judge(
    module: nn.Module,
    model: InferenceModel,
    tokens: torch.Tensor,
    found: Found,
    world_size: int,
    first: int = 0,
) -> LogprobDifference:
    """Compares the log-probabilities in `found` with the module's, whose tokens have positions from `first` on.

    Raises:
        UnsupportedModelError: they differ by more than rounding explains.
    """
    trainer = _module_logprobs(module, tokens, first)
    bound, has_flips = MAX_ROUNDING_FP32, False
    if model.dtype != torch.float32:
        with widened(module, [layer.module for layer in model.layers]):
            exact = _module_logprobs(module, tokens, first)
        own_error = compare_logprobs(trainer, exact, torch.ones_like(trainer), world_size).max
        bound, has_flips = bound + MAX_TIMES_OWN_ERROR * own_error, model.has_experts
    for what, (logprobs, places) in found.items():
        errors = (logprobs - trainer[places]).abs().sort(descending=True).values
        excused = -(-len(errors) // NUM_EXCUSED) if has_flips and bool(errors.isfinite().all()) else 0
        counted = errors[excused:]
        largest = compare_logprobs(counted, torch.zeros_like(counted), torch.ones_like(counted), world_size).max
        if not largest <= bound:
            raise UnsupportedModelError(
                f"containers and the model's forward disagree by {largest:.3g} in log-probability ({what}), "
                f"more than rounding in {model.dtype} explains ({bound:.3g})"
            )
    everything = torch.cat([logprobs for logprobs, _ in found.values()])
    places = torch.cat([places for _, places in found.values()])
    return compare_logprobs(everything, trainer[places], torch.ones_like(everything), world_size)


def _module_logprobs(module: nn.Module, tokens: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Returns the log-probability of each token but the first, by one forward pass; the first has position `first`."""
    positions = {}
    if first:
        positions["position_ids"] = torch.arange(first, first + len(tokens), device=tokens.device)[None]
    with evaluating(module):
        logits = module(input_ids=tokens[None], use_cache=False, **positions).logits[0]
    if logits.shape[0] != len(tokens):
        raise UnsupportedModelError(f"the model's forward gives {logits.shape[0]} positions for {len(tokens)} tokens")
    return token_logprobs(logits[:-1], tokens[1:])


def widest_window(model: InferenceModel) -> int:
    """Number of tokens of the containers' widest window or chunk; 0 if no layer has one."""
    return max((op.window or op.chunk or 0 for op in model.attentions), default=0)


@contextmanager
def short_windows(module: nn.Module, model: InferenceModel) -> Iterator[bool]:
    """Inside, windows and chunks wider than SHORT_WINDOW have its size; yields whether there are any."""
    wide_ops = [(op, op.window) for op in model.attentions if op.window is not None and op.window > SHORT_WINDOW]
    chunked_ops = [(op, op.chunk) for op in model.attentions if op.chunk is not None and op.chunk > SHORT_WINDOW]
    holders = list(_holders(module, (*WINDOW_NAMES, *([model.policy.window] if model.policy.window else []))))
    try:
        for holder, name, _ in holders:
            setattr(holder, name, SHORT_WINDOW)
        for op, _ in wide_ops:
            op.set_window(SHORT_WINDOW)
        for op, _ in chunked_ops:
            op.chunk = SHORT_WINDOW
        yield bool(holders or wide_ops or chunked_ops)
    finally:
        for holder, name, window in holders:
            setattr(holder, name, window)
        for op, window in wide_ops:
            op.set_window(window)
        for op, chunk in chunked_ops:
            op.chunk = chunk


def _holders(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[Any, str, int]]:
    """Yields the configs and modules that set a window's width, with its name and width."""
    parts = list(module.modules())
    configs = [config for part in parts if (config := getattr(part, "config", None)) is not None]
    configs += [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    for holder in {id(holder): holder for holder in (*parts, *configs)}.values():
        for name in dict.fromkeys(names):
            window = vars(holder).get(name)
            if isinstance(window, int) and not isinstance(window, bool) and window > SHORT_WINDOW:
                yield holder, name, window
