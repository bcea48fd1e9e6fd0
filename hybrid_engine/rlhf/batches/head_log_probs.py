"""Numbers of a causal model's tokens from its last hidden states, without all logits in memory at once.

Log-probabilities and entropies, the divergence from a teacher, and the values of a critic's head.

The model runs unchanged. A hook captures the head's input and passes no rows to the head, so that the model's own code
after the head (softcap, scale) has nothing to do. The capture runs inside the model's forward pass, where a sharded
head is gathered, and its result becomes the model's output, which sharding follows into the backward pass.

B rows, T the last columns of the input, whose tokens are requested; E hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from hybrid_engine.config.notices import say_once
from hybrid_engine.containers.quantised import is_quantised
from hybrid_engine.distributed.groups import host_group
from hybrid_engine.distributed.verdict import everyone
from hybrid_engine.generation.rollout.generator import computes_by
from hybrid_engine.ops.linear_divergence import Teacher, divergence, linear_divergence
from hybrid_engine.ops.linear_log_prob import LogitShape, VocabularyShare, linear_log_prob
from hybrid_engine.ops.sample import token_logprobs
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
        part = linear_log_prob(rows, head.weight, targets[cells], head.bias, shape, asked.with_entropy)
        found = {name: values for name, values in part._asdict().items() if values is not None}
        if asked.with_sharper:
            sharper = shape._replace(temperature=shape.temperature / 2)
            with torch.no_grad():
                found["sharper"] = linear_log_prob(rows, head.weight, targets[cells], head.bias, sharper).logprobs
        return found

    found = _run_caught(model, head, shape, asked, inputs, compute)
    if found is None:
        return _from_logits(model, asked, inputs)
    return HeadLogProbs(found["logprobs"], found.get("entropy"), found.get("sharper"))


def token_divergences(
    model: nn.Module,
    teacher: nn.Module,
    asked: AskedColumns,
    teacher_temperature: float,
    beta: float,
    inputs: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """`[B, T]` fp32: the divergence of the last T tokens' distributions from a teacher's, 0 where not requested.

    Differentiable in the weights of `model`. The passes of both see the same tokens, and neither has all logits in
    memory; a model of which `token_log_probs` needs the logits has them here too.

    Args:
        model: the student, as in `token_log_probs`.
        teacher: a causal model with the same tokens; ids that only one of the heads has are left out.
        asked: which tokens, and the student's temperature.
        teacher_temperature: of the teacher's distribution.
        beta: see `ops/linear_divergence.py`.
        inputs: arguments of both forwards.
    """
    module, taught = getattr(model, "module", model), getattr(teacher, "module", teacher)
    head, taught_head = _plain_head(model, module), _plain_head(teacher, taught)
    if head is None or taught_head is None:
        return _divergences_from_logits(model, teacher, asked, teacher_temperature, beta, inputs)
    shape, taught_shape = logit_shape(module, asked.temperature), logit_shape(taught, teacher_temperature)
    states: dict[str, torch.Tensor] = {}

    def note(rows: torch.Tensor, head: nn.Linear, cells: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        states.update(hidden=rows, weight=head.weight, bias=head.bias)
        return {}

    def compute(rows: torch.Tensor, head: nn.Linear, cells: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        size = min(len(head.weight), len(states["weight"]))
        biases = (None if bias is None else bias[:size] for bias in (head.bias, states["bias"]))
        own_bias, taught_bias = biases
        of_teacher = Teacher(states["hidden"], states["weight"][:size], taught_bias, taught_shape)
        return {"divergence": linear_divergence(rows, head.weight[:size], of_teacher, beta, own_bias, shape)}

    with torch.no_grad():
        is_plain = _run_caught(teacher, taught_head, taught_shape, asked, inputs, note) is not None
    found = _run_caught(model, head, shape, asked, inputs, compute) if is_plain else None
    if found is None:
        return _divergences_from_logits(model, teacher, asked, teacher_temperature, beta, inputs)
    return found["divergence"]


def _divergences_from_logits(
    model: nn.Module,
    teacher: nn.Module,
    asked: AskedColumns,
    teacher_temperature: float,
    beta: float,
    inputs: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    def logprobs(of: nn.Module, temperature: float) -> torch.Tensor:
        logits = of(**_given(asked, inputs)).logits[:, -asked.mask.shape[1] - 1 : -1][..., :size]
        return (logits.float() / temperature).log_softmax(-1)

    size = min(getattr(of, "module", of).get_output_embeddings().weight.shape[0] for of in (model, teacher))
    with torch.no_grad():
        of_teacher = logprobs(teacher, teacher_temperature)
    return torch.where(asked.mask, divergence(logprobs(model, asked.temperature), of_teacher, beta), 0.0)


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
    found = catch.run(model, module, _given(asked, inputs))
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


def _given(asked: AskedColumns, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {**inputs, "logits_to_keep": asked.mask.shape[1] + 1, "use_cache": False}


def _from_logits(model: nn.Module, asked: AskedColumns, inputs: Mapping[str, torch.Tensor]) -> HeadLogProbs:
    logits = model(**_given(asked, inputs)).logits[:, -asked.mask.shape[1] - 1 : -1]
    targets, sharper = inputs["input_ids"][:, -asked.mask.shape[1] :], None
    logprobs = token_logprobs(logits, targets, asked.temperature)
    entropy = token_entropy(logits.float() / asked.temperature) if asked.with_entropy else None
    if asked.with_sharper:
        sharper = token_logprobs(logits.detach(), targets, asked.temperature / 2)
    parts = (logprobs, entropy, sharper)
    return HeadLogProbs(*(None if part is None else torch.where(asked.mask, part, 0.0) for part in parts))


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

    def run(self, model: nn.Module, module: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        hooks = [
            self.head.register_forward_pre_hook(self._before_head),
            module.register_forward_hook(self._after_model, prepend=True),
        ]
        try:
            return model(**inputs)
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
