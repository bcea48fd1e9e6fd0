"""The actor of a run and its reference: builds them and computes their log-probabilities.

N: answers, T: response columns.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.checkpoint.export import without_renamed_attribute_warning
from hybrid_engine.containers.device import send_to_device
from hybrid_engine.containers.policy import UnsupportedModelError
from hybrid_engine.distributed.processes import default_device, gather_objects, get_world_size
from hybrid_engine.optim.build import cast_module
from hybrid_engine.rl.correction import measure_difference
from hybrid_engine.rlhf.algorithms import PolicyBatch
from hybrid_engine.rlhf.batches.head_log_probs import replay_routing
from hybrid_engine.rlhf.batches.packable import pack_where_exact
from hybrid_engine.rlhf.batches.passes import RunPasses
from hybrid_engine.rlhf.batches.sequences import (
    Sequences,
    in_parts,
    recompute_activations,
    response_logprobs,
    response_logprobs_and_entropy,
)
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.evaluation import Evaluation, PassRule, evaluate, global_means
from hybrid_engine.rlhf.experience.rollout import AnswerSampling
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.options.distillation import DistillConfig
from hybrid_engine.rlhf.options.reinforcement import GRPOConfig
from hybrid_engine.rlhf.options.shared import RolloutRunOptions
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.runs.engine_config import Schedule, build_engine_config, largest_micro_batch, torch_dtype
from hybrid_engine.rlhf.runs.run_checks import add_adapter
from hybrid_engine.rlhf.runs.stages import explained, load_model, load_tokenizer
from hybrid_engine.zero.sharding import full_tensor, local_tensor

MEASURED_ROWS = 8
"""Answers of a process on which a step measures what router replay changes."""
AVERAGE = "average"
"""Name of the adapter with averaged weights in the actor's model, and of the checkpoints of an average."""


