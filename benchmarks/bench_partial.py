"""Partial rollouts against rollouts that wait for their longest answer: steps per hour, and both reward curves.

    python benchmarks/bench_partial.py --threads 1 --plot runs/partial.png

Each step trains a small Llama on groups of answers to the same number of prompts, by the clipped ratio to the sampler
that drew each token. The lengths of answers are log-uniform over one order of magnitude and belong to the prompts, so
both sides draw and train the same number of tokens in all. The reward is the share of tokens from the lower half of the
vocabulary. Both sides begin with equal weights and take steps in turn. With partial rollouts half as many groups again
are open, and each is trained at most one step after it was begun, as in `grpo --partial-rollouts`.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from common import (
    LlamaShape,
    add_shape_options,
    append_rows,
    chosen_shape,
    environment,
    llama_config,
    parse_run,
    run_options,
)
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

import hybrid_engine
from hybrid_engine.rl.losses import ppo_policy_loss, token_mean
from hybrid_engine.rlhf.batches.sequences import build_sequences, pad_numbers, pad_prompts, response_logprobs
from hybrid_engine.rlhf.experience.partial_rollouts import num_to_begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingShape(LlamaShape):
    """A Llama, and the answers of a run."""

    groups: int
    group_size: int
    prompt_tokens: int
    shortest: int
    longest: int
    steps: int


FULL = TrainingShape(hidden=128, layers=2, heads=4, kv_heads=4, intermediate=256, vocab=256, groups=8, group_size=2,
                     prompt_tokens=8, shortest=40, longest=400, steps=40)  # fmt: skip
SMALL = TrainingShape(hidden=32, layers=2, heads=2, kv_heads=2, intermediate=64, vocab=64, groups=4, group_size=2,
                      prompt_tokens=4, shortest=4, longest=40, steps=4)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TrainingAnswer:
    """One answer; lists of one length."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def build_engine(shape: TrainingShape, device: str) -> Any:
    """Equal weights each time."""
    torch.manual_seed(0)
    positions = shape.prompt_tokens + shape.longest
    config = llama_config(shape, positions, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    engine, *_ = hybrid_engine.initialize(
        model=LlamaForCausalLM(config).to(device),
        config={
            "train_batch_size": shape.groups * shape.group_size,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
            "hybrid_engine": {"enabled": True, "max_out_tokens": positions, "print_latency": False},
        },
    )
    return engine


def prompt_of(shape: TrainingShape, index: int) -> tuple[list[int], int]:
    """The tokens of a prompt, and the length of its answers."""
    rng = random.Random(index)
    length = round(math.exp(rng.uniform(math.log(shape.shortest), math.log(shape.longest))))
    return [rng.randrange(1, shape.vocab) for _ in range(shape.prompt_tokens)], length


def asked(shape: TrainingShape, first: int, count: int) -> dict[str, Any]:
    """Arguments of `generate()` for `count` prompts."""
    if not count:
        return {}
    prompts, lengths = zip(*(prompt_of(shape, first + number) for number in range(count)), strict=True)
    input_ids, mask = pad_prompts(list(prompts), 0, torch.device("cpu"))
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "row_options": [{"max_new_tokens": length} for length in lengths],
        "num_return_sequences": shape.group_size,
        "max_new_tokens": 1,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
    }


def whole_rollout(engine: Any, shape: TrainingShape, step: int) -> list[TrainingAnswer]:
    """All answers of a step, by weights of the step."""
    arguments = asked(shape, step * shape.groups, shape.groups)
    output = engine.generate(**arguments, seed=step, return_dict_in_generate=True)
    width = arguments["input_ids"].shape[1]
    answers = []
    for row, length in enumerate(output.lengths.tolist()):
        ids, tokens = output.sequences[row, :width], output.sequences[row, width : width + length]
        answers.append(TrainingAnswer(ids.tolist(), tokens.tolist(), output.logprobs[row, :length].tolist()))
    return answers


class OpenRollout:
    """Answers as soon as enough groups are whole; the others stay open for the next step."""

    def __init__(self) -> None:
        self._carried: Any = None
        self._begun: dict[int, int] = {}

    def __call__(self, engine: Any, shape: TrainingShape, step: int) -> list[TrainingAnswer]:
        first = 0 if self._carried is None else self._carried.num_prompts
        num_left = shape.groups * (shape.steps - step)
        count = num_to_begin(shape.groups, len(self._begun), num_left)
        due = set(self._begun)  # begun a step ago
        self._begun |= dict.fromkeys(range(first, first + count), step)
        carried = engine.generate_until(
            lambda whole: len(whole) >= shape.groups and due.issubset(whole),
            **asked(shape, first, count),
            carried=self._carried,
            version=step,
            seed=step,
        )
        chosen = sorted(carried.whole, key=lambda group: (group not in due, group))[: shape.groups]
        groups, self._carried = carried.take(chosen)
        for group in chosen:
            del self._begun[group]
        return [TrainingAnswer(g.prompt_ids, answer.tokens, answer.logprobs) for g in groups for answer in g.answers]


