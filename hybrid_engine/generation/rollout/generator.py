"""Everything that generates, for an engine above it: containers, gathered weights, KV workspace and backends.

The engine has modes and clocks; the generator does not. A rollout is `begin`, `prepare` (`preparing.py`, which makes a
request of a call), `gather` and `run`. Each of them ends with a verdict of all processes, so that an error of one is
raised on all. Everything that `gather` takes is released when its caller closes `release`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationMixin

from hybrid_engine.config import HybridEngineConfig
from hybrid_engine.config.notices import say_once
from hybrid_engine.containers import InferenceModel, UnsupportedModelError
from hybrid_engine.containers.cache import ModelCache
from hybrid_engine.containers.layer import InferenceLayer
from hybrid_engine.containers.views import TensorParallel
from hybrid_engine.distributed.verdict import (
    HeldInterrupts,
    LostError,
    Partners,
    attempt,
    forget_frames,
    holding_interrupts,
    is_out_of_memory,
)
from hybrid_engine.generation.core import LocalRequest, Prompt, Request, RolloutPlan, RolloutResult, Sequence
from hybrid_engine.generation.decode import Choice
from hybrid_engine.generation.memory import BLOCK_SIZE, KVWorkspace, MemoryBudget, TrainingMemory
from hybrid_engine.generation.model.container_probe import ContainerProbe
from hybrid_engine.generation.model.exact import ExactModel
from hybrid_engine.generation.model.probe import MAX_ROUNDING_FP32, LogprobDifference, describe_switch
from hybrid_engine.generation.model.weights import (
    LastingWeights,
    ModelGroup,
    WeightGatherer,
    bound,
    pass_over_layers,
)
from hybrid_engine.generation.output import GenerateOutput, add_prompt_scores
from hybrid_engine.generation.rollout.module_rollouts import ModuleRollouts
from hybrid_engine.generation.rollout.stages import StageModel, StageRollouts
from hybrid_engine.generation.sampling import InStep
from hybrid_engine.generation.step import ContainerRollouts
from hybrid_engine.ops.dispatch import fallback_forced, naming_kernels
from hybrid_engine.ops.fixed_shapes import NotExactError
from hybrid_engine.zero.sharding import Sharding

Result = TypeVar("Result")
PACKAGES_WITHOUT_EFFECT = ("hybrid_engine.", "torch.distributed.")
"""Packages whose hooks and forwards do not change what a module computes."""


class Generator:
    """Generates from the weights of `module`, sharded by `sharding` and shared in `group` while it generates."""

    def __init__(
        self,
        module: nn.Module,
        sharding: Sharding,
        config: HybridEngineConfig,
        group: ModelGroup | None = None,
        device: torch.device | None = None,
        training: TrainingMemory | None = None,
    ):
        """`device`: device to compute on; None: that of the parameters. `training`: None if nothing is trained."""
        fallback_forced()  # reports an invalid value of the switch now, not in the middle of a rollout
        self.module, self.sharding, self.config = module, sharding, config
        self.group = group or ModelGroup()
        self.device = device or next(module.parameters()).device
        self.gatherer = WeightGatherer(sharding, config.pin_parameters, self.group.slices, self.group.parts)
        self.workspace = KVWorkspace()
        self.memory = MemoryBudget(self.device, config, self.gatherer, self.workspace, training)
        self.lasting = LastingWeights(self.group.parallel.read, self.group.parallel.wait)
        self.model: InferenceModel | None = None
        self.fallback_reason: str | None = None
        self.logprob_difference: LogprobDifference | None = None
        """Difference between rollout and trainer when last measured, by the narrow probe or on a rollout."""
        self.switch_difference: LogprobDifference | None = None
        """The difference around the length that changes rope's frequencies, by the narrow probe; None: none does."""
        self.native: ContainerRollouts | None = None
        self.is_live = False
        """Whether a live batch uses the workspace."""
        self._choice: Choice | None = None  # draws the tokens of rollouts, instead of their options
        functions = (GenerationMixin.generate, getattr(module, "get_base_model", lambda: module)().forward)
        self.accepted_names = [name for function in functions for name in inspect.signature(function).parameters]
        """Argument names of transformers' `generate()` and the model's forward, beyond GenerationConfig's fields."""
        if hasattr(module, "peft_config"):
            self.accepted_names.append("adapter_names")  # one adapter per row; peft's own generate() serves it
        self._found: list[tuple[nn.Module, tuple[Any, ...]]] = []  # `computes_by` at the build
        if sharding.world_size > 1:
            self.partners = Partners(size=sharding.world_size, rank=sharding.rank)
        else:
            self.partners = self.group.partners
        self.own = ModuleRollouts(module, self.gatherer, self.partners)
        self.probe = ContainerProbe(module, self.gatherer, self.readable, self.partners, sharding.world_size)

    def build_containers(self) -> None:
        """Builds containers and measures them against the module, or stores why there are none. Collective."""
        self._found = [(module, computes_by(module)) for module in self.module.modules()]
        try:
            if self.config.exact:
                self._check_threads()
            model = self.partners.agree(self._build_model)
            self.gatherer.has_buffers = model.buffer_bytes() > 0
            (is_crowded,) = self.partners.highest([int(self.memory.is_crowded(model))])
            self._choose_gathering(bool(is_crowded))
            # Without the module there is no forward pass to compare with.
            probe = self.probe.run if self.group.has_whole_module else self._bind_once
            self.use_containers(model, probe(model))
            if self.device.type == "cuda":  # on a CPU it takes long, and `warm_up()` does it
                self.probe_widely()
        except (UnsupportedModelError, NotExactError) as error:
            if self.config.exact:
                raise ValueError(f"hybrid_engine.exact: {error}; leave hybrid_engine.exact out") from error
            self.drop_containers(str(error))
            self.measure_own()
        self.gatherer.count_bytes()  # not a rollout's

    def measure_own(self) -> None:
        """Measures the model's own `generate()` against its forward, if no containers run; collective."""
        if not self.group.has_whole_module:
            return
        difference = self.logprob_difference = self.probe.run_own(self.own.generate)
        is_fp32 = next(self.module.parameters()).dtype == torch.float32
        if difference is not None and is_fp32 and difference.max > MAX_ROUNDING_FP32:
            say_once(
                f"the model's own generate() and its forward are up to {difference.max:.2g} apart in log-probability, "
                "more than rounding explains"
            )

    def _build_model(self) -> InferenceModel:
        if self.group.stage is not None:
            return StageModel(self.module, self._parallel, self.group, self.device)
        return ExactModel(self.module) if self.config.exact else InferenceModel(self.module, self._parallel)

    def _check_threads(self) -> None:
        """Checks that all processes have equally many threads, on which sums in large products depend. Collective."""
        most, fewest = self.partners.highest([torch.get_num_threads(), -torch.get_num_threads()])
        if most != -fewest:
            raise UnsupportedModelError(
                f"processes use {-fewest} to {most} threads, which add up large products in different orders; set the "
                "same OMP_NUM_THREADS on all of them"
            )

    @property
    def exact(self) -> ExactModel | None:
        """The exact-mode model, which generates and makes the trainer's forward exact, or None."""
        return self.model if isinstance(self.model, ExactModel) else None

    @property
    def _parallel(self) -> TensorParallel:
        """The group's tensor parallelism for containers.

        Sharded weights that are not shared may be read from copies.
        """
        parallel = self.group.parallel
        return replace(parallel, read=self.lasting.read) if self.gatherer.can_stream else parallel

    def _bind_once(self, model: InferenceModel) -> None:
        """Binds the weights once: callers read the dtype and device of containers from bound weights. Collective."""

        def bind() -> None:
            with self.readable(model):
                pass

        self.partners.agree(bind)

    def drop_containers(self, reason: str) -> None:
        """Generates by the model's own `generate()` from now on; stores the reason."""
        self.model, self.native, self.logprob_difference, self.fallback_reason = None, None, None, reason
        self.switch_difference = None

    def probe_widely(self) -> bool:
        """Runs the wide probe (`ContainerProbe.run_widely`); returns False if its verdict was known or none applies.

        Collective.

        Raises:
            UnsupportedModelError: containers and module compute different functions.
        """
        assert self.model is not None and self.native is not None
        if self.exact is not None or not self.group.has_whole_module:
            return False  # bits were compared when it was built, or there is no module to compare with
        block_size = self.config.kv_block_size or BLOCK_SIZE
        recorder = None if self.gatherer.is_streamed else self.native.new_recorder()
        return self.probe.run_widely(self.model, self.device, block_size, recorder, self.group.size)

    def _choose_gathering(self, is_crowded: bool) -> None:
        """Streams layers if the whole weights do not fit on some process."""
        self.gatherer.choose(is_crowded)
        if self.gatherer.is_streamed and self.config.exact:
            raise ValueError(
                "hybrid_engine.exact: the whole weights do not fit into the free memory, and layers that are gathered "
                "one by one run on containers; leave hybrid_engine.exact out"
            )
        if self.gatherer.is_streamed and self.gatherer.is_pinned:
            say_once("the whole weights do not fit into the free memory: layers are gathered one by one on every pass")

    @contextmanager
    def readable(self, model: InferenceModel | None) -> Iterator[None]:
        """Inside, the weights of the module's forward and of containers, if any, are readable; autocast is off."""
        # If each process reads parts of the weights, the module's forward gathers its layers one by one.
        is_shared = self.group.slices is not None
        gathered = self.gatherer.gathered() if is_shared else self.gatherer.gathered_for_forward()
        with torch.autocast(self.device.type, enabled=False), gathered, ExitStack() as stack:
            if model is not None:
                stack.enter_context(bound(model, self.gatherer))
            yield

    def layers(self) -> Iterable[InferenceLayer]:
        """Returns one pass over the containers' layers, whose weights must be readable."""
        assert self.model is not None
        return pass_over_layers(self.model, self.gatherer)

    def has_other_modules(self) -> bool:
        """Whether submodules were added, removed, exchanged or hooked since `build_containers()`."""
        # Walking the tree by `modules()` takes three times as long, and this runs before every rollout.
        return any(computes_by(module) != found for module, found in self._found)

    def use_containers(self, model: InferenceModel, difference: LogprobDifference | None) -> None:
        """Generates from now on with `model`, whose weights were bound before and which differs by `difference`."""
        self.model, self.logprob_difference, self.fallback_reason = model, difference, None
        self.switch_difference = difference.past_switch if difference is not None else None
        if self.switch_difference is not None and model.angles.trained_length is not None:
            say_once(describe_switch(self.switch_difference, model.angles.trained_length))
        parts = (self.gatherer, self.lasting, self.workspace, self.config)
        if isinstance(model, StageModel):  # other units take turns of their own
            self.native = StageRollouts(model, *parts, self.group.partners, peers=self.group.layer_partners)
        else:
            self.native = ContainerRollouts(model, *parts, self.partners)
        if self.group.sums is not None:
            self.group.sums.drop_before_leaving(self.native.steps)

    def move_to(self, device: torch.device) -> None:
        """Rebuilds containers after the module was moved to `device`, or cast."""
        self.device = self.memory.device = device
        self.build_containers()

    def begin(self, check: Callable[[], None] | None = None) -> None:
        """Starts a rollout on the engine's side: raises an error of `check` on all processes; collective.

        Decides whether weights are streamed. If modules were exchanged on one process, containers are rebuilt on all.
        """
        error = None if check is None else attempt(check)[1]
        is_changed = error is None and self.has_other_modules()
        flags = [error is not None, is_changed, self.memory.is_crowded(self.model)]
        has_failed, is_changed, is_crowded = map(bool, self.partners.highest(list(map(int, flags))))
        if has_failed:
            self.partners.raise_together(error)
        self._choose_gathering(is_crowded)
        if is_changed:
            with holding_interrupts():
                self.build_containers()

    def release_workspace(self) -> None:
        """Frees the KV workspace's memory; recorded steps that read it stay valid, as it returns to its address."""
        self.workspace.release()

    def destroy(self) -> None:
        """Drops recorded steps, which hold collectives of process groups, and frees the workspace.

        A later rollout allocates and records them again.
        """
        if self.native is not None:
            self.native.steps.drop()
        self.release_workspace()

    def gather(self, request: Request, release: ExitStack) -> ModelCache | None:
        """Gathers for the rollout and registers the release on `release`; raises an error of one process on all.

        Returns the KV workspace for `run`; None if the model's own `generate()` runs.
        """
        return self.partners.agree(lambda: self._gather(request, release))

    def _gather(self, request: Request, release: ExitStack) -> ModelCache | None:
        if request.plan is None:
            self.own.gather(release)
            return None
        assert self.native is not None
        return self.native.gather(request.plan, release)

    def run(self, request: Request, cache: ModelCache | None, held: HeldInterrupts) -> RolloutResult:
        """Runs the rollout; Ctrl-C, which is `held`, may end it. Raises an error of one process on all."""
        try:
            return self.partners.agree(lambda: self._run(request, cache, held))
        except LostError:
            raise
        except BaseException:
            self.group.renew_sums(self.partners)
            raise

    def _run(self, request: Request, cache: ModelCache | None, held: HeldInterrupts) -> RolloutResult:
        local, plan = request.local, request.plan
        choice = self._choice
        if plan is not None:
            # An error of one is raised on all before they meet in layers: only one process may have a streamer.
            choice = self.partners.agree(lambda: self._choose(plan, local))
        with held.allowed(), naming_kernels():
            if request.sequences:
                result = self.own.run_sequences(local.input_ids, request.sequences, local.options, self.device)
                if isinstance(result.output, GenerateOutput):
                    add_prompt_scores(result.output, request.sequences, local.mask)
                return result
            if plan is None:
                return self.own.run(local.input_ids, local.mask, local.options, request.seed, local.kwargs)
            assert self.native is not None and cache is not None
            with nullcontext() if self.group.sums is None else self.group.sums.ending_others():
                result = self.native.run(plan, cache, local.input_ids, choice)
            if isinstance(choice, InStep):
                choice.finish()
            if isinstance(result.output, GenerateOutput):
                add_prompt_scores(result.output, plan.sequences[plan.own], local.mask)
            return result

    def _choose(self, plan: RolloutPlan, local: LocalRequest) -> Choice | None:
        """Returns the function that draws the tokens of `plan`; None: the options of its sequences."""
        return self._choice if local.functions is None else self._stay_in_step(plan, local)

    def _stay_in_step(self, plan: RolloutPlan, local: LocalRequest) -> InStep | None:
        assert self.model is not None and local.functions is not None
        if not plan.sequences:
            return None
        num_samples, device = local.options.num_return_sequences, self.model.device
        input_ids, mask = (
            given.repeat_interleave(num_samples, 0).to(device) for given in (local.input_ids, local.mask)
        )
        return InStep(plan.sequences, input_ids, mask, local.functions, self.model.vocab_size)

    @contextmanager
    def choosing_by(self, choice: Choice | None) -> Iterator[None]:
        """Inside, `choice` draws every token of rollouts on containers and decides which rows end; None: options do."""
        self._choice = choice
        try:
            yield
        finally:
            self._choice = None


