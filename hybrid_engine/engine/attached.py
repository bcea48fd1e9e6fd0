"""A model whose `generate()` runs on containers, in a training loop that is unaware of them.

    hybrid_engine.attach(model)                  # once
    model.generate(input_ids, ...)               # as before, also in training mode and between any two steps
    attached = hybrid_engine.attach(other)       # what it returns detaches, reports, and is a rollout_func for TRL
    attached.detach()

Containers read the model's parameters in place, so they see every in-place update, including peft adapters. Other
changes are detected at the next call: new modules (an adapter), another dtype or device, `fully_shard`. B prompts, P
their padded length, G samples of each, T the longest answer.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hybrid_engine.config.blocks import HybridEngineConfig
from hybrid_engine.config.checks import find_nearest
from hybrid_engine.config.notices import say_once
from hybrid_engine.distributed.processes import get_rank, get_world_size, say_what_limits
from hybrid_engine.distributed.verdict import HeldInterrupts, holding_interrupts, naming_who_left
from hybrid_engine.generation.core import GenerateCall, Request
from hybrid_engine.generation.model.probe import LogprobDifference, evaluating
from hybrid_engine.generation.output import GenerateOutput
from hybrid_engine.generation.rollout.engine_methods import PutGenerate, describe_generation
from hybrid_engine.generation.rollout.generator import Generator, roll_out_what_fits
from hybrid_engine.generation.rollout.preparing import prepare
from hybrid_engine.ops.gpu import kernel_problem
from hybrid_engine.zero.fsdp2_private import keeping_reshard_after_forward, make_root
from hybrid_engine.zero.sharding import Sharding

OPTIONS = (
    "enable_cuda_graph",
    "kv_block_size",
    "max_kv_blocks",
    "max_out_tokens",
    "max_running",
    "pin_parameters",
    "prefix_cache",
    "release_inference_cache",
)
"""Keys of the `hybrid_engine` block that apply to a model trained by other code."""
MOST_TOKENS_WITHOUT_LIMIT = 32768
"""Maximum tokens of a sequence if the model's config has no limit."""
NUMBERS = ("eps", "scal", "multiplier", "cap", "alpha", "limit")
"""Parts of the names that transformers and peft give the numbers that layers compute with."""


def attach(model: nn.Module, **options: Any) -> "Attached":
    """Makes `model.generate()` run on containers, until `detach()`; prints one line with the reason if they cannot.

    Only the attribute `generate` of the model changes. A copy of the model uses its own `generate()`. If FSDP2 shards
    the model every call is collective, as before; otherwise each process generates alone.

    Args:
        model: a causal model of transformers or a peft model, plain, compiled, within DDP, or sharded by FSDP2.
        **options: keys of the config's `hybrid_engine` block: `max_out_tokens` (as many as the model has positions),
            `max_running`, `max_kv_blocks`, `kv_block_size`, `pin_parameters`, `enable_cuda_graph`, `prefix_cache`,
            `release_inference_cache` (true here).

    Raises:
        ValueError: the model is attached already, belongs to an engine or does not generate; an option is unknown or
            out of range.
    """
    model = _generating_module(model)
    return Attached(model, _read_options(model, options))


def _generating_module(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ValueError(f"attach(): model is a {type(model).__name__}; pass a torch.nn.Module")
    if hasattr(model, "backward") and hasattr(model, "step"):
        raise ValueError(
            f"attach(): {type(model).__name__} is an engine; set hybrid_engine.enabled in the config of initialize(), "
            "and it generates on containers"
        )
    for name in ("_orig_mod", "module"):  # torch.compile's OptimizedModule and DistributedDataParallel
        inner = getattr(model, name, None)
        if not hasattr(type(model), "generate") and isinstance(inner, nn.Module):
            model = inner
    config = getattr(model, "config", None)
    if not hasattr(type(model), "generate") or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"attach(): {type(model).__name__} is not a decoder-only language model with generate()")
    for module in (model, _base(model)):
        generate = module.__dict__.get("generate")
        if isinstance(generate, AttachedGenerate):
            raise ValueError("attach(): the model is attached already; call detach() on what the first call returned")
        if hasattr(generate, "engine"):
            raise ValueError("attach(): the model belongs to an engine, whose generate() runs on containers already")
    return model