class AveragedWeights(nn.Module):
    """Weights in fp32 that an engine shards and saves; they compute nothing by themselves."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self) -> None:
        """Does nothing."""


class MovingAverage:
    """An exponential moving average of the actor's trained weights, by which a teacher of the same shapes computes.

    After each optimizer step average <- rate * actor + (1 - rate) * average: Shenfeld et al., arXiv 2601.19897 (SDFT);
    Hübotter et al., arXiv 2601.20802 (SDPO). It is kept in fp32, since 16 bits would round small changes away, in
    shards over the processes; the teacher has it in its own dtype. The two factors of an adapter are averaged, not
    their product.
    """

    def __init__(self, actor: Any, teacher: nn.Module, names: Mapping[str, str], rate: float, engine: Any) -> None:
        """Takes the average, which begins as the actor's present weights.

        Args:
            actor: the engine that is trained.
            teacher: has parameters that follow the average; may be the actor's own module.
            names: of these parameters, by the names of those of the actor's module that are averaged.
            rate: share of the actor's weights, above 0 and at most 1.
            engine: trains nothing; its parameters, in the order of `names`, are the average in fp32. They may be the
                teacher's own parameters.
        """
        self.actor, self.teacher, self.names, self.rate, self.engine = actor, teacher, names, rate, engine

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Modules in memory in addition to actor and teacher, which the memory plan counts."""
        of_teacher = set(map(id, self.teacher.parameters()))
        is_apart = not all(id(average) in of_teacher for average in self.engine.module.parameters())
        return [self.engine.module] if is_apart else []

    @torch.no_grad()
    def follow(self) -> None:
        """Takes in the weights of an optimizer step that was just done, unless it was skipped. Collective."""
        if not self.actor.was_step_applied():
            return
        weights = dict(self.actor.module.named_parameters())
        for average, name in zip(self.engine.module.parameters(), self.names, strict=True):
            present = local_tensor(sharded_like(average, weights[name]))
            local_tensor(average).lerp_(present.float(), self.rate)
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Gives the teacher the average, as after a checkpoint was loaded. Collective."""
        weights = dict(self.teacher.named_parameters())
        for average, name in zip(self.engine.module.parameters(), self.names.values(), strict=True):
            if (weight := weights[name]) is not average:
                local_tensor(weight).copy_(local_tensor(sharded_like(weight, average)))


def sharded_like(example: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, of the shape of `example`, whole or in the shards of `example`; collective if it must be gathered."""
    if not isinstance(example, DTensor):
        return full_tensor(value)
    layout = example.device_mesh, example.placements
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == layout:
        return value
    return distribute_tensor(full_tensor(value), *layout, src_data_rank=None)


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """The trained actor and the reference that it is compared with."""

    actor: Any
    """`HybridEngine`."""
    tokenizer: PreTrainedTokenizerBase
    reference: nn.Module | None
    """The first weights, frozen; None if they are not needed, or are those below the actor's adapter."""
    refers_to_base: bool = False
    """Whether the weights below the actor's adapter are the reference."""
    sizes: RunPasses = field(default_factory=RunPasses)
    """The sizes of the run's passes."""
    average: MovingAverage | None = None
    """The average of the actor's weights, if it teaches the actor."""

    @property
    def engines(self) -> dict[str, Any]:
        """The engines that a checkpoint of the policy holds, by their names there."""
        return ({} if self.average is None else {AVERAGE: self.average.engine}) | {"actor": self.actor}

    @property
    def has_reference(self) -> bool:
        """Whether `reference_logprobs` can be called."""
        return self.refers_to_base or self.reference is not None

    @torch.no_grad()
    def reference_logprobs(self, sequences: Sequences, temperature: float) -> torch.Tensor:
        """`[N, T]` fp32 under the first weights, 0 on padding; collective if the actor is sharded.

        Over the supports of `sequences`, if there are any, as the actor's own. The first weights choose their experts.
        """
        compute, sequences = partial(response_logprobs, temperature=temperature), replace(sequences, routing=None)
        if self.refers_to_base:
            with playing(self.actor.module, None):
                return in_parts(compute, self.actor, sequences, self.sizes)
        assert self.reference is not None, "the run keeps no reference"
        return in_parts(compute, self.reference, sequences, self.sizes)

    @torch.no_grad()
    def entropies(self, sequences: Sequences, temperature: float) -> torch.Tensor:
        """`[N, T]` fp32, nats of the present policy's distribution of each response token, 0 on padding; collective."""

        def compute(model: Any, part: Sequences) -> torch.Tensor:
            return response_logprobs_and_entropy(model, part, temperature)[1]

        return in_parts(compute, self.actor, sequences, self.sizes)

    @torch.no_grad()
    def routing_figures(self, sequences: Sequences, sampled: torch.Tensor, temperature: float) -> dict[str, float]:
        """Mean distances of the trainer's log-probabilities from the sampler's (`sampled`), in nats per token.

        With the experts that the rollout recorded and with those that the trainer chooses, by a pass each over
        MEASURED_ROWS answers of each process; empty if none are recorded. Before any weight changes. Collective.
        """
        if sequences.routing is None:
            return {}
        few = sequences.rows(torch.arange(min(MEASURED_ROWS, len(sequences.routing))))
        mask = few.response_mask
        count, sums = float(mask.sum()), {}
        for name, part in (("with", few), ("without", replace(few, routing=None))):
            found = in_parts(partial(response_logprobs, temperature=temperature), self.actor, part, self.sizes)
            distance = measure_difference(found, sampled[: len(mask), : mask.shape[1]], mask).absolute
            sums[f"logprob_difference_{name}_replay"] = (float(distance) * count if count else 0.0, count)
        return global_means(sums)

    @torch.no_grad()
    def old_logprobs(
        self,
        sequences: Sequences,
        sampled: torch.Tensor,
        temperature: float,
        bound: float,
        is_replayed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, float]:
        """`[N, T]`, the trainer's log-probabilities of answers, and their mean distance to the sampler's (`sampled`).

        Answers of earlier steps (`is_replayed`, `[N]` bool) keep those of the sampler of their time. If the last
        measured difference, in nats per token, is at most `bound`, returns the sampler's own without a pass and 0 as
        the difference. Collective.
        """
        measured = self.actor.logprob_difference
        if measured is not None and measured.mean <= bound:
            return sampled, 0.0
        logprobs = in_parts(partial(response_logprobs, temperature=temperature), self.actor, sequences, self.sizes)
        mask = sequences.response_mask
        if is_replayed is not None:
            logprobs = torch.where(is_replayed[:, None], sampled, logprobs)
        distance = measure_difference(logprobs, sampled, mask).absolute
        count = float(mask.sum())
        return logprobs, global_means({"difference": (float(distance) * count if count else 0.0, count)})["difference"]


