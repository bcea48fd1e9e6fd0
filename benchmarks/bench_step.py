"""One GRPO step, rollout and update: this project's recipe against TRL's trainer, and the least the machine could do.

    python benchmarks/bench_step.py --threads 2

Both train one Llama on the same prompts, in fp32, with groups of 8, a reference and AdamW in micro-batches of as many
rows, TRL by its own `GRPOTrainer`, we by the functions of `recipes/grpo.py`. The model counts down (countdown.py): at
fixed lengths both sample the very same tokens, with long tails both draw lengths of one log-normal distribution. The
learning rate is so small that it goes on counting. The steps are taken in turns, ours in a callback of TRL's trainer.

Each side has the allocator's settings that its own command has: ours keeps what it frees (`freed_memory.py`), TRL's has
the thresholds that glibc's grow to by themselves.

What is timed of a step: generation; the reference's forward pass; the policy's forward passes with the loss; backward
passes; the optimizer's step; the rest is what is left of the whole. The least for each is its bytes and flops, as the
weights and the tokens without padding give them, at the speed that copies and matrix products reach on this machine.
"""

import dataclasses
import functools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from common import (
    FULL,
    SMALL,
    Ceilings,
    Shape,
    add_shape_options,
    append_rows,
    chosen_shape,
    environment,
    measure_ceilings,
    parse_run,
    run_options,
)
from countdown import build_countdown_model, build_prompts, log_normal_mu, log_normal_probabilities, start_token
from rich.console import Console
from rich.table import Table
from roofline import rollout_passes
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from hybrid_engine.command.freed_memory import keep_freed_memory, set_thresholds
from hybrid_engine.recipes import grpo
from hybrid_engine.recipes.algorithms.choices import Algorithm
from hybrid_engine.recipes.data.rows import PromptRow
from hybrid_engine.recipes.experience.groups import GroupSource
from hybrid_engine.recipes.experience.policy import Policy, build_policy
from hybrid_engine.recipes.experience.rollout import SamplingOptions
from hybrid_engine.recipes.rewards.loading import load_rewards

G = 8
MICRO_BATCH = 8
KL_COEF = 0.04
LEARNING_RATE = 1e-12
MEAN_SHARE, SIGMA = 0.3, 0.8
"""Of the long-tailed lengths: the mean as a share of the longest, and the deviation of the logarithm."""
PHASES = ("generation", "reference", "forward", "backward", "optimizer")