def train(engine: Any, shape: TrainingShape, answers: list[TrainingAnswer]) -> float:
    """One update; returns the mean reward."""
    rewards = torch.tensor([sum(token < shape.vocab // 2 for token in a.tokens) / len(a.tokens) for a in answers])
    groups = rewards.view(-1, shape.group_size)
    advantages = (groups - groups.mean(dim=1, keepdim=True)).flatten() / rewards.std().clamp(min=1e-6)
    sequences = build_sequences([a.prompt for a in answers], [a.tokens for a in answers], 0, engine.device)
    mask = sequences.response_mask
    old = pad_numbers([a.logprobs for a in answers], mask.shape[1], engine.device)
    engine.train()
    logprobs = response_logprobs(engine, sequences, 1.0)
    losses = ppo_policy_loss(logprobs, old, advantages[:, None].expand_as(old).to(old), 0.2, 0.2)
    engine.backward(token_mean(losses, mask, int(mask.sum())))
    engine.step()
    return float(rewards.mean())


def main() -> None:
    """Prints a table, adds a row to a CSV and, with `--plot`, draws the curves."""
    parser = run_options(__doc__, repeats=1)
    add_shape_options(parser, FULL, SMALL)
    parser.add_argument("--plot", help="file for a picture of both reward curves")
    args = parse_run(parser, "partial")
    shape = chosen_shape(args, FULL, SMALL)
    ways: dict[str, Callable[..., list[TrainingAnswer]]] = {"whole": whole_rollout, "partial": OpenRollout()}
    engines = {name: build_engine(shape, args.device) for name in ways}
    seconds = {name: [(0.0, 0.0)] for name in ways}
    rewards: dict[str, list[float]] = {name: [] for name in ways}
    tokens = dict.fromkeys(ways, 0)
    for name in ways:  # compiles
        engines[name].eval().generate(**asked(shape, 0, 2), seed=0)
    for step in range(shape.steps):
        for name, answer in ways.items():
            begin = time.perf_counter(), time.process_time()
            answers = answer(engines[name].eval(), shape, step)
            rewards[name].append(train(engines[name], shape, answers))
            clock, cpu = seconds[name][-1]
            seconds[name].append((clock + time.perf_counter() - begin[0], cpu + time.process_time() - begin[1]))
            tokens[name] += sum(len(a.tokens) for a in answers)
    if tokens["whole"] != tokens["partial"]:
        raise RuntimeError(f"the sides trained other numbers of tokens: {tokens}")
    report(args, shape, {name: found[-1] for name, found in seconds.items()}, rewards, tokens["whole"])
    if args.plot:
        plot(args.plot, seconds, rewards)


def report(
    args: Any,
    shape: TrainingShape,
    totals: dict[str, tuple[float, float]],
    rewards: dict[str, list[float]],
    num_tokens: int,
) -> None:
    """The table, and the row of the CSV."""
    table = Table("rollouts", "steps/hour", "steps/hour of CPU", "reward of the last quarter")
    row: dict[str, Any] = dataclasses.asdict(shape) | {"tokens_per_step": num_tokens // shape.steps}
    for name, (clock, cpu) in totals.items():
        last = rewards[name][-max(1, shape.steps // 4) :]
        reward = sum(last) / len(last)
        hourly = 3600 * shape.steps / clock, 3600 * shape.steps / cpu
        table.add_row(name, *(f"{rate:.0f}" for rate in hourly), f"{reward:.3f}")
        row |= {f"{name}_steps_per_hour": round(hourly[0]), f"{name}_reward": round(reward, 4)}
    ratios = [totals["whole"][place] / totals["partial"][place] for place in (0, 1)]
    table.add_row("partial / whole", *(f"{ratio:.2f}" for ratio in ratios), "")
    row |= {"ratio": round(ratios[0], 3), "cpu_ratio": round(ratios[1], 3)}
    Console().print(table)
    append_rows(args.csv, [row | environment(args.device)])


def plot(path: str, seconds: dict[str, list[tuple[float, float]]], rewards: dict[str, list[float]]) -> None:
    """Reward by step, and by seconds of CPU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for name, found in rewards.items():
        by_step.plot(range(1, len(found) + 1), found, label=f"{name} rollouts")
        by_time.plot([cpu for _, cpu in seconds[name][1:]], found, label=f"{name} rollouts")
    by_step.set(xlabel="step", ylabel="reward")
    by_time.set(xlabel="seconds of CPU")
    by_step.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
