"""Numbers of a causal model's tokens from its last hidden states, without all logits in memory at once.

Log-probabilities and entropies, the divergence from a teacher, and the values of a critic's head.

The model runs unchanged. A hook captures the head's input and passes no rows to the head, so that the model's own code
after the head (softcap, scale) has nothing to do. The capture runs inside the model's forward pass, where a sharded
head is gathered, and its result becomes the model's output, which sharding follows into the backward pass.

B rows, T the last columns of the input, whose tokens are requested; E hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.config.notices import say_once
from hybrid_engine.containers.quantised import is_quantised
from hybrid_engine.containers.routing import RecordedExperts, Router, find_routers, replaying
from hybrid_engine.distributed.groups import host_group
from hybrid_engine.distributed.verdict import everyone
from hybrid_engine.generation.model.probe import evaluating
from hybrid_engine.generation.rollout.generator import computes_by
from hybrid_engine.ops.linear_divergence import (
    HeadStates,
    TopTokens,
    class_entropy,
    divergence,
    linear_divergence,
    linear_top_divergence,
    log_rest,
    top_divergence,
    top_tokens,
)
from hybrid_engine.ops.linear_log_prob import LinearLogProbs, LogitShape, VocabularyShare, linear_log_prob
from hybrid_engine.ops.linear_log_prob_tiles import LEAST_LOGIT
from hybrid_engine.ops.linear_sorted_distance import linear_sorted_distance, sorted_distance
from hybrid_engine.ops.sample import token_logprobs
from hybrid_engine.ops.support_log_prob import Supports, support_log_prob
from hybrid_engine.rl.estimates import token_entropy

TRIAL_PRODUCT = 200.0
"""Largest product of a token in the second trial: far above every softcap, which small products hardly show."""


class AskedColumns(NamedTuple):
    """Tokens whose log-probabilities are requested, and the distribution that they are from."""

    mask: torch.Tensor  # [B, T] bool: True where they are needed
    temperature: float = 1.0
    with_entropy: bool = False
    cells: tuple[torch.Tensor, ...] | None = None  # rows and columns of the True cells; None: read from the device
    with_sharper: bool = False
    supports: Supports | None = None  # of the True cells in their order: what each distribution is over; None: all
    routing: RecordedExperts | None = None  # of all tokens of the pass, row after row: the experts that they take


class HeadLogProbs(NamedTuple):
    """`[B, T]` fp32 each, 0 where nothing was requested."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None  # in nats; None unless requested
    sharper: torch.Tensor | None = None  # at half the temperature, without a gradient; None unless requested


