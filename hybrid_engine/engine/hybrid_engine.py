"""HybridEngine: the training engine that also generates, from the very same weights.

    engine.eval()
    rollout = engine.generate(input_ids, attention_mask=mask, do_sample=True, return_dict_in_generate=True)
    engine.train()
    engine.backward(loss)
    engine.step()

A rollout has three phases: gather (weights whole or streamed layer by layer, LoRA fused, KV workspace
taken), run (prefill, fork, decode), release (LoRA unfused, weights resharded, workspace given back).
`engine.module.generate` is the same function. Requests that containers cannot handle go to the model's own
`generate()`, with one line that names the request and the reason.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hybrid_engine.config import EngineConfig
from hybrid_engine.containers.views import TransposedLinear
from hybrid_engine.distributed.verdict import HeldInterrupts, holding_interrupts, naming_who_left
from hybrid_engine.engine.checks import check_generates
from hybrid_engine.engine.zero_engine import ZeroEngine
from hybrid_engine.generation.core import GenerateCall, Request, RolloutResult
from hybrid_engine.generation.live.asynchronous import AsyncRollout, Carried, generate_until, start_async
from hybrid_engine.generation.memory import AllocatorPeak, TrainingMemory
from hybrid_engine.generation.model.groups import (
    TRAINING_OPTION,
    check_group_size,
    check_parts,
    share_sharded_model,
    share_unit,
)
from hybrid_engine.generation.model.probe import LogprobDifference, compare_logprobs
from hybrid_engine.generation.output import GenerateOutput
from hybrid_engine.generation.rollout.engine_methods import ModuleGenerate, WarmUp, describe_generation, warm_up
from hybrid_engine.generation.rollout.generator import Generator, roll_out_what_fits
from hybrid_engine.generation.rollout.preparing import prepare
from hybrid_engine.metrics.latency import LatencyStats
from hybrid_engine.optim.state_offload import OffloadStateTypeEnum
from hybrid_engine.serving import import_serving
from hybrid_engine.zero.split_module import check_split, original_of

if TYPE_CHECKING:
    from hybrid_engine.serving.web.server import Server


class HybridEngine(ZeroEngine):
    """ZeroEngine with `generate()`."""

    def __init__(self, model: nn.Module, config: EngineConfig, **kwargs: Any) -> None:
        """Takes the arguments of ZeroEngine; `model` must have `generate()`, `config` and `generation_config`."""
        check_split(model, config)
        check_generates(original_of(model))
        tp_size = config.hybrid_engine.inference_tp_size
        check_group_size(tp_size, TRAINING_OPTION)
        check_parts(model, config.hybrid_engine.exact, tp_size)
        super().__init__(model, config, **kwargs)
        if self.sharding.unit_size == 1:
            group = share_sharded_model(tp_size, self.sharding, self.device)
        else:
            group = share_unit(model, self.device)
        meter = AllocatorPeak(self.device) if self.device.type == "cuda" else None
        dtype = config.accumulation_dtype
        self.training_memory = TrainingMemory(self.sharding, self.optimizer, dtype, self.device, meter)
        self.generator = Generator(
            original_of(model), self.sharding, config.hybrid_engine, group, self.device, self.training_memory
        )
        if self.optimizer is not None:
            self.optimizer.state_offload.call_after_moves(partial(_bind_again, self.generator))
        self.__dict__["_generating_for"] = model  # an attribute would become a second child module
        self.latency = LatencyStats(self.sharding.num_units, self.device)
        self._is_generating = False
        self.create_inference_containers()
        self.module.generate = ModuleGenerate(self)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """ZeroEngine's forward; in exact mode a token's log-probability equals the rollout's bit for bit."""
        if self.generator.exact is None:
            return super()._forward(args, kwargs)
        with self.generator.exact.training(args, kwargs) as arguments:
            return super()._forward((), arguments)

    @naming_who_left("generate()")
    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | GenerateOutput:
        """Generates with Hugging Face's options, meanings and shapes; collective on several processes.

        Args:
            input_ids: `[B, P]` int64, padded on the left; required in addition to `inputs_embeds` too.
            attention_mask: `[B, P]`, 1 for tokens; inferred from `pad_token_id` when None.
            generation_config: as in transformers; keyword options override it.
            seed: seed of the sampling noise; None draws one from torch's generator of rank 0.
            **kwargs: `max_new_tokens`, `do_sample`, `temperature`, ... as in transformers; in addition `row_options`,
                one dict per prompt with its own options.

        Returns:
            `[B*G, P+T]` token ids, or a GenerateOutput under `return_dict_in_generate=True`.

        Raises:
            ValueError: a mode, input or option is invalid; raised before anything is done.
        """
        call = GenerateCall(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            seed=seed,
            options=kwargs,
        )
        # The workspace must not keep tensors made in inference mode.
        with holding_interrupts() as held, torch.inference_mode(False), torch.no_grad():
            self._begin_to_generate()
            request = prepare(self.generator, call)
            return roll_out_what_fits(self.generator, request, lambda request: self._roll_out(request, held))

    def _begin_to_generate(self, caller: str = "generate()") -> None:
        """Raises ValueError if this engine cannot generate now; follows changes since the last call. Collective."""
        if self.backward_hooks.is_in_pass:
            self.backward_hooks.recover()
        self.generator.begin(lambda: self._check_can_generate(caller))

    def _roll_out(self, request: Request, held: HeldInterrupts) -> torch.Tensor | GenerateOutput:
        """Gathers, runs, and releases at the end of the block, also after an error."""
        with self._generating(), ExitStack() as release:
            with self.latency.measure("gather"):
                cache = self.generator.gather(request, release)
            with self.latency.measure("generate"):
                result = self.generator.run(request, cache, held)
            self._count(result)
        return result.output

    @contextmanager
    def generate_async(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        carried: Carried | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Iterator[AsyncRollout]:
        """Yields an iterable of groups of answers, in the order in which they finish; others decode meanwhile.

        Leaving the block stops decoding. `rollout.carried` then has the unfinished groups, which the next call can
        continue under its weights; each token is stamped with `global_steps` of the weights that drew it. Arguments are
        those of `generate()`; collective if weights are sharded, each process with its own prompts.

        Args:
            input_ids: None to only finish `carried`.
            attention_mask, generation_config, seed, **kwargs: as in `generate()`, for the new prompts.
            carried: unfinished groups of the rollout before, with their own options and noise.

        Raises:
            ValueError: as in `generate()`; processes share the model.
        """
        call = GenerateCall(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            seed=seed,
            options=kwargs,
            in_sequences=True,
        )
        with torch.inference_mode(False), torch.no_grad():
            self._begin_to_generate("generate_async()")
            rollout = start_async(self.generator, call, carried, self.global_steps)
        with self._generating(), rollout:
            yield rollout

    def generate_until(
        self,
        is_enough: Callable[[Collection[int]], bool],
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        carried: Carried | None = None,
        version: int = 0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Carried:
        """Generates like `generate_async()` until `is_enough` of the indices of whole groups, or until all are whole.

        No clock decides when it ends, so that it can be repeated to the bit. Returns all groups, of `carried` and the
        new prompts: `take` gives whole ones, `state` what a checkpoint needs of the others.

        Args:
            version: with which tokens are stamped.

        Raises:
            ValueError: as in `generate_async()`.
        """
        call = GenerateCall(
            input_ids=input_ids, attention_mask=attention_mask, seed=seed, options=kwargs, in_sequences=True
        )
        with torch.inference_mode(False), torch.no_grad():
            self._begin_to_generate("generate_async()")
            before = Counter() if carried is None else carried.counts()
            with self._generating(), self.latency.measure("generate"):
                result = generate_until(self.generator, call, carried, version, is_enough)
            for figure, number in (result.counts() - before).items():
                self.latency.add(figure, number)
        return result

    @contextmanager
    def serving(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        longest: int | None = None,
        max_running: int | None = None,
        model_name: str | None = None,
        **options: Any,
    ) -> Iterator["Server"]:
        """Inside, a server answers requests with the policy's current weights at an OpenAI-compatible address.

        To be used between `eval()` and `train()`. Weights are gathered and LoRA fused once, for all requests; at the
        end running requests are finished and memory is freed. Collective if weights are sharded: each process serves at
        its own port. Requires the `serve` extra.

        Args:
            tokenizer: None loads it from the model's folder.
            longest: tokens of a prompt and its answer together; None: as many as fit.
            max_running: sequences that decode at once; None: as in a rollout.
            model_name: the name for clients; None: the name of the model's folder, or "policy".
            **options: `memory` for keys and values (a size such as "6GiB", or a share of free memory; default: 0.5 on a
                CPU, 0.9 on a GPU), `host`, `port`, `api_key`, `max_waiting`, `max_sessions`, `adapters` and others of
                `serving.web.server.Server`.

        Raises:
            ValueError: the engine is in training mode; processes share the model and it has no containers; an option is
                wrong.
        """
        build_server = import_serving()
        with torch.inference_mode(False), torch.no_grad():
            self._begin_to_generate("serving()")
        if self.training:
            raise ValueError("serving(): the engine is in training mode; call engine.eval() first")
        options = {"version": self.global_steps, "longest": longest, "max_running": max_running, **options}
        with (
            self._generating(),
            build_server(self.generator.module, self.generator, tokenizer, model_name=model_name, **options) as server,
        ):
            yield server

    @contextmanager
    def reading_weights(self) -> Iterator[None]:
        """Inside, containers and the module's forward have whole weights, with adapters fused; train() is refused.

        Collective. Raises ValueError if `generate()` would for the engine's mode or state.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._begin_to_generate()
            with self._generating(), self.generator.readable(self.generator.model):
                yield

    def warm_up(self, num_prompts: int | None = None, prompt_length: int | None = None, **options: Any) -> WarmUp:
        """Probes, compiles and records steps before the first rollout would have to; prints the time it took.

        Takes the rollouts' shape and the options of `generate()`, see `generation.warm_up`. Collective; in eval mode.
        """
        with holding_interrupts(), torch.inference_mode(False), torch.no_grad():
            self._begin_to_generate("warm_up()")
            result = warm_up(self.generator, num_prompts, prompt_length, options)
        if self.sharding.rank == 0 and self.config.hybrid_engine.print_latency:
            print(result, flush=True)
        return result

    def eval(self) -> "HybridEngine":
        """Ends an iteration, prints its latencies (rank 0, from the second call on), and sets evaluation mode."""
        self._check_not_generating("eval()")
        with holding_interrupts():
            line = self.latency.begin()
            if line is not None and self.sharding.rank == 0 and self.config.hybrid_engine.print_latency:
                print(line, flush=True)
            super().eval()
        return self

    def train(self, mode: bool = True) -> "HybridEngine":
        """Sets training mode, and frees the KV workspace if training needs its memory.

        Raises ValueError inside `generate()`.
        """
        self._check_not_generating("train()")
        with holding_interrupts():
            super().train(mode)
            if mode:
                self.generator.memory.make_room_for_training()
                self.training_memory.begin()
                self.latency.mark_training()
        return self

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """ZeroEngine's step; raises ValueError inside `generate()`."""
        self._check_not_generating("step()")
        super().step(lr_kwargs)
        if self.num_pending_micro_batches == 0:  # after an optimizer step waiting for the device is cheap
            self.latency.add_training()
            self.training_memory.finish_step()

    def pass_step(self) -> None:
        """ZeroEngine's `pass_step()`; raises ValueError inside `generate()`."""
        self._check_not_generating("pass_step()")
        super().pass_step()
        self.latency.add_training()

    def measured_values(self) -> dict[str, Any]:
        """A metric for checkpoints: the last difference of rollout and trainer, on which training loops base
        decisions.
        """
        difference = self.logprob_difference
        return {"logprob_difference": None if difference is None else [difference.mean, difference.max]}

    def restore_measured_values(self, values: dict[str, Any]) -> None:
        """Replaces the difference that this engine measured when it was built by the saved one."""
        if "logprob_difference" in values:
            saved = values["logprob_difference"]
            mean, largest = (0.0, 0.0) if saved is None else map(float, saved)
            self.generator.logprob_difference = None if saved is None else LogprobDifference(mean, largest)

    def create_inference_containers(self) -> None:
        """Builds the containers again, for example after a change of the module's structure, and measures them."""
        self.checks.check_whole("create_inference_containers()", OffloadStateTypeEnum.lp_params)
        self._check_not_generating("create_inference_containers()")
        with holding_interrupts():
            self.generator.build_containers()

    def convert_to_linear_transposed(self) -> list[TransposedLinear]:
        """The containers' linears, whose weights are [in, out] views of the parameters."""
        if self.generator.model is None:
            return []
        return [linear for layer in self.generator.model.layers for linear in layer.linears]

    def fuse_lora_weight(self) -> None:
        """Fuses the adapters into the containers, until `unfuse_lora_weight()` or the next `generate()`."""
        if self.generator.model is None:
            return
        with holding_interrupts():
            with self.generator.gatherer.gathered(whole=True):
                self.generator.model.bind()
                self.generator.model.fuse_lora()
            self.generator.gatherer.count_bytes()  # not part of a rollout

    def unfuse_lora_weight(self) -> None:
        """Drops the fused buffers; the parameters were not modified."""
        if self.generator.model is not None:
            self.generator.model.unfuse_lora()

    def retake_inference_cache(self) -> None:
        """Allocates the storage of a released KV workspace again."""
        self.generator.workspace.retake()

    def release_inference_cache(self) -> None:
        """Frees the KV workspace's storage until the next `generate()`. Raises ValueError inside `generate()`."""
        self._check_not_generating("release_inference_cache()")
        self.generator.workspace.release()

    release_workspace = release_inference_cache

    def observe_logprobs(self, rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> LogprobDifference:
        """Measures the difference of a rollout's log-probabilities to the trainer's, before the weights change.

        Three tensors of one shape; `mask` is True on response tokens. Collective on several processes.
        """
        difference = compare_logprobs(rollout, trainer, mask, self.sharding.world_size)
        self.generator.logprob_difference = difference
        return difference

    @property
    def logprob_difference(self) -> LogprobDifference | None:
        """The last measured difference of rollout and trainer: at start-up, or by `observe_logprobs`.

        It is saved in checkpoints, so that a continued run uses the same value for its decisions. Without containers
        the model's own `generate()` was measured; None: that failed.
        """
        return self.generator.logprob_difference

    def latency_stats(self) -> dict[str, float]:
        """Latencies since the last `eval()`: seconds, counts and bytes by name.

        Read it at the end of an iteration, before the `eval()` that prints the same values and starts the next
        iteration.
        """
        stats = self.latency.stats()
        if self.logprob_difference is not None:
            stats["logprob_difference_mean"] = self.logprob_difference.mean
            stats["logprob_difference_max"] = self.logprob_difference.max
        return stats

    def destroy(self) -> None:
        """Drops recorded steps and the KV workspace; call it before `torch.distributed.destroy_process_group()`.

        NCCL's communicators wait for the CUDA graphs that hold their collectives. A later rollout records steps again.
        """
        self.generator.destroy()

    def report(self) -> str:
        """ZeroEngine's report, and how this engine generates: containers, gathering, memory, and the reasons."""
        return f"{super().report()}\n{describe_generation(self.generator)}"

    def _check_can_generate(self, caller: str) -> None:
        """Raises ValueError inside `generate()`, if weights are offloaded, or for another model; local.

        Containers are views of modules: if modules were replaced, they are built again. On several processes the
        parameters of new modules would not be gathered, so they are refused.
        """
        optimizer = self.optimizer
        if optimizer is not None and (optimizer.is_torn or optimizer.state_offload.offloaded):
            self.checks.check_whole(caller, OffloadStateTypeEnum.lp_params)
        self._check_not_generating(caller)
        if self._modules["module"] is not self._generating_for:
            raise ValueError(
                f"{caller}: engine.module is not the model that this engine was built for; give the new one an engine "
                "of its own by initialize()"
            )
        if self.sharding.is_sharded:
            self.checks.check_unchanged(self.module)

    def _check_not_generating(self, what: str) -> None:
        # `train()` also runs in nn.Module's constructor, before the flag exists.
        if self.__dict__.get("_is_generating", False):
            raise ValueError(f"{what} was called inside generate() or serving(); wait until that ends")

    @contextmanager
    def _generating(self) -> Iterator[None]:
        self._is_generating = True
        try:
            yield
        finally:
            self._is_generating = False

    def _count(self, result: RolloutResult) -> None:
        figures = {**result.figures(), "gathered_bytes": self.generator.gatherer.count_bytes()}
        for figure, amount in figures.items():
            self.latency.add(figure, amount)
        self.latency.raise_peak(self.generator.workspace.allocated_bytes)


def _bind_again(generator: Generator) -> None:
    """Binds the containers to moved weights: views of the old storage would keep its memory."""
    if generator.model is not None and not generator.sharding.is_sharded:
        generator.model.bind()