def roll_out_what_fits(generator: Generator, request: Request, roll_out: Callable[[Request], Result]) -> Result:
    """Calls `roll_out(request)`; starts over with half the rows at once if a process runs out of memory; collective.

    Raises:
        RuntimeError: see `_with_half_the_rows`.
    """
    while True:
        try:
            return roll_out(request)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            request = _with_half_the_rows(generator, request, error)


def _with_half_the_rows(generator: Generator, request: Request, error: RuntimeError) -> Request:
    """Returns `request` with half the rows at once; collective, called on all processes after an error of one.

    Processes with rows of their own each halve their own number; one with a single row starts over with it.

    Raises:
        RuntimeError: `error`, if one row ran alone on each process, if rows must stay in step, or if the model's own
            `generate()` ran.
    """
    plan = request.plan
    is_bound = plan is None or request.local.functions is not None
    most, cannot = generator.partners.highest([1 if plan is None else plan.max_running, int(is_bound)])
    if plan is None or cannot or most <= 1:
        raise error
    forget_frames(error)
    say_once(
        f"generate(): out of memory with {most} rows at once; goes on with {most // 2}: "
        f"{generator.config.prefix}max_running={most // 2}, or as many prompts in a call, avoids it"
    )
    return replace(request, plan=_halved(plan, max(1, plan.max_running // 2)))


def _halved(plan: RolloutPlan, rows: int) -> RolloutPlan:
    """Returns `plan` in its initial state with as many KV blocks per row; at least those of a row and its prompt."""
    prompts: dict[Prompt, Prompt] = {}
    sequences = []
    for sequence in plan.sequences:
        old = sequence.prompt
        prompt = prompts.setdefault(old, old.with_own_blocks())
        sequences.append(Sequence(prompt, sequence.row, sequence.options, sequence.key))
    num_blocks = min(plan.num_blocks, max(plan.num_blocks * rows // plan.max_running, 2 * plan.num_columns))
    num_slots = min(plan.num_state_slots, max(plan.num_state_slots * rows // plan.max_running, 2))
    return replace(plan, sequences=sequences, max_running=rows, num_blocks=num_blocks, num_state_slots=num_slots)


def computes_by(module: nn.Module) -> tuple[Any, ...]:
    """Returns a value that stays equal while `module` has the same children and the same foreign hooks and forward."""
    children = tuple(module._modules.values())
    forward = vars(module).get("forward")
    if forward is None and not module._forward_hooks and not module._forward_pre_hooks:
        return children
    functions = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if "_original_forward" not in vars(module):  # accelerate's, for mixed precision
        functions.append(forward)
    return (children, *(function for function in functions if function is not None and _has_effect(function)))


def _has_effect(function: Any) -> bool:
    function = getattr(function, "func", function)  # unwraps a functools.partial
    return not str(getattr(function, "__module__", "")).startswith(PACKAGES_WITHOUT_EFFECT)