def build_policy(
    config: RolloutRunOptions,
    source: str,
    learning_rate: float,
    schedule: Schedule,
    adapters: Mapping[str, str | None] = MappingProxyType({}),
) -> TrainedPolicy:
    """The actor in `source`, without dropout, with an engine as configured by a recipe's `Config`. Collective.

    Args:
        config: with RolloutOptions, minibatch_size, micro_batch_size, lora_rank and zero_stage.
        source: Hugging Face name or folder.
        learning_rate: peak of the schedule.
        schedule: of the whole run.
        adapters: folders of further, frozen adapters by their names in the model, which `playing` takes; None for one
            that begins as the actor's. Only with lora_rank.

    Raises:
        ValueError: an adapter does not fit the model.
    """
    model = load_model(AutoModelForCausalLM, source)
    reference = None
    if config.keeps_reference:
        reference = load_model(AutoModelForCausalLM, source)
        cast_module(reference, torch_dtype(config.dtype))
        reference = reference.to(default_device()).eval().requires_grad_(False)
    engine_config = engine_config_of(config, learning_rate, generates=True)
    model = add_adapter(recompute_activations(model, config), config)
    for name, folder in adapters.items():
        if folder is None:
            copy_adapter(model, name)
            continue
        with explained("teacher", folder):
            model.load_adapter(folder, name, is_trainable=False, torch_device="cpu")
    actor, *_ = hybrid_engine.initialize(model=model, config=engine_config, lr_scheduler=schedule.build)
    for role in (actor, reference):
        if role is not None:
            pack_where_exact(role, config)
    replay_where_asked(actor, config)
    return TrainedPolicy(
        actor=actor,
        tokenizer=load_tokenizer(source),
        reference=reference,
        refers_to_base=config.needs_reference and not config.keeps_reference,
        sizes=RunPasses.of(config),
    )


def replay_where_asked(actor: Any, config: RolloutRunOptions) -> None:
    """Makes the passes of `actor` take recorded experts under `--router-replay`. Collective.

    Raises:
        ValueError: its experts cannot be replayed.
    """
    if config.router_replay:
        try:
            replay_routing(actor)
        except UnsupportedModelError as error:
            raise ValueError(f"--router-replay: {error}; leave it out") from error


def copy_adapter(model: PeftModel, name: str) -> None:
    """Adds a frozen adapter `name` that equals the active one."""
    with without_renamed_attribute_warning():
        model.add_adapter(name, copy.deepcopy(model.peft_config[model.active_adapter]))
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    set_peft_model_state_dict(model, weights, adapter_name=name)
    for path, parameter in model.named_parameters():
        if name in path.split("."):
            parameter.requires_grad_(False)


def evaluate_policy(
    policy: TrainedPolicy, rows: Sequence[PromptRow], rewards: Rewards, config: GRPOConfig | DistillConfig
) -> Evaluation:
    """Answers and scores held-out prompts, always with the same seed; collective.

    Args:
        policy: in evaluation mode afterwards.
        rows: the prompts.
        rewards: of the run.
        config: with RolloutOptions, eval_samples and pass_score.
    """
    passes = PassRule(threshold=config.pass_score, ks=sorted({1, config.eval_samples}))
    options = AnswerSampling.of(config, config.eval_samples)
    return evaluate(policy.actor, policy.tokenizer, rows, rewards, options, passes=passes)


