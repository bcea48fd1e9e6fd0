"""Trains a model to use a calculator over several turns, in an environment behind an OpenAI-compatible API.

    hybrid-engine agent

For each step: problems -> engine.eval() -> engine.serving() -> the environment, a plain loop around the `openai` client
(`solve`) -> the server's trajectories -> engine.train() -> advantages from groups of episodes -> updates. Nothing is
tokenized twice: the policy's tokens are those that it sampled, and the old log-probabilities are the sampler's.

N: episodes of a step, T: columns from the first answer to the last. Any other environment can replace `solve`.
"""

import itertools
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.distributed.processes import all_processes
from hybrid_engine.ops.support_log_prob import Supports
from hybrid_engine.recipes import sft as sft_stage
from hybrid_engine.rl.losses import count_step
from hybrid_engine.rlhf.algorithms import (
    Coefficients,
    PolicyBatch,
    choose_tokens,
    compute_advantages,
    correction_weights,
    describe,
    policy_figures,
    policy_objective,
)
from hybrid_engine.rlhf.batches.micro_batches import DeviceFigures, TrainingPasses
from hybrid_engine.rlhf.batches.sequences import build_sequences, note_rows, pad_numbers
from hybrid_engine.rlhf.experience.evaluation import EVALUATION_SEED, mean_sums, step_means
from hybrid_engine.rlhf.experience.policy import (
    Experience,
    TrainedPolicy,
    build_policy,
    has_gradient,
    present_batch,
    trained_rows,
)
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, warm_up
from hybrid_engine.rlhf.experience.start import character_stage
from hybrid_engine.rlhf.options.reinforcement import AgentConfig as Config
from hybrid_engine.rlhf.options.shared import is_due, suitable_rate
from hybrid_engine.rlhf.planning.comparison import follow_memory, write_result
from hybrid_engine.rlhf.planning.reading import read_episodes
from hybrid_engine.rlhf.runs.checkpoints import begin_run, load_checkpoints, save_checkpoints
from hybrid_engine.rlhf.runs.engine_config import Schedule, gradient_figures
from hybrid_engine.rlhf.runs.run_checks import check_folder, check_model, check_top_k
from hybrid_engine.rlhf.runs.run_folder import CHECKPOINTS, METRICS, RUN_RESULTS, read_metrics
from hybrid_engine.rlhf.runs.run_log import RunLog, plot_metrics, say
from hybrid_engine.rlhf.runs.stages import (
    load_config,
    load_tokenizer,
    mix_seed,
    move_aside,
    save_stage,
    seed_everything,
)
from hybrid_engine.rlhf.tasks.calculator import (
    MAX_TURNS,
    Problem,
    build_tokenizer,
    calculate,
    held_out_problems,
    is_right,
    problems,
    settle_conversations,
)
from hybrid_engine.serving.sessions import Trajectory

PLOT_PANELS = {
    "success": ["success", "held_out_success"],
    "answers of an episode": ["turns"],
    "tokens that the policy wrote": ["length"],
}
SHOWN = ["success", "turns", "cut_off_share", "e2e_seconds", "episode_seconds", "training_seconds"]


@dataclass(frozen=True)
class Episode:
    """The outcome of one attempt at a problem."""

    trajectory: Trajectory
    success: float
    num_turns: int
    num_cut_off: int
    """Answers that reached --max-new-tokens."""


