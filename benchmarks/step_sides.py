"""The two sides of `bench_step.py`: one GRPO step of this project's recipe, and one of TRL's trainer.

Each runs in a process of its own, as it does for those who use it, and takes a step whenever it is its turn.

G answers to a prompt.
"""

import dataclasses
import functools
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from common import Shape
from transformers import LlamaForCausalLM, TrainerCallback

from hybrid_engine.cli.cli import keep_freed_memory
from hybrid_engine.recipes import grpo
from hybrid_engine.rlhf.algorithms import Coefficients
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.policy import TrainedPolicy, build_policy
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, GroupSource
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.runs.engine_config import Schedule

G = 8
MICRO_BATCH = 8
KL_COEF = 0.04
LEARNING_RATE = 1e-12


class Step(NamedTuple):
    """One step of one side: seconds of each phase, "whole" among them, and the answers' lengths."""

    seconds: dict[str, float]
    lengths: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What both sides do."""

    folder: str  # of the model and its tokenizer
    prompts: list[str]
    shape: Shape
    tokens_per_micro_batch: int  # of ours; 0: rows
    num_steps: int
    threads: int


class Clock:
    """Adds up the seconds of phases; what runs inside another phase is that one's."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside = False

    def timing(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[phase] += time.perf_counter() - start
                self._inside = False

        return timed

    def take(self) -> dict[str, float]:
        """What was added up since the last time."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def reward(completions: list[str], **others: Any) -> list[float]:
    """Differs within a group, whatever the answers are: no time depends on it."""
    return [float((7 * row + len(answer)) % 5) for row, answer in enumerate(completions)]


class Ours:
    """A step of `hybrid-engine grpo`."""

    def __init__(self, job: Job):
        folder, prompts, shape = job.folder, job.prompts, job.shape
        rows = len(prompts) * G
        self.config = grpo.Config(
            model=folder, rollout_size=len(prompts), group_size=G, minibatch_size=rows, micro_batch_size=MICRO_BATCH,
            tokens_per_micro_batch=job.tokens_per_micro_batch, max_prompt_tokens=shape.prompt_tokens,
            max_new_tokens=shape.new_tokens, learning_rate=LEARNING_RATE, reward=("step_sides:reward",),
            algorithm=Algorithm(kl_place="loss", kl_coef=KL_COEF),
        )  # fmt: skip
        self.policy = build_policy(self.config, folder, LEARNING_RATE, Schedule.of(self.config, 1000, "grpo"))
        self.source = GroupSource(
            actor=self.policy.actor,
            tokenizer=self.policy.tokenizer,
            rewards=load_rewards(self.config.reward),
            rows=[PromptRow(prompt=prompt) for prompt in prompts],
            options=AnswerSampling.of(self.config, G),
            seed=0,
        )
        if self.policy.actor.generator.fallback_reason is not None:
            raise RuntimeError(f"no containers: {self.policy.actor.generator.fallback_reason}")
        self.clock, self.step_number, actor = Clock(), 0, self.policy.actor
        actor.generate = self.clock.timing("generation", actor.generate)
        TrainedPolicy.reference_logprobs = self.clock.timing("reference", TrainedPolicy.reference_logprobs)  # type: ignore[method-assign]
        for name in ("present_batch", "policy_objective"):
            setattr(grpo, name, self.clock.timing("forward", getattr(grpo, name)))
        actor.backward = self.clock.timing("backward", actor.backward)
        actor.step = self.clock.timing("optimizer", actor.step)

    def __call__(self) -> Step:
        """Rolls out and updates."""
        self.clock.take()
        start, actor = time.perf_counter(), self.policy.actor
        actor.eval()
        groups = self.source.draw(self.config.rollout_size, 0, 0, self.step_number)
        actor.train()
        experience, _ = grpo.build_experience(self.policy, groups, self.config, KL_COEF)
        grpo.update(self.policy, experience, self.config, Coefficients(KL_COEF, 0.0, 0.0), seed=self.step_number)
        whole = time.perf_counter() - start
        self.step_number += 1
        return Step(self.clock.take() | {"whole": whole}, groups.rollout.sequences.response_mask.sum(dim=1).tolist())


def take_our_steps(job: Job, turns: Connection) -> None:
    """A step at each turn, which is answered by it; in a process that keeps what it frees, as our command's does."""
    keep_freed_memory()
    ours = Ours(job)
    for _ in range(job.num_steps):
        turns.recv()
        turns.send(ours())


class AtTurns(TrainerCallback):
    """TRL's trainer waits for its turn before a step, and answers with it."""

    def __init__(self, turns: Connection, clock: Clock, lengths: list[int]):
        self.turns, self.clock, self.lengths = turns, clock, lengths

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Before TRL generates."""
        self.turns.recv()
        self.clock.take()
        self.lengths.clear()
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """After TRL's optimizer."""
        whole = time.perf_counter() - self.start
        self.turns.send(Step(self.clock.take() | {"whole": whole}, list(self.lengths)))


def take_trl_steps(job: Job, turns: Connection) -> None:
    """The same by TRL's own trainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=job.num_steps, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=len(job.prompts) * G // MICRO_BATCH, num_generations=G,
        max_completion_length=job.shape.new_tokens, beta=KL_COEF, learning_rate=LEARNING_RATE, logging_steps=1000,
        report_to=[], use_cpu=True, bf16=False, activation_checkpointing=False, save_strategy="no", disable_tqdm=True,
        shuffle_dataset=False, loss_type="grpo",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(job.folder), reward_funcs=reward, args=arguments,
        train_dataset=Dataset.from_dict({"prompt": job.prompts}),
        processing_class=transformers.AutoTokenizer.from_pretrained(job.folder),
    )  # fmt: skip
    clock, lengths = Clock(), list[int]()

    def keeping(score: Callable[..., Any]) -> Callable[..., Any]:
        def scored(*args: Any, **kwargs: Any) -> Any:
            output = score(*args, **kwargs)
            lengths.extend(output["completion_mask"].sum(dim=1).tolist())
            return output

        return scored

    internals: Any = trainer
    internals._generate = clock.timing("generation", internals._generate)
    internals._generate_and_score_completions = keeping(internals._generate_and_score_completions)
    log_probs = internals._get_per_token_logps_and_entropies
    in_reference = clock.timing("reference", log_probs)
    internals._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        log_probs if torch.is_grad_enabled() else in_reference
    )(*args, **kwargs)
    trainer.compute_loss = clock.timing("forward", trainer.compute_loss)  # type: ignore[method-assign]
    trainer.accelerator.backward = clock.timing("backward", trainer.accelerator.backward)
    trainer.add_callback(AtTurns(turns, clock, lengths))
    create = trainer.create_optimizer

    def create_timed(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = create(*args, **kwargs)
        optimizer.step = clock.timing("optimizer", optimizer.step)  # type: ignore[method-assign]
        return optimizer

    trainer.create_optimizer = create_timed  # type: ignore[method-assign]
    trainer.train()


Side = Callable[[Job, Connection], None]
"""Takes a step at each turn."""


def take_turns(job: Job, taken_by: tuple[Side, Side] = (take_our_steps, take_trl_steps)) -> list[tuple[Step, Step]]:
    """`job.num_steps` steps of both, ours before TRL's each time; while one works, the other waits."""
    context, sides = multiprocessing.get_context("spawn"), []
    for side in taken_by:
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(side, job, theirs), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        sides.append(ours)
    return [(_turn(sides[0]), _turn(sides[1])) for _ in range(job.num_steps)]


def _turn(side: Connection) -> Step:
    side.send(None)
    return side.recv()


def _run(side: Callable[[Job, Connection], None], job: Job, turns: Connection) -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job.threads)
    side(job, turns)