def token_log_probs(model: nn.Module, asked: AskedColumns, inputs: Mapping[str, torch.Tensor]) -> HeadLogProbs:
    """Log-probabilities of the last T tokens of `inputs["input_ids"]` under `model`, differentiable in its weights.

    Collective if its forward pass is. The head must be a plain linear layer whose products become logits by the scale
    and softcap of the model's config. The first pass through a model tests that on one token per row, unchanged and
    scaled up so that a softcap shows; so does the first pass after hooks of head or model changed. A log line reports a
    difference. Any other model computes its logits, as does an engine in exact mode and one under autocast.

    Args:
        model: a causal model of transformers, one with an adapter of peft, or an engine around one.
        asked: which tokens.
        inputs: arguments of its forward, with `input_ids [B, P+T]`, P at least 1.
    """
    module = getattr(model, "module", model)
    head = _plain_head(model, module)
    if head is None:
        return _from_logits(model, asked, inputs)
    shape = logit_shape(module, asked.temperature)
    targets = inputs["input_ids"][:, -asked.mask.shape[1] :]

    def compute(rows: torch.Tensor, head: nn.Linear, cells: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        def log_probs(shape: LogitShape, with_entropy: bool) -> LinearLogProbs:
            if asked.supports is None:
                return linear_log_prob(rows, head.weight, targets[cells], head.bias, shape, with_entropy)
            return support_log_prob(rows, head.weight, targets[cells], asked.supports, head.bias, shape, with_entropy)

        part = log_probs(shape, asked.with_entropy)
        found = {name: values for name, values in part._asdict().items() if values is not None}
        if asked.with_sharper:
            with torch.no_grad():
                found["sharper"] = log_probs(shape._replace(temperature=shape.temperature / 2), False).logprobs
        return found

    found = _run_caught(model, head, shape, asked, inputs, compute)
    if found is None:
        return _from_logits(model, asked, inputs)
    return HeadLogProbs(found["logprobs"], found.get("entropy"), found.get("sharper"))


class StatesOfSameHead(NamedTuple):
    """A teacher's hidden states of tokens, whose head is the one that the student's pass has."""

    hidden: torch.Tensor  # [N, E]
    shape: LogitShape


class WholeLogProbs(NamedTuple):
    """A teacher's log-probabilities of the whole vocabulary, where they cannot be made in tiles."""

    logprobs: torch.Tensor  # [N, V] fp32


class SpanTokens(NamedTuple):
    """The student's tokens of S spans of text that its tokens and a teacher's have in common.

    Each span has a last token, and n earlier ones are in all spans together.
    """

    last: torch.Tensor  # [S] int64: the last tokens
    earlier: torch.Tensor  # [n] int64: the earlier tokens
    spans: torch.Tensor  # [n] int64: the span of each
    numbers: torch.Tensor  # [n] int64: the number of each among all requested tokens

    def added(self, logprobs: torch.Tensor) -> torch.Tensor:
        """`[S]`: the log-probability of the earlier tokens of each span, from those of all `[n]`."""
        return logprobs.new_zeros(len(self.last)).index_add(0, self.spans, logprobs)


class SpanLogProbs(NamedTuple):
    """A teacher's log-probabilities of S spans of text, whatever its tokens are.

    The divergence of a span is over two classes, its text after what is before it, and every other text. Merging
    classes lowers a divergence. The tokens of the part are the student's last ones of the spans.
    """

    logprobs: torch.Tensor  # [S] fp32
    own: SpanTokens

    def divergence(self, student: torch.Tensor, beta: float) -> torch.Tensor:
        """`[S]`: from the student's log-probabilities of the last tokens and the earlier ones, `[S + n]`."""
        last, earlier = student.split([len(self.own.last), len(self.own.earlier)])
        own, theirs = (
            torch.stack([logprobs, log_rest(logprobs)], dim=1)
            for logprobs in (last + self.own.added(earlier), self.logprobs)
        )
        return divergence(own, theirs, beta)


class SpanStates(NamedTuple):
    """A teacher's distributions at the ends of S spans of text.

    They are compared by `ops/linear_sorted_distance.py`. The tokens of the part are the student's last ones.
    """

    states: HeadStates  # at the teacher's last token of each span
    scale: torch.Tensor  # [S] fp32: probability of the teacher's earlier tokens of the span
    own: SpanTokens


Statement = HeadStates | StatesOfSameHead | WholeLogProbs | TopTokens | SpanLogProbs | SpanStates
"""A teacher's distributions of some tokens, in one of these forms."""


class Taught(NamedTuple):
    """Distributions of tokens that a teacher states."""

    statement: Statement
    tokens: torch.Tensor | None = None  # [n] int64: numbers of the tokens among all N; None: all of them, in order
    weight: float | torch.Tensor = 1.0  # of these tokens' divergences, or of each, [n]

    def renumbered(self, numbers: torch.Tensor) -> "Taught":
        """The same of tokens whose number is `numbers[i]` where it was i."""
        told, tokens = self.statement, numbers if self.tokens is None else numbers[self.tokens]
        if isinstance(told, SpanLogProbs | SpanStates):
            told = told._replace(own=told.own._replace(numbers=numbers[told.own.numbers]))
        return self._replace(statement=told, tokens=tokens)


def token_states(
    model: nn.Module, asked: AskedColumns, inputs: Mapping[str, torch.Tensor]
) -> HeadStates | WholeLogProbs:
    """The distributions of the last T tokens of `inputs["input_ids"]`, in the order of the True cells of the mask.

    Hidden states with the head's own weights, valid while those are; or all log-probabilities, of a model whose logits
    `token_log_probs` needs. Without gradients; collective if the model's forward pass is.

    Args: as in `token_log_probs`.
    """
    module = getattr(model, "module", model)
    head = _plain_head(model, module)
    if head is not None:
        shape, states = logit_shape(module, asked.temperature), list[HeadStates]()

        def note(rows: torch.Tensor, head: nn.Linear, cells: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
            states.append(HeadStates(rows, head.weight.detach(), _detached(head.bias), shape))
            return {}

        with torch.no_grad():
            if _run_caught(model, head, shape, asked, inputs, note) is not None:
                return states[-1]
    with torch.no_grad():
        return WholeLogProbs(_whole_log_probs(model, asked, inputs))


def token_divergences(
    model: nn.Module,
    taught: Sequence[Taught],
    asked: AskedColumns,
    beta: float,
    num_top: int,
    inputs: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """`[B, T]` fp32: the divergence of the last T tokens' distributions from a teacher's, 0 where not requested.

    Differentiable in the weights of `model`. All logits never exist, unless `token_log_probs` needs those of the model
    or a teacher states them. Ids that only one of the heads has are left out.

    Args:
        model: the student, as in `token_log_probs`.
        taught: distributions of the requested tokens, in the order of the True cells of the mask; divergences of a
            token that has several are added with their weights.
        asked: which tokens, and the student's temperature.
        beta: see `ops/linear_divergence.py`.
        num_top: divergences are over this number of the teacher's likeliest tokens, and the rest as one class; 0: over
            the whole vocabulary.
        inputs: arguments of the forward pass.
    """
    module = getattr(model, "module", model)
    head = _plain_head(model, module)
    if head is not None:
        shape = logit_shape(module, asked.temperature)

        def compute(rows: torch.Tensor, head: nn.Linear, cells: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
            student = HeadStates(rows, head.weight, head.bias, shape)
            return {"divergence": _added(taught, rows, lambda part: _of_states(part, student, beta, num_top))}

        found = _run_caught(model, head, shape, asked, inputs, compute)
        if found is not None:
            return found["divergence"]
    logprobs = _whole_log_probs(model, asked, inputs)
    values = _added(taught, logprobs, lambda part: _of_whole(part, logprobs, beta, num_top))
    return torch.zeros(asked.mask.shape, device=values.device).masked_scatter(asked.mask, values)


def token_comparison(
    model: nn.Module,
    taught: Sequence[Taught],
    asked: AskedColumns,
    beta: float,
    num_top: int,
    inputs: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """How the last T tokens' distributions compare with a teacher's; `[B, T]` fp32 each, 0 where not requested.

    `divergence` as in `token_divergences`, whose arguments these are; `entropy` and `teacher_entropy` in nats, the
    latter over its K tokens and the rest where it states no more; `top` and `teacher_top`, the ids of the likeliest
    tokens. Without gradients. Where several teachers state a token, the last of them counts, but in the divergence.
    """
    module = getattr(model, "module", model)
    head = _plain_head(model, module)
    with torch.no_grad():
        if head is not None:
            shape = logit_shape(module, asked.temperature)

            def compute(
                rows: torch.Tensor, head: nn.Linear, cells: tuple[torch.Tensor, ...]
            ) -> dict[str, torch.Tensor]:
                return _compared(taught, HeadStates(rows, head.weight, head.bias, shape), beta, num_top)

            found = _run_caught(model, head, shape, asked, inputs, compute)
            if found is not None:
                return found
        whole = WholeLogProbs(_whole_log_probs(model, asked, inputs))
        zeros = torch.zeros(asked.mask.shape, device=asked.mask.device)
        found = _compared(taught, whole, beta, num_top)
        return {name: zeros.masked_scatter(asked.mask, values) for name, values in found.items()}


def _compared(
    taught: Sequence[Taught], student: HeadStates | WholeLogProbs, beta: float, num_top: int
) -> dict[str, torch.Tensor]:
    """`[N]` each."""
    if isinstance(student, HeadStates):
        divergences = _added(taught, student.hidden, lambda part: _of_states(part, student, beta, num_top))
    else:
        divergences = _added(taught, student.logprobs, lambda part: _of_whole(part, student.logprobs, beta, num_top))
    top, entropy = _top_and_entropy(student)
    teacher_top, teacher_entropy = torch.zeros_like(top), torch.zeros_like(entropy)
    for part in taught:
        told = part.statement
        if isinstance(told, StatesOfSameHead):
            assert isinstance(student, HeadStates), "a model whose logits are needed does not state hidden states"
            told = HeadStates(told.hidden, student.weight, student.bias, told.shape)
        assert not isinstance(told, SpanLogProbs | SpanStates), "tokens of two vocabularies are not compared"
        places = slice(None) if part.tokens is None else part.tokens
        teacher_top[places], teacher_entropy[places] = _top_and_entropy(told)
    found = {"top": top, "entropy": entropy, "teacher_top": teacher_top, "teacher_entropy": teacher_entropy}
    return {"divergence": divergences, **found}


def _top_and_entropy(told: HeadStates | WholeLogProbs | TopTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """`[N]` fp32 each: the likeliest token of each distribution, and its entropy in nats."""
    if isinstance(told, HeadStates):
        top = top_tokens(told, 1).ids[:, 0]
        entropy = linear_log_prob(told.hidden, told.weight, top, told.bias, told.shape, True).entropy
        assert entropy is not None
        return top.float(), entropy
    if isinstance(told, WholeLogProbs):
        return told.logprobs.argmax(1).float(), -(told.logprobs.exp() * told.logprobs).sum(1)
    likeliest = told.logprobs.masked_fill(told.ids < 0, -torch.inf).argmax(1, keepdim=True)
    return told.ids.gather(1, likeliest).squeeze(1).float(), class_entropy(told)


def likeliest(statement: HeadStates | WholeLogProbs, num_tokens: int) -> TopTokens:
    """The `num_tokens` likeliest tokens of each position by a statement of the whole vocabulary."""
    if isinstance(statement, HeadStates):
        return top_tokens(statement, num_tokens)
    top = statement.logprobs.topk(num_tokens, dim=1)
    return TopTokens(top.indices, top.values)


def _added(taught: Sequence[Taught], tokens: torch.Tensor, of: Callable[[Taught], torch.Tensor]) -> torch.Tensor:
    """`[N]`: the weighted divergences of each token, the sum where there are several."""
    total = tokens.new_zeros(len(tokens), dtype=torch.float32)
    for part in taught:
        values = of(part) * part.weight
        total = total + values if part.tokens is None else total.index_add(0, part.tokens, values)
    return total


def _of_states(part: Taught, student: HeadStates, beta: float, num_top: int) -> torch.Tensor:
    """`[n]`: the divergences of a part's tokens from the student's hidden states."""
    told, hidden = part.statement, student.hidden if part.tokens is None else student.hidden[part.tokens]
    if isinstance(told, SpanLogProbs):
        rows, ids = torch.cat([hidden, student.hidden[told.own.numbers]]), torch.cat([told.own.last, told.own.earlier])
        found = linear_log_prob(rows, student.weight, ids, student.bias, student.shape)
        return told.divergence(found.logprobs, beta)
    if isinstance(told, SpanStates):
        rows, ids = student.hidden[told.own.numbers], told.own.earlier
        logprobs = linear_log_prob(rows, student.weight, ids, student.bias, student.shape).logprobs
        scale = told.own.added(logprobs).exp()
        return linear_sorted_distance(student._replace(hidden=hidden), scale, told.states, told.scale)
    if isinstance(told, StatesOfSameHead):
        told = HeadStates(told.hidden, student.weight.detach(), _detached(student.bias), told.shape)
    if isinstance(told, WholeLogProbs):
        return _of_whole(part._replace(tokens=None), _logprobs_of(student._replace(hidden=hidden)), beta, num_top)
    if isinstance(told, HeadStates):
        size = min(len(student.weight), len(told.weight))
        told, student = _cut(told, size), _cut(student, size)
        if not num_top:
            return linear_divergence(hidden, student.weight, told, beta, student.bias, student.shape)
        told = top_tokens(told, num_top)
    return linear_top_divergence(hidden, student.weight, told, beta, student.bias, student.shape)


def _of_whole(part: Taught, logprobs: torch.Tensor, beta: float, num_top: int) -> torch.Tensor:
    """`[n]`: the divergences of a part's tokens from the student's log-probabilities `[N, V]`."""
    told, student = part.statement, logprobs if part.tokens is None else logprobs[part.tokens]
    assert not isinstance(told, StatesOfSameHead), "a model whose logits are needed does not state hidden states"
    if isinstance(told, TopTokens):
        return top_divergence(student, told, beta)
    if isinstance(told, SpanLogProbs | SpanStates):
        earlier = logprobs[told.own.numbers].gather(1, told.own.earlier[:, None]).squeeze(1)
    if isinstance(told, SpanLogProbs):
        return told.divergence(torch.cat([student.gather(1, told.own.last[:, None]).squeeze(1), earlier]), beta)
    if isinstance(told, SpanStates):
        scale = told.own.added(earlier).exp()
        probabilities = _logprobs_of(told.states).exp() * told.scale[:, None]
        return sorted_distance(student.exp() * scale[:, None], probabilities)
    theirs = _logprobs_of(told) if isinstance(told, HeadStates) else told.logprobs
    size = min(theirs.shape[1], student.shape[1])
    theirs, student = (x if x.shape[1] == size else x[:, :size].log_softmax(1) for x in (theirs, student))
    if not num_top:
        return divergence(student, theirs, beta)
    top = theirs.topk(min(num_top, size), dim=1)
    return top_divergence(student, TopTokens(top.indices, top.values), beta)


def _cut(states: HeadStates, size: int) -> HeadStates:
    bias = states.bias
    return states._replace(weight=states.weight[:size], bias=bias if bias is None else bias[:size])


def _logprobs_of(states: HeadStates) -> torch.Tensor:
    """`[N, V]` fp32."""
    products = nn.functional.linear(states.hidden, states.weight, states.bias)
    return states.shape.apply_(products).log_softmax(1)


def _whole_log_probs(model: nn.Module, asked: AskedColumns, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`[N, V]` fp32: the log-probabilities of the requested tokens' positions, from logits."""
    logits = _forward(model, asked, inputs).logits[:, -asked.mask.shape[1] - 1 : -1][asked.mask]
    return (logits.float() / asked.temperature).log_softmax(1)


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()


Compute = Callable[[torch.Tensor, nn.Linear, tuple[torch.Tensor, ...]], dict[str, torch.Tensor]]
"""Makes numbers of the requested tokens' hidden states `[N, E]`, the head, and rows and columns of the tokens."""


def _run_caught(
    model: nn.Module,
    head: nn.Linear,
    shape: LogitShape,
    asked: AskedColumns,
    inputs: Mapping[str, torch.Tensor],
    compute: Compute,
) -> dict[str, torch.Tensor] | None:
    """The results of `compute` inside the forward pass of `model`, `[B, T]` each; None if the logits are needed."""
    module: Any = getattr(model, "module", model)
    parts = (head, module.get_output_embeddings(), module)
    computed_by = (type(module), *map(computes_by, parts), shape.scale, shape.softcap)
    tried = _tried.get(head)
    if tried is not None and tried.computed_by != computed_by:
        tried = None
    if tried is not None and tried.differs:
        return None
    catch = _Catch(head, shape, asked, compute, is_trial=tried is None)
    found = catch.run(model, module, inputs)
    if catch.difference is not None:
        # A NaN is not a verdict: the next pass tests again.
        differs = _on_any_process(model, not catch.difference <= catch.allowed)
        if math.isfinite(catch.difference):
            _tried[head] = Tried(computed_by, differs)
        if differs:
            say_once(
                f"{type(module).__name__}: log-probabilities are made from logits, because what it makes of its head's "
                f"products is not what its config says; they differ by {catch.difference:.2g} of the largest"
            )
            return None
    return found


class Tried(NamedTuple):
    """The result of testing a head.

    `computed_by`: how head and model computed at that time; `differs`: whether their logits differ from those that
    `LogitShape` makes of the head's products.
    """

    computed_by: tuple[Any, ...]
    differs: bool


_tried: WeakKeyDictionary[nn.Module, Tried] = WeakKeyDictionary()


def _on_any_process(model: nn.Module, differs: bool) -> bool:
    """Whether the test fails on any process: at stage 3 all of them then make another pass, which gathers weights."""
    stage = getattr(model, "zero_optimization_stage", None)
    meets_others = stage is not None and stage() == 3
    return bool(everyone().highest([int(differs)])[0]) if meets_others else differs


def _plain_head(model: nn.Module, module: nn.Module) -> nn.Linear | None:
    exact = getattr(getattr(model, "generator", None), "exact", None)
    find = getattr(module, "get_output_embeddings", None)
    head: Any = _active(find()) if find is not None else None
    if exact is not None:
        return None
    if type(head) is not nn.Linear or is_quantised(head.weight):
        what = "quantised" if type(head) is nn.Linear else f"of the class {type(head).__name__}"
        say_once(
            f"{type(module).__name__}: log-probabilities are made from logits, which takes their memory; its head "
            f"is {what}, not a plain linear layer"
        )
        return None
    return None if torch.is_autocast_enabled(head.weight.device.type) else head


def _active(head: Any) -> Any:
    """The copy of a head that peft trains with an adapter (`modules_to_save`), or its original."""
    if type(head).__name__ != "ModulesToSaveWrapper":
        return head
    names = [] if head.disable_adapters else [name for name in head.active_adapters if name in head.modules_to_save]
    return head.modules_to_save[names[0]] if names else head.original_module


def logit_shape(module: nn.Module, temperature: float) -> LogitShape:
    """Scale and softcap from a transformers config: Cohere's logit_scale, Granite's logits_scaling, Gemma's softcap."""
    config: PretrainedConfig = module.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return LogitShape(scale, getattr(config, "final_logit_softcapping", None), temperature)


def _allowed(dtype: torch.dtype) -> float:
    """Largest rounding difference of logits, relative to the largest logit."""
    return 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps


def _forward(model: nn.Module, asked: AskedColumns, inputs: Mapping[str, torch.Tensor]) -> Any:
    """The output of a forward pass, with at least the logits that predict the requested columns."""
    given = {**inputs, "logits_to_keep": asked.mask.shape[1] + 1, "use_cache": False}
    if asked.routing is None:
        return model(**given)
    with replaying(_routers[getattr(model, "module", model)], asked.routing):
        return model(**given)


_routers: WeakKeyDictionary[nn.Module, list[Router]] = WeakKeyDictionary()


def replay_routing(model: nn.Module) -> None:
    """From now on, passes of `model`, or of an engine's model, take the experts that its tokens have on record.

    Tried on two tokens. Collective if the model's forward pass is.

    Raises:
        UnsupportedModelError: it has no mixture of experts, or one whose choice cannot be replayed.
    """
    module: Any = getattr(model, "module", model)
    routers = find_routers(module)
    device = next(module.parameters()).device
    chosen = torch.arange(routers[0].top_k, device=device).expand(2, len(routers), -1)
    inputs = {"input_ids": torch.tensor([[1, 2]], device=device)}
    recorded = RecordedExperts(chosen, torch.ones(2, dtype=torch.bool, device=device))
    with torch.no_grad(), evaluating(module), replaying(routers, recorded):
        model(**inputs, use_cache=False)
    _routers[module] = routers


def replays_routing(model: nn.Module) -> bool:
    """Whether passes of `model`, or of an engine's model, take the experts on record."""
    return getattr(model, "module", model) in _routers


def _from_logits(model: nn.Module, asked: AskedColumns, inputs: Mapping[str, torch.Tensor]) -> HeadLogProbs:
    logits = _forward(model, asked, inputs).logits[:, -asked.mask.shape[1] - 1 : -1]
    targets, sharper = inputs["input_ids"][:, -asked.mask.shape[1] :], None
    if asked.supports is not None:
        return _from_supports(logits, asked, targets)
    logprobs = token_logprobs(logits, targets, asked.temperature)
    entropy = token_entropy(logits.float() / asked.temperature) if asked.with_entropy else None
    if asked.with_sharper:
        sharper = token_logprobs(logits.detach(), targets, asked.temperature / 2)
    parts = (logprobs, entropy, sharper)
    return HeadLogProbs(*(None if part is None else torch.where(asked.mask, part, 0.0) for part in parts))


def _from_supports(logits: torch.Tensor, asked: AskedColumns, targets: torch.Tensor) -> HeadLogProbs:
    """From logits `[B, T, V]` over the supports, computed as the sampler does: divided, then filtered."""
    assert asked.supports is not None
    kept = asked.supports.mask(logits.shape[-1], logits.device)  # [N, V]
    # By a tensor, as the sampler: a GPU divides by a number with other rounding.
    scaled = logits[asked.mask].float() / logits.new_tensor([asked.temperature], dtype=torch.float32)
    filtered, chosen = scaled.masked_fill(~kept, -torch.inf), targets[asked.mask]
    has_mass = scaled.detach().gather(1, chosen[:, None]).squeeze(1) > LEAST_LOGIT / 2
    logprobs = torch.where(has_mass, token_logprobs(filtered, chosen), LEAST_LOGIT)
    entropy = token_entropy(filtered) if asked.with_entropy else None
    sharper = token_logprobs(filtered.detach(), chosen, 0.5) if asked.with_sharper else None
    zeros = torch.zeros(asked.mask.shape, dtype=torch.float32, device=logits.device)
    parts = (logprobs, entropy, sharper)
    return HeadLogProbs(*(None if part is None else zeros.masked_scatter(asked.mask, part) for part in parts))


def _apart(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two trials `[B, 2, V]`, each relative to its own largest entry."""
    largest = expected.abs().amax(dim=(0, 2)).clamp(min=1e-30)
    return ((logits - expected).abs().amax(dim=(0, 2)) / largest).max().item()


class _Catch:
    """One forward pass that returns what is computed of the input of its head."""

    def __init__(self, head: nn.Linear, shape: LogitShape, asked: AskedColumns, compute: Compute, is_trial: bool):
        self.head, self.shape, self.asked, self.compute = head, shape, asked, compute
        self.is_trial = is_trial
        self.difference: float | None = None  # of the trial's logits, relative to the largest
        self.allowed = 0.0  # largest difference from rounding in the products' dtype
        self.found: dict[str, torch.Tensor] = {}
        self.expected: torch.Tensor | None = None  # [B, 2, V]: expected logits of the trials

    def run(self, model: nn.Module, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hooks = [
            self.head.register_forward_pre_hook(self._before_head),
            module.register_forward_hook(self._after_model, prepend=True),
        ]
        try:
            return _forward(model, self.asked, inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _before_head(self, head: nn.Linear, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (hidden,) = arguments
        mask, width = self.asked.mask, self.asked.mask.shape[1]
        cells = mask.nonzero(as_tuple=True) if self.asked.cells is None else self.asked.cells
        rows = hidden[:, -width - 1 : -1][cells]
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=rows.device)
        computed = self.compute(rows, head, cells)
        self.found = {name: zeros.masked_scatter(mask, values) for name, values in computed.items()}
        if not self.is_trial:
            return (hidden[:, :0],)
        with torch.no_grad():
            tried = hidden[:, -1:].detach()
            largest = nn.functional.linear(tried, head.weight, head.bias).abs().max().clamp(min=1e-6)
            tried = torch.cat([tried, (tried * (TRIAL_PRODUCT / largest)).to(tried.dtype)], dim=1)  # [B, 2, E]
            products = nn.functional.linear(tried, head.weight, head.bias)
            self.expected = self.shape._replace(temperature=1.0).apply_(products)
            self.allowed = _allowed(products.dtype)  # the dtype of computation may differ from that of sharded weights
        return (tried,)

    def _after_model(self, module: nn.Module, arguments: Any, output: Any) -> dict[str, torch.Tensor]:
        if self.expected is not None:
            logits = output.logits.detach().float()
            self.difference = _apart(logits, self.expected) if logits.shape == self.expected.shape else math.inf
        return self.found


def token_values(model: nn.Module, head: nn.Linear, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`[R, W]` fp32: the output of `head [1, E]` for each token, differentiable in both. Collective if `model` is.

    Args:
        model: a causal model of transformers, one with adapters of peft, or an engine around one.
        head: a part of that model's module, so that it is sharded and trained with it.
        inputs: arguments of the model's forward.
    """
    module: Any = getattr(model, "module", model)
    found: dict[str, torch.Tensor] = {}

    def before_head(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (hidden,) = arguments
        found["values"] = head(hidden).squeeze(-1).float()
        return (hidden[:, :0],)

    def after_model(_: nn.Module, arguments: Any, output: Any) -> dict[str, torch.Tensor]:
        return found

    hooks = [
        module.get_output_embeddings().register_forward_pre_hook(before_head),
        module.register_forward_hook(after_model, prepend=True),
    ]
    try:
        return model(**inputs, use_cache=False)["values"]
    finally:
        for hook in hooks:
            hook.remove()


def vocabulary_share(group: dist.ProcessGroup, num_rows: int) -> VocabularyShare:
    """The share of this process: `num_rows` rows of the head, after those of the earlier ranks of `group`. Collective.

    The processes of the group must call `linear_log_prob` with the same hidden states and targets, at the same time.
    """
    world, rank = group.size(), group.rank()
    counts = [0] * world
    dist.all_gather_object(counts, num_rows, group=host_group(group))

    def gather(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    def add(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    return VocabularyShare(sum(counts[:rank]), gather, add)