def _base(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _read_options(model: nn.Module, options: dict[str, Any]) -> HybridEngineConfig:
    for name in options:
        if name not in OPTIONS:
            nearest = find_nearest(name, OPTIONS)
            hint = f"did you mean {nearest}?" if nearest else f"there are {', '.join(OPTIONS)}"
            raise ValueError(f"attach(): {name}={options[name]!r} is not an option; {hint}")
    config: Any = model.config
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    defaults = {"max_out_tokens": (longest or MOST_TOKENS_WITHOUT_LIMIT) + 1, "release_inference_cache": True}
    return HybridEngineConfig(enabled=True, **{**defaults, **options})


class AttachedGenerate(PutGenerate):
    """`generate` of an attached model."""

    def __init__(self, attached: "Attached") -> None:
        super().__init__(attached.module)
        self.attached = attached

    def __call__(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        return self.attached.generate(inputs, generation_config, **kwargs)


class Attached:
    """The result of `attach`: restores the model's own `generate()`, and reports how the model generates."""

    def __init__(self, module: nn.Module, config: HybridEngineConfig):
        self.module, self.config = module, config
        self._before = module.__dict__.get("generate")
        self._own = module.generate
        self._turn = threading.RLock()
        self._is_generating = self._is_detached = False
        self._build()
        module.generate = AttachedGenerate(self)  # type: ignore[assignment]

    def _build(self) -> None:
        """Builds containers for the current model; after an error, the next call tries again."""
        self._fingerprint: Any = None
        self.generator: Generator | None = None
        device = next(self.module.parameters()).device
        say_what_limits(device)
        reason = reason_unreadable(self.module) or kernel_problem(device)
        found, generator = fingerprint(self.module), None
        if reason is None:
            with as_found(sharding := find_sharding(self.module)), torch.no_grad():
                generator = Generator(self.module, sharding, self.config, device=device)
                with own_forward(self.module), evaluating(self.module):
                    generator.build_containers()
            reason = generator.fallback_reason
        self.generator, self._fingerprint = generator, found
        if reason is not None:
            say_once(f"attach(): {type(self.module).__name__} generates with its own generate(): {reason}")

    @property
    def logprob_difference(self) -> LogprobDifference | None:
        """Difference of log-probabilities of the rollout and the model's forward at start-up; None: not measurable.

        The rollout runs on containers, or by the model's own `generate()` if `generator.fallback_reason` is set.
        """
        return None if self.generator is None else self.generator.logprob_difference

    def detach(self) -> None:
        """Restores the model's own `generate()` and frees the memory of containers; further calls do nothing.

        Raises:
            ValueError: called inside `generate()` of the same thread; a call in another thread is waited for.
        """
        with self._turn:
            if self._is_generating:
                raise ValueError("detach() was called inside generate(); wait until that ends")
            self._is_detached = True
            generate = self.module.__dict__.get("generate")
            if not isinstance(generate, AttachedGenerate) or generate.attached is not self:
                return
            if self._before is None:
                del self.module.generate
            else:
                self.module.generate = self._before  # type: ignore[assignment]
            if self.generator is not None:
                self.generator.release_workspace()
                self.generator = None

    def report(self) -> str:
        """Describes how the model generates, and the reason."""
        if self.generator is None:
            reason = "it was detached" if self._is_detached else reason_unreadable(self.module)
            return f"{type(self.module).__name__} generates with its own generate(): {reason}"
        return describe_generation(self.generator)

    @naming_who_left("generate()")
    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """Generates, with the arguments and results of transformers' `generate()`; without dropout; restores modes.

        In addition to transformers' options it takes those of `HybridEngine.generate`; the noise of samples follows
        torch's seed. With `return_dict_in_generate` the result has `logprobs`, `lengths` and `finish_reason` too.
        Requests that containers cannot handle run by the model's own `generate()`, and one line says why.

        Raises:
            ValueError: an input or option is invalid; raised before anything is done.
        """
        if inputs is not None and kwargs.get("input_ids") is not None:
            raise ValueError("generate(): inputs and input_ids both name the prompts; pass one of them")
        with self._turn:  # other threads wait here
            if self._is_detached:  # by another thread, or called through an old reference
                return self._own(inputs, generation_config, **kwargs)
            if self._is_generating:
                raise ValueError("generate() was called inside generate(); wait until that ends")
            self._is_generating = True
            try:
                with (
                    holding_interrupts() as held,
                    torch.inference_mode(False),
                    torch.no_grad(),
                    evaluating(self.module),
                ):
                    return self._generate(inputs, generation_config, kwargs, held)
            finally:
                self._is_generating = False

    def _generate(
        self,
        inputs: torch.Tensor | None,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
        held: HeldInterrupts,
    ) -> Any:
        if fingerprint(self.module) != self._fingerprint:
            self._build()
        kwargs = dict(kwargs)
        prompts = inputs if inputs is not None else kwargs.pop("input_ids", None)
        if self.generator is None or prompts is None:
            if self.generator is not None and self.generator.model is not None:  # embeddings, or a first token
                say_once("generate() uses the model's own implementation: there are no input_ids to begin from")
            with held.allowed():
                return self._own(prompts, generation_config, **kwargs)
        with as_found(self.generator.sharding), own_forward(self.module):
            self.generator.begin()
            call = GenerateCall(
                input_ids=prompts,
                attention_mask=kwargs.get("attention_mask"),
                generation_config=generation_config,
                options={name: value for name, value in kwargs.items() if name != "attention_mask"},
            )
            request = prepare(self.generator, call)
            return roll_out_what_fits(
                self.generator, request, lambda request: self._run(request, prompts, generation_config, kwargs, held)
            )

    def _run(
        self,
        request: Request,
        prompts: torch.Tensor,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
        held: HeldInterrupts,
    ) -> Any:
        generator = self.generator
        assert generator is not None
        with ExitStack() as release:
            cache = generator.gather(request, release)
            if request.plan is not None or request.sequences:
                return as_transformers(generator.run(request, cache, held).output)
            # With whole weights processes need not wait for each other, as transformers does per token of a sharded
            # module.
            if generator.sharding.is_sharded:
                kwargs.setdefault("synced_gpus", generator.gatherer.is_streamed)
            with held.allowed():
                return generator.partners.agree(lambda: self._own(prompts, generation_config, **kwargs))

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """The `rollout_func` of TRL's trainers: one completion for each of `prompts`, which already contain repeats.

        Returns `prompt_ids` and `completion_ids`, lists of token ids, and `logprobs`, the sampler's log-probability of
        each token of a completion under softmax(logits / temperature), as the trainer computes them.

        Raises:
            ValueError: the model's own `generate()` runs, which does not return these log-probabilities.
        """
        prompt_ids = tokenize(prompts, trainer)
        ids, mask = prompt_tensors(prompt_ids, trainer)
        output = self.generate(ids, trainer.generation_config, attention_mask=mask, return_dict_in_generate=True)
        if getattr(output, "logprobs", None) is None:
            raise ValueError(f"rollout_func: there are no log-probabilities of the sampler; {self.report()}")
        return {"prompt_ids": prompt_ids, **completions(output, ids.shape[1])}


@dataclass
class AttachedOutput(GenerateDecoderOnlyOutput):
    """`sequences` of transformers and additional fields with the meaning of `GenerateOutput`."""

    logprobs: torch.Tensor | None = None
    """`[B*G, T]` fp32 of the sampled tokens under softmax(logits / temperature); 0 after the response."""
    lengths: torch.Tensor | None = None
    """`[B*G]` int64: tokens of the response, including the end-of-sequence token."""
    finish_reason: list[str] | None = None
    """"stop" or "length"."""
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    prompt_logprobs: torch.Tensor | None = None
    prompt_top_tokens: torch.Tensor | None = None
    prompt_top_logprobs: torch.Tensor | None = None


def as_transformers(output: torch.Tensor | GenerateOutput) -> torch.Tensor | AttachedOutput:
    """Returns tokens unchanged, and converts a dict of results to transformers' class."""
    return output if isinstance(output, torch.Tensor) else AttachedOutput(**output)


def tokenize(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """The token ids that `trainer` itself would produce for `prompts`: texts, or conversations by its chat template."""
    if not prompts:
        raise ValueError("rollout_func: prompts=[] must have at least one; leave the call out if there are none")
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    return tokenizer.apply_chat_template(
        conversation=prompts,
        tools=getattr(trainer, "tools", None) or None,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )["input_ids"]


def prompt_tensors(prompt_ids: list[list[int]], trainer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, P]`, padded on the left, on the trainer's device."""
    width, pad = max(map(len, prompt_ids)), trainer.processing_class.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompt_ids])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompt_ids])
    device = trainer.accelerator.device
    return ids.to(device), mask.to(device)


def completions(output: Any, prompt_width: int) -> dict[str, list[list[Any]]]:
    """`completion_ids` and `logprobs` of each row of `output`, without padding."""
    tokens, logprobs = output.sequences[:, prompt_width:].tolist(), output.logprobs.tolist()
    lengths = output.lengths.tolist()
    return {
        "completion_ids": [row[:length] for row, length in zip(tokens, lengths, strict=True)],
        "logprobs": [row[:length] for row, length in zip(logprobs, lengths, strict=True)],
    }


def find_sharding(model: nn.Module) -> Sharding:
    """The current sharding of `model`, from FSDP2's own marks; a whole model has no partners."""
    wrapped = fsdp_modules(model)
    if not wrapped:
        return Sharding(root=model, stage=0, world_size=1, rank=0)
    make_root(wrapped[0])
    mesh = next(param.device_mesh for param in model.parameters() if isinstance(param, DTensor))
    # 3: between two calls a process has its shards, even if FSDP2 keeps more from a forward to its backward pass.
    return Sharding(root=model, layers=wrapped[1:], stage=3, world_size=get_world_size(), rank=get_rank(), mesh=mesh)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules that FSDP2 gathers one at a time; the model itself comes first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reason_unreadable(model: nn.Module) -> str | None:
    """The reason why containers cannot read the weights of `model` in their current layout, or None."""
    wrapped = fsdp_modules(model)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return "its weights are flattened by FSDP's first version; shard it by fully_shard (fsdp_version: 2)"
    if wrapped and wrapped[0] is not model:
        return "parts of it are sharded by fully_shard, and itself it is not; call fully_shard(model) after its layers"
    parameters = list(model.parameters())
    if not wrapped and any(isinstance(parameter, DTensor) for parameter in parameters):
        return "its weights are DTensors that FSDP2 does not gather"
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "its weights are partitioned by DeepSpeed"
    if any(parameter.is_meta for parameter in parameters):
        return "some of its weights lie elsewhere until a layer needs them (device_map)"
    if len({parameter.device for parameter in parameters}) > 1:
        return "its weights lie on several devices"
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "its weights are quantised"
    return None


def fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Equal while `find_sharding` and `reason_unreadable` have the same results, and dtype, device and numbers do."""
    first = next(model.parameters())
    is_distributed = torch.distributed.is_initialized()
    layout = (tuple(map(id, fsdp_modules(model))), first.dtype, first.device, is_distributed)
    return (*layout, reason_unreadable(model), *_frequencies(model), *_numbers(model))


def _frequencies(model: nn.Module) -> Iterator[object]:
    """The rotary frequencies of a model, and how often they were changed in place.

    Without those that the model's own forward pass changes with the length of its input.
    """
    for name, buffer in model.named_buffers():
        module = model.get_submodule(name.rpartition(".")[0])
        kind = str(getattr(module, "rope_type", ""))
        if name.endswith("inv_freq") and "dynamic" not in kind and kind != "longrope":
            yield id(buffer), 0 if buffer.is_inference() else buffer._version


def _numbers(model: nn.Module) -> Iterator[float]:
    """The plain numbers in modules that containers copy, for adapters also those stored by adapter name.

    Other numbers may be statistics of the user's code, which change at every step.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if not any(word in name for word in NUMBERS):
                continue
            if type(value) is float:
                yield value
            elif type(value) is dict:
                yield from (number for number in value.values() if type(number) is float)


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Inside, removes accelerate's wrapper of `forward()` for mixed precision; weights keep their dtype."""
    wrapped, own = model.__dict__.get("forward"), model.__dict__.get("_original_forward")
    if wrapped is None or own is None:
        yield
        return
    model.forward = own
    try:
        yield
    finally:
        model.forward = wrapped


@contextmanager
def as_found(sharding: Sharding) -> Iterator[None]:
    """At the end, returns a sharded model to shards, with FSDP2's settings as the user made them."""
    if not sharding.is_sharded:
        yield
        return
    sharding.reshard()  # parameters left gathered by an evaluation may be older than the shards
    with keeping_reshard_after_forward(sharding.fsdp_modules()):
        yield