def engine_config_of(config: RolloutRunOptions, learning_rate: float, *, generates: bool) -> dict[str, Any]:
    """The DeepSpeed config of a role that is trained on rollouts: the actor, which generates, or its critic."""
    return build_engine_config(
        batch_size=config.update_size,
        micro_batch_size=largest_micro_batch(config.update_size // get_world_size(), config.micro_batch_size),
        learning_rate=learning_rate,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
        max_out_tokens=config.max_prompt_tokens + config.max_new_tokens if generates else None,
        exact=config.exact,
        max_running=config.max_running,
    )


class Experience(NamedTuple):
    """A rollout with all inputs of an update."""

    sequences: Sequences
    logprobs: torch.Tensor
    """Log-probabilities of the sampler, `[N, T]` fp32."""
    batch: PolicyBatch
    """`[N, T]` each; its `logprobs` are the old ones until an update computes them again."""
    is_replayed: torch.Tensor | None = None
    """`[N]` bool: True for answers of earlier steps; None: all are of this step."""

    @property
    def sampled_mask(self) -> torch.Tensor:
        """`[N, T]` bool: True on the tokens that the policy has just sampled."""
        mask = self.sequences.response_mask
        return mask if self.is_replayed is None else mask & ~self.is_replayed[:, None]

    def rows(self, index: torch.Tensor) -> "Experience":
        """The rows `index`, a tensor on the host, without the columns that are padding in all of them."""
        sequences = self.sequences.rows(index)
        columns, places = sequences.response_mask.shape[1], send_to_device(index, self.logprobs.device)
        parts = (None if value is None else value[places, :columns] for value in self.batch)
        is_replayed = None if self.is_replayed is None else self.is_replayed[places]
        return Experience(sequences, self.logprobs[places, :columns], PolicyBatch(*parts), is_replayed)


def has_gradient(algorithm: Algorithm, batch: PolicyBatch) -> torch.Tensor:
    """`[N]` bool: whether the loss of a row depends on the policy by construction.

    A row whose advantages are all 0, as in a group whose answers have the same reward, has no gradient unless a KL, the
    distance to the sampler or an entropy in the loss, or kl-cov's penalty on its chosen tokens, gives it one. A row
    whose tokens are all masked, or none of which is among those of high entropy, never has one.
    """
    if algorithm.kl_place == "loss" or algorithm.sampler_coef or algorithm.has_entropy_bonus:
        return batch.mask.any(dim=1)
    advantages = batch.advantages if batch.weights is None else batch.advantages * batch.weights
    moved = advantages != 0
    if algorithm.policy_loss == "kl-cov" and batch.covariant is not None:
        moved = moved | batch.covariant
    if batch.high_entropy is not None:
        moved = moved & batch.high_entropy
    return (batch.mask & moved).any(dim=1)


def trained_rows(with_gradient: torch.Tensor) -> torch.Tensor:
    """Indices of the rows that go through the model in a step, in order; as many on every process. Collective.

    Args:
        with_gradient: `[N]` bool, of this process's rows, of which each process has N.

    Returns:
        The rows with a gradient; a process with fewer of them than another adds some of its other rows.
    """
    number = max(gather_objects(int(with_gradient.sum())))
    order = torch.argsort(~with_gradient, stable=True)  # rows with a gradient first
    return order[:number].sort().values


def present_batch(actor: Any, experience: Experience, algorithm: Algorithm, temperature: float) -> PolicyBatch:
    """The batch with the actor's present log-probabilities and, for a bonus on it, entropy; with their gradients."""
    if algorithm.has_entropy_bonus:
        logprobs, entropy = response_logprobs_and_entropy(actor, experience.sequences, temperature)
        return experience.batch._replace(logprobs=logprobs, entropy=entropy)
    return experience.batch._replace(logprobs=response_logprobs(actor, experience.sequences, temperature))


@contextmanager
def playing(module: nn.Module, adapter: str | None) -> Iterator[None]:
    """Makes `module` compute with this adapter alone while the context is open; None: with its base.

    Which parameters require a gradient stays the same. peft's own `set_adapter` and `disable_adapter` freeze the others
    (peft 0.21, src/peft/tuners/tuners_utils.py, `BaseTunerLayer`), which an engine that trains several adapters would
    take for parameters that are no longer trained. A backward pass that recomputes activations must run inside the
    context too.
    """
    layers = [layer for layer in module.modules() if hasattr(layer, "_disable_adapters")]
    before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
    for layer in layers:
        layer._disable_adapters = adapter is None  # type: ignore[assignment]
        if adapter is not None:
            layer._active_adapter = [adapter]  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, (active, is_disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = active, is_disabled
