"""The engine that `init_inference` returns: `forward` and `generate` without a training engine.

    pipe = pipeline("text-generation", model="...")
    pipe.model = init_inference(pipe.model, dtype="bf16")

B rows, P padded length, N tokens without padding, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutput

from hybrid_engine.containers import InferenceEncoder
from hybrid_engine.containers.device import num_bytes
from hybrid_engine.distributed.processes import default_device
from hybrid_engine.distributed.verdict import HeldInterrupts, holding_interrupts, naming_who_left
from hybrid_engine.generation.core import GenerateCall, Request
from hybrid_engine.generation.model.probe import LogprobDifference
from hybrid_engine.generation.model.weights import ModelGroup
from hybrid_engine.generation.options import merge_options
from hybrid_engine.generation.output import GenerateOutput, score_packed
from hybrid_engine.generation.rollout.engine_methods import WarmUp, describe_generation, warm_up
from hybrid_engine.generation.rollout.generator import Generator, roll_out_what_fits
from hybrid_engine.generation.rollout.preparing import check_prompts, prepare
from hybrid_engine.inference.config import InferenceConfig
from hybrid_engine.metrics.memory import format_bytes
from hybrid_engine.serving import import_serving
from hybrid_engine.zero.wrapping import check_uncompiled


class InferenceEngine(nn.Module):
    """A model for inference that replaces the model: attributes that it does not have are looked up on the model.

    `module` is the model that was passed; `config` and `generation_config` are read from and set on the model.
    """

    is_engine = True
    """Marks engines, which cannot be passed to `initialize()` as a model."""

    def __init__(
        self,
        module: nn.Module,
        options: InferenceConfig,
        generator: Generator | None,
        encoder: InferenceEncoder | None,
        group: ModelGroup,
        reason: str | None,
    ):
        """`reason` is why the model's own layers run, for an engine without a generator; None: they do not."""
        super().__init__()
        self.module, self.options, self.generator, self.encoder = module, options, generator, encoder
        self.group, self._reason = group, reason
        self.cut_linears = 0
        self.train(module.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("config", "generation_config"):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def reason(self) -> str | None:
        """The reason why the model's own layers run; None: they do not."""
        return self._reason if self.generator is None else self.generator.fallback_reason

    @property
    def logprob_difference(self) -> LogprobDifference | None:
        """Difference of the containers, or the model's own `generate()`, to the model's forward; None: not measured."""
        return None if self.generator is None else self.generator.logprob_difference

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights and of the computation."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def device(self) -> torch.device:
        """The device of the computation and of inputs."""
        return next((p.device for p in self.module.parameters() if not p.is_meta), default_device())

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "InferenceEngine":
        """Implements `to()` and similar methods; raises ValueError if containers hold a part of the model."""
        dtype, device = self.dtype, self.device
        if self.group.size > 1 and self._has_containers:
            moved = fn(torch.empty(1, dtype=dtype, device=device))
            if (moved.dtype, moved.device) != (dtype, device):
                raise ValueError(
                    f"to(): {moved.dtype} on {moved.device} is not {dtype} on {device}, where this process holds its "
                    "part of the model; pass dtype to init_inference() instead"
                )
            return self
        super()._apply(fn, recurse)
        if self.encoder is not None:
            self.encoder.bind()
        if self.generator is not None and (self.dtype, self.device) != (dtype, device):
            self.generator.move_to(self.device)
        return self

    @property
    def _has_containers(self) -> bool:
        return self.encoder is not None or (self.generator is not None and self.generator.model is not None)

    def let_go(self) -> None:
        """Called when the module's own weights are freed and only this rank's parts are left."""
        assert self.generator is not None
        self.group = self.generator.group = self.group.without_module()

    @naming_who_left("forward()")
    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output without gradients, for its own arguments.

        If processes share a decoder it takes `input_ids [B, P]` and `attention_mask [B, P]` (padding on the left), and
        returns `logits [B, P, V]` fp32, zero at padding; all processes pass the same.

        Raises:
            ValueError: any other argument in that case. An error on one process is raised on all.
        """
        if self.encoder is not None:
            return self.encoder.forward(*args, **kwargs)
        if self.group.has_whole_module:
            return self.module(*args, **kwargs)
        return self._forward_shared(*args, **kwargs)

    def _forward_shared(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: Any
    ) -> CausalLMOutput:
        given = [
            name for name, value in others.items() if value is not None and name not in ("use_cache", "return_dict")
        ]
        if given:
            raise ValueError(
                f"forward(): {given[0]} is not served where processes share the model; pass input_ids and "
                f"attention_mask, or set {self.group.remedy}"
            )
        assert self.generator is not None and self.generator.model is not None
        model = self.generator.model
        mask = check_prompts(input_ids, attention_mask, model.vocab_size, None).to(model.device)
        with torch.autocast(model.device.type, enabled=False):
            given, lengths = input_ids.to(model.device)[mask], mask.sum(1).tolist()
            packed = self.group.agree(lambda: score_packed(model, given, lengths))
        logits = packed.new_zeros(*mask.shape, packed.shape[-1])
        logits[mask] = packed
        return CausalLMOutput(logits=logits)

    @naming_who_left("generate()")
    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        inputs: torch.Tensor | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | GenerateOutput:
        """Generates with Hugging Face's options, meanings and shapes, as `HybridEngine.generate` does.

        If processes share the model all pass the same prompts and get all rows. `inputs` is transformers' other name of
        `input_ids`; without either, one sequence is started with the beginning-of-sequence token.

        Raises:
            ValueError: the model does not have `generate()`, or an input or option is invalid.
        """
        if self.generator is None:
            check_uncompiled("init_inference", self.module)
            raise ValueError(f"generate(): {type(self.module).__name__} does not generate; call forward()")
        # The workspace must not keep tensors made in inference mode.
        with holding_interrupts() as held, torch.inference_mode(False), torch.no_grad():
            prompts = self.generator.partners.agree(lambda: self._prompts(input_ids, inputs, generation_config, kwargs))
            call = GenerateCall(
                input_ids=prompts,
                attention_mask=attention_mask,
                generation_config=generation_config,
                seed=seed,
                options=kwargs,
            )
            request = prepare(self.generator, call)
            return roll_out_what_fits(self.generator, request, lambda request: self._roll_out(request, held))

    def _roll_out(self, request: Request, held: HeldInterrupts) -> torch.Tensor | GenerateOutput:
        assert self.generator is not None
        with ExitStack() as release:
            cache = self.generator.gather(request, release)
            return self.generator.run(request, cache, held).output

    @contextmanager
    def serving(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        longest: int | None = None,
        max_running: int | None = None,
        model_name: str | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Inside, a server answers requests at an OpenAI-compatible address, see `HybridEngine.serving`.

        Raises:
            ValueError: the model does not have `generate()`; processes share it and it has no containers; an option is
                wrong.
        """
        if self.generator is None:
            raise ValueError(f"serving(): {type(self.module).__name__} does not generate; call forward()")
        build_server = import_serving()
        shape: dict[str, Any] = {"longest": longest, "max_running": max_running, "model_name": model_name}
        with build_server(self.module, self.generator, tokenizer, **shape, **options) as server:
            yield server

    @contextmanager
    def reading_weights(self) -> Iterator[None]:
        """Inside, containers have their weights, adapters fused, and gradients are disabled; for several passes."""
        if self.generator is None:
            raise ValueError(f"{type(self.module).__name__} does not generate; call forward()")
        if self.generator.is_live:  # the end would unfuse adapters that the batch still reads
            raise ValueError("the model is being served; wait until that ends, or send requests to the server")
        with torch.inference_mode(False), torch.no_grad(), self.generator.readable(self.generator.model):
            yield

    def _prompts(
        self,
        input_ids: torch.Tensor | None,
        inputs: torch.Tensor | None,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        if inputs is not None and input_ids is not None:
            raise ValueError("generate(): inputs and input_ids both name the prompts; pass one of them")
        input_ids = inputs if inputs is not None else input_ids
        if input_ids is None and kwargs.get("inputs_embeds") is None:
            return self._first_tokens(generation_config, kwargs)
        return input_ids

    def _first_tokens(self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> torch.Tensor:
        """`[1, 1]`: the token that transformers starts with if there is no prompt."""
        merged = merge_options(self.module.generation_config, generation_config, kwargs)
        token = merged.get("bos_token_id")
        if token is None:
            raise ValueError("generate(): there is no prompt and no bos_token_id to begin with; pass input_ids")
        return torch.tensor([[token]], device=self.device)

    def warm_up(self, num_prompts: int | None = None, prompt_length: int | None = None, **options: Any) -> WarmUp:
        """Probes, compiles and records steps before the first rollout would have to; returns the time it took.

        Takes the rollouts' shape and the options of `generate()`, see `generation.warm_up`. Collective if processes
        share the model. Raises ValueError for a model without `generate()`.
        """
        if self.generator is None:
            raise ValueError(f"warm_up(): {type(self.module).__name__} does not generate; call forward()")
        with holding_interrupts(), torch.inference_mode(False), torch.no_grad():
            return warm_up(self.generator, num_prompts, prompt_length, options)

    def destroy(self) -> None:
        """Frees the KV workspace's memory and drops recorded steps, before their process groups are destroyed.

        The next `generate()` allocates and records them again.
        """
        if self.generator is not None:
            self.generator.destroy()

    def report(self) -> str:
        """The layers that run on containers, those that do not, and the reason; dtype, device, sharing and memory."""
        if self.encoder is not None:
            lines = [f"containers: all {len(self.encoder.layers)} {self.encoder.policy.layer_class} layers"]
        elif self.generator is not None:
            lines = [describe_generation(self.generator)]
        else:
            lines = [f"containers: none, the model's own layers run, because {self.reason}"]
        if self.cut_linears:
            lines.append(f"{self.cut_linears} linears found by their names or by injection_policy are shared")
        here = [parameter for parameter in self.module.parameters() if parameter.device.type != "meta"]
        lines.append(f"{type(self.module).__name__} in {self.dtype}, {format_bytes(num_bytes(here))} in the module")
        return "\n".join(lines)