def run(config: Config) -> Path:
    """Trains missing stages and then the actor; returns the folder of the final actor."""
    out = Path(config.out)
    config = begin_run(config, "agent")
    check_folder(out, config)
    check_model(config.model, config)
    if config.restart:
        move_aside(out, RUN_RESULTS)
    config = settle_conversations(config, load_tokenizer(config.model) if config.model else build_tokenizer())
    # A pupil who asks writes more than one who guesses: a step must contain both.
    first_stage = character_stage("calculator", config, group_by_length=False)
    source = config.model or str(sft_stage.run(first_stage))
    check_top_k(config, load_config(source), source)
    seed_everything(config.seed)
    rate = config.learning_rate or suitable_rate(config, small=1.5e-3)
    schedule = Schedule.of(config, config.steps, "agent")
    policy = build_policy(config, source, rate, schedule)
    read = read_episodes(config, policy.actor.module.config, policy.tokenizer)
    memory = follow_memory("agent", config, read, policy.sizes, [policy.actor])
    say(policy.actor.report())
    say(schedule.describe())
    say("\n".join(describe(config.algorithm)))
    num_episodes = min(config.num_clients, config.rollout_size * config.group_size)
    assert read.answered is not None, "episodes begin with prompts"
    warm_up(policy.actor, policy.tokenizer, AnswerSampling.of(config), num_episodes, read.answered.shortest)
    before = evaluate(policy, config)
    started = time.perf_counter()
    first_step = 0
    if config.resume:
        first_step = load_checkpoints({"actor": policy.actor}, out / CHECKPOINTS, config).step
    train_loop(policy, config, RunLog(out, "agent", config.steps, config, first_step), first_step)
    seconds = time.perf_counter() - started
    after = evaluate(policy, config)
    say(f"held-out problems solved: {before:.1%} before, {after:.1%} after")
    write_result(out / "result.json", {"before": before, "after": after, "seconds": seconds}, memory)
    plot_metrics(read_metrics(out / METRICS), PLOT_PANELS, out / "plot.png")
    save_stage(policy.actor, policy.tokenizer, out / "actor")
    return out / "actor"


def train_loop(policy: TrainedPolicy, config: Config, log: RunLog, first_step: int) -> None:
    """Runs episodes, computes advantages and updates the policy, step by step."""
    asked = itertools.islice(problems(False, config.seed), first_step * config.rollout_size, None)
    with log:
        for step in range(first_step, config.steps):
            drawn = list(itertools.islice(asked, config.rollout_size))
            started = time.perf_counter()
            repeated = [problem for problem in drawn for _ in range(config.group_size)]
            episodes = play(policy, repeated, config, step, config.server_options)
            seconds = time.perf_counter() - started
            policy.actor.train()
            figures = update(policy, episodes, config)
            figures |= {"episode_seconds": seconds} | describe_episodes(episodes) | policy.actor.latency_stats()
            if is_due(config.eval_every, step, config.steps):
                figures["held_out_success"] = evaluate(policy, config)
            log.write(step, figures, SHOWN)
            if is_due(config.save_every, step, config.steps):
                save_checkpoints({"actor": policy.actor}, Path(config.out) / CHECKPOINTS, step + 1, config, {})


def play(
    policy: TrainedPolicy, drawn: list[Problem], config: Config, seed: int, limits: Mapping[str, Any] | None = None
) -> list[Episode]:
    """An episode for each problem, many at once, with the policy as it is now; `limits` are options of its server.

    Another program on this machine has neither the key nor an episode's id, so its requests are not trained on.
    """
    policy.actor.eval()
    ids = [secrets.token_urlsafe() for _ in drawn]
    options = {"api_key": secrets.token_urlsafe(), "session_ids": ids, "max_sessions": len(ids)}
    options["record_supports"] = config.is_filtered
    with (
        policy.actor.serving(policy.tokenizer, model_name="policy", **options, **(limits or {})) as server,
        server.client() as client,
        ThreadPoolExecutor(config.num_clients) as pool,
    ):
        seeds = [mix_seed(mix_seed(config.seed, seed), number) for number in range(len(drawn))]
        ended = list(pool.map(lambda n: solve(client, drawn[n], ids[n], config, seeds[n]), range(len(drawn))))
        found = {trajectory.session_id: trajectory for trajectory in server.trajectories()}
    return [Episode(found[name], *outcome) for name, outcome in zip(ids, ended, strict=True)]


def solve(client: Any, problem: Problem, session_id: str, config: Config, seed: int) -> tuple[float, int, int]:
    """One episode: whether the problem was solved, in how many answers, and how many of these were cut off.

    Uses only the protocol.
    """
    messages: list[dict[str, str]] = [{"role": "user", "content": problem.text}]
    num_cut_off = 0
    for turn in range(1, MAX_TURNS + 1):
        answer = client.chat.completions.create(
            model="policy",
            messages=messages,
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=seed + turn,
            extra_body={"session_id": session_id, "top_k": config.top_k, "min_p": config.min_p},
        )
        said = answer.choices[0].message.content
        num_cut_off += answer.choices[0].finish_reason == "length"
        if not said.startswith("?"):
            return float(is_right(problem, said)), turn, num_cut_off
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": calculate(said[1:])}]
    return 0.0, MAX_TURNS, num_cut_off