class Step(NamedTuple):
    """One step of one side: seconds of each phase, "whole" among them, and the answers' lengths."""

    seconds: dict[str, float]
    lengths: list[int]


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


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token n is the word `wn`."""
    plain = Tokenizer(models.WordLevel({f"w{index}": index for index in range(vocab)}, unk_token="w1"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=f"w{vocab - 1}", eos_token="w0")


def reward(completions: list[str], **others: Any) -> list[float]:
    """Differs within a group, whatever the answers are: no time depends on it."""
    return [float((7 * row + len(answer)) % 5) for row, answer in enumerate(completions)]


class Ours:
    """A step of `hybrid-engine grpo`."""

    name = "hybrid-engine"

    def __init__(self, folder: str, prompts: list[str], shape: Shape, budget: int):
        rows = len(prompts) * G
        self.config = grpo.Config(
            model=folder, rollout_size=len(prompts), group_size=G, minibatch_size=rows, micro_batch_size=MICRO_BATCH,
            tokens_per_micro_batch=budget, max_prompt_tokens=shape.prompt_tokens, max_new_tokens=shape.new_tokens,
            learning_rate=LEARNING_RATE, reward=("bench_step:reward",),
            algorithm=Algorithm(kl_place="loss", kl_coef=KL_COEF),
        )  # fmt: skip
        self.policy = build_policy(self.config, folder, LEARNING_RATE, 1000, True)
        self.source = GroupSource(
            actor=self.policy.actor,
            tokenizer=self.policy.tokenizer,
            rewards=load_rewards(self.config.reward),
            rows=[PromptRow(prompt=prompt) for prompt in prompts],
            options=SamplingOptions.of(self.config, G),
            seed=0,
        )
        if self.policy.actor.generator.fallback_reason is not None:
            raise RuntimeError(f"no containers: {self.policy.actor.generator.fallback_reason}")
        self.clock, self.step_number, actor = Clock(), 0, self.policy.actor
        actor.generate = self.clock.timing("generation", actor.generate)
        Policy.reference_logprobs = self.clock.timing("reference", Policy.reference_logprobs)  # type: ignore[method-assign]
        for name in ("present_batch", "policy_objective"):
            setattr(grpo, name, self.clock.timing("forward", getattr(grpo, name)))
        actor.backward = self.clock.timing("backward", actor.backward)
        actor.step = self.clock.timing("optimizer", actor.step)

    def __call__(self) -> Step:
        """Rolls out and updates."""
        keep_freed_memory()
        self.clock.take()
        start, actor = time.perf_counter(), self.policy.actor
        actor.eval()
        groups = self.source.draw(self.config.rollout_size, 0, 0, self.step_number)
        actor.train()
        experience, _ = grpo.build_experience(self.policy, groups, self.config, KL_COEF)
        grpo.update(self.policy, experience, self.config, KL_COEF, seed=self.step_number)
        whole = time.perf_counter() - start
        self.step_number += 1
        return Step(self.clock.take() | {"whole": whole}, groups.rollout.sequences.response_mask.sum(dim=1).tolist())


class TakesTurns(TrainerCallback):
    """Before each of TRL's steps one of ours; both are kept."""

    def __init__(self, ours: Ours, clock: Clock, lengths: list[int]):
        self.ours, self.clock, self.lengths = ours, clock, lengths
        self.pairs: list[tuple[Step, Step]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Before TRL generates."""
        self.step = self.ours()
        set_thresholds(32 * 2**20, 64 * 2**20)
        self.clock.take()
        self.lengths.clear()
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """After TRL's optimizer."""
        whole = time.perf_counter() - self.start
        self.pairs.append((self.step, Step(self.clock.take() | {"whole": whole}, list(self.lengths))))


def run_pairs(folder: str, prompts: list[str], shape: Shape, budget: int, num_steps: int) -> list[tuple[Step, Step]]:
    """`num_steps` steps of both, in turns."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=num_steps, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=len(prompts) * G // MICRO_BATCH, num_generations=G,
        max_completion_length=shape.new_tokens, beta=KL_COEF, learning_rate=LEARNING_RATE, logging_steps=1000,
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
        shuffle_dataset=False, loss_type="grpo",
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder), reward_funcs=reward, args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
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
    turns = TakesTurns(Ours(folder, prompts, shape, budget), clock, lengths)
    trainer.add_callback(turns)
    create = trainer.create_optimizer

    def create_timed(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = create(*args, **kwargs)
        optimizer.step = clock.timing("optimizer", optimizer.step)  # type: ignore[method-assign]
        return optimizer

    trainer.create_optimizer = create_timed  # type: ignore[method-assign]
    trainer.train()
    return turns.pairs


def least_seconds(model: LlamaForCausalLM, shape: Shape, lengths: list[int], ceilings: Ceilings) -> dict[str, float]:
    """Seconds that each phase takes at least, for answers of `lengths`; each sequence is read with its prompt."""
    passes = rollout_passes(model, len(lengths) // G, shape.prompt_tokens, lengths)
    config, size = model.config, sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings().weight.numel()
    body = size - head - model.get_input_embeddings().weight.numel()
    attention = 4 * config.num_hidden_layers * config.hidden_size
    tokens = sum(shape.prompt_tokens + length for length in lengths)
    pairs = sum((shape.prompt_tokens + length) ** 2 / 2 for length in lengths)
    forward = (2 * body * tokens + 2 * head * sum(lengths) + attention * pairs) / ceilings.flops_per_second
    # AdamW reads weight, gradient and two moments and writes all but the gradient.
    optimizer = 7 * size * 4 / ceilings.bytes_per_second
    return {
        "generation": sum(one.seconds(ceilings) for one in passes),
        "reference": forward,
        "forward": forward,
        "backward": 2 * forward,
        "optimizer": optimizer,
    }


def summary(steps: list[Step]) -> dict[str, float]:
    """Medians of each phase, of the rest and of the whole."""
    seconds = [step.seconds | {"rest": step.seconds["whole"] - sum(map(step.seconds.get, PHASES))} for step in steps]
    return {name: statistics.median(one[name] for one in seconds) for name in (*PHASES, "rest", "whole")}


def main() -> None:
    """Takes the steps of both cases, prints and records them."""
    parser = run_options(__doc__)
    add_shape_options(parser, dataclasses.replace(FULL, prompts=4), dataclasses.replace(SMALL, prompts=2))
    parser.add_argument("--only", default="", help='the case whose name contains this: "fixed" or "long tail"')
    parser.add_argument(
        "--tokens-per-micro-batch", type=int, default=0, help="ours packs so many tokens a pass (0: rows)"
    )
    args = parse_run(parser, "step")
    shape = chosen_shape(args, dataclasses.replace(FULL, prompts=4), dataclasses.replace(SMALL, prompts=2))
    transformers.logging.set_verbosity_error()
    ceilings = measure_ceilings("cpu", torch.float32, args.small)
    mean = MEAN_SHARE * shape.new_tokens
    probabilities = log_normal_probabilities(shape.new_tokens, log_normal_mu(shape.new_tokens, mean, SIGMA), SIGMA)
    model = build_countdown_model(shape, probabilities)
    cases = {"fixed lengths": shape.new_tokens + 1, "long tail": start_token(shape)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        word_tokenizer(shape.vocab).save_pretrained(folder)
        for name, last in cases.items():
            if args.only not in name:
                continue
            ids = build_prompts(shape, torch.full((shape.prompts,), last))
            prompts = [" ".join(f"w{token}" for token in row) for row in ids.tolist()]
            pairs = run_pairs(folder, prompts, shape, args.tokens_per_micro_batch, args.repeats + 1)[1:]
            rows += report(name, pairs, model, shape, ceilings)
    same = environment("cpu") | dataclasses.asdict(shape) | {"tokens_per_micro_batch": args.tokens_per_micro_batch}
    append_rows(args.csv, [same | row for row in rows])


def report(
    case: str, pairs: list[tuple[Step, Step]], model: LlamaForCausalLM, shape: Shape, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """Prints one case; its rows."""
    sides = {"ours": [ours for ours, _ in pairs], "TRL": [theirs for _, theirs in pairs]}
    found = {side: summary(steps) for side, steps in sides.items()}
    tokens = {side: statistics.mean(sum(step.lengths) for step in steps) for side, steps in sides.items()}
    per_step = [least_seconds(model, shape, step.lengths, ceilings) for step in sides["ours"]]
    least = {phase: statistics.median(one[phase] for one in per_step) for phase in PHASES}
    ratio = statistics.median(theirs.seconds["whole"] / ours.seconds["whole"] for ours, theirs in pairs)
    table = Table(
        "phase", "ours s", "share", "TRL s", "share", "least s", title=f"{case}: TRL's step / ours = {ratio:.2f}"
    )
    for phase in (*PHASES, "rest", "whole"):
        cells = [
            f"{value:.3f}"
            for side in found
            for value in (found[side][phase], found[side][phase] / found[side]["whole"])
        ]
        table.add_row(phase, *cells, f"{least[phase]:.3f}" if phase in least else "")
    table.add_row("answer tokens", f"{tokens['ours']:.0f}", "", f"{tokens['TRL']:.0f}", "", "")
    Console(width=100).print(table)
    return [
        {"case": case, "side": side, "phase": phase, "seconds": round(found[side][phase], 4),
         "least_seconds": round(least.get(phase, 0.0), 4), "tokens": round(tokens[side]), "step_ratio": round(ratio, 3)}
        for side in sides for phase in (*PHASES, "rest", "whole")
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