def evaluate(policy: TrainedPolicy, config: Config) -> float:
    """The share of the held-out problems, up to `--eval-prompts` of them, that are solved."""
    held_out = held_out_problems()[: config.eval_prompts]
    episodes = play(policy, held_out, config, EVALUATION_SEED, config.server_options)
    return sum(episode.success for episode in episodes) / len(episodes)


def describe_episodes(episodes: list[Episode]) -> dict[str, float]:
    """Means over a step's episodes, and the share of all answers that were cut off."""
    count, num_answers = len(episodes), sum(episode.num_turns for episode in episodes)
    return {
        "success": sum(episode.success for episode in episodes) / count,
        "turns": num_answers / count,
        "cut_off_share": sum(episode.num_cut_off for episode in episodes) / num_answers,
        "length": sum(sum(episode.trajectory.written) for episode in episodes) / count,
    }


def build_experience(policy: TrainedPolicy, episodes: list[Episode], config: Config) -> Experience:
    """Episodes as padded rows: the prompt is the part before the first answer; tokens of others are not learned."""
    device, rows = policy.actor.device, [episode.trajectory for episode in episodes]
    begins = [row.written.index(True) for row in rows]
    parts = list(zip(rows, begins, strict=True))
    sequences = build_sequences(
        [row.tokens[:begin] for row, begin in parts],
        [row.tokens[begin:] for row, begin in parts],
        policy.tokenizer.pad_token_id,
        device,
        [row.written[begin:] for row, begin in parts],
    )
    if config.is_filtered:
        sequences = replace(sequences, supports=Supports.of([row.supports[begin:] for row, begin in parts]))
    algorithm, mask = config.algorithm, sequences.response_mask
    sampled = pad_numbers([row.logprobs[begin:] for row, begin in parts], mask.shape[1], device)
    logprobs, difference = policy.old_logprobs(sequences, sampled, config.temperature, config.logprob_bound)
    weights = correction_weights(algorithm, difference, logprobs, sampled, mask)
    scores = torch.tensor([episode.success for episode in episodes], device=device)
    advantages = compute_advantages(algorithm, scores, config.group_size, logprobs, None, mask, 0.0, None)
    batch = PolicyBatch(logprobs, logprobs, advantages, mask, weights=weights, logprobs_sampler=sampled)
    entropy = policy.entropies(sequences, config.temperature) if algorithm.top_entropy < 1 else None
    return Experience(sequences, sampled, choose_tokens(algorithm, batch, entropy, all_processes()))


def update(policy: TrainedPolicy, episodes: list[Episode], config: Config) -> dict[str, float]:
    """One optimizer step on the episodes of groups with variance; returns means over the policy's tokens in them."""
    actor, experience = policy.actor, build_experience(policy, episodes, config)
    step = count_step(experience.batch.mask, config.max_new_tokens * MAX_TURNS, all_processes())
    rate = actor.get_lr()[0]
    trained = trained_rows(has_gradient(config.algorithm, experience.batch).cpu())
    figures = {"learning_rate": rate, "trained_share": len(trained) / len(episodes)}
    if not len(trained):
        actor.pass_step()
        return figures | gradient_figures(actor)
    experience = experience.rows(trained)
    present = torch.zeros_like(experience.logprobs)

    def micro_batch_loss(rows: list[int]) -> tuple[torch.Tensor, DeviceFigures]:
        batch = present_batch(actor, experience.rows(torch.tensor(rows)), config.algorithm, config.temperature)
        note_rows(present, rows, batch.logprobs)
        health = mean_sums(policy_figures(config.algorithm, batch), batch.mask)
        return policy_objective(config.algorithm, batch, step, Coefficients.first(config.algorithm)), health

    passes = TrainingPasses([actor], experience.sequences.items, policy.sizes)
    for rows in passes:
        with passes.fitting():
            actor.backward(passes.loss(partial(micro_batch_loss, rows)))
    actor.step()
    means = step_means(passes.figures())
    actor.observe_logprobs(experience.logprobs, present, experience.sequences.response_mask)
    return figures | means | gradient_figures(actor)
