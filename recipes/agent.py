"""Trains a model on episodes of several turns, in environments that talk to it behind an OpenAI-compatible API.

    hybrid-engine agent
    hybrid-engine agent --model Qwen/Qwen3-0.6B --environment my_game:Wordle --dataset words.jsonl
    hybrid-engine agent --model Qwen/Qwen3-0.6B --harness "my-agent {task}" --dataset tasks.jsonl --harness-tests pytest

For each step: tasks -> engine.eval() -> engine.serving() -> episodes (`hybrid_engine/rlhf/environments`) -> the
server's trajectories -> rewards -> engine.train() -> advantages from groups of episodes -> updates. Nothing is
tokenized twice: the policy's tokens are those that it sampled, and the old log-probabilities are the sampler's. The
environment without `--environment` is a calculator (`hybrid_engine/rlhf/tasks/calculator.py`).

N: episodes of a step, R: rows, one for each branch of their conversations, T: columns from the first answer to the
last.
"""

import itertools
import math
import secrets
import time
from collections.abc import Sequence
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
from hybrid_engine.rlhf.environments.harness import FOLDERS, OUTPUTS, TRAJECTORIES, Address, Harnesses, HarnessRun
from hybrid_engine.rlhf.environments.playing import TOKENS, Played, PolicyClient, Task
from hybrid_engine.rlhf.environments.records import episode_figures, note_failed, replay, show_episodes
from hybrid_engine.rlhf.environments.tasks import OBJECTS, OWN_REWARD, Prepared, prepare_episodes
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
from hybrid_engine.rlhf.rewards.learned import LearnedReward
from hybrid_engine.rlhf.rewards.scores import Answers, Scores, named_figures
from hybrid_engine.rlhf.runs.checkpoints import begin_run, load_checkpoints, save_checkpoints
from hybrid_engine.rlhf.runs.engine_config import Schedule, gradient_figures, torch_dtype
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
from hybrid_engine.rlhf.tasks.calculator import build_tokenizer
from hybrid_engine.serving.sessions import SessionSampling, Trajectory
from hybrid_engine.serving.tool_calls import for_template

PLOT_PANELS = {
    "success": ["success", "held_out_success"],
    "score": ["score", "held_out_score"],
    "answers of an episode": ["turns"],
    "tokens that the policy wrote": ["length"],
}
SHOWN = ["success", "turns", "cut_off_share", "e2e_seconds", "episode_seconds", "training_seconds"]


@dataclass(frozen=True)
class Episode:
    """The outcome of one task."""

    played: Played
    branches: tuple[Trajectory, ...] = ()
    """The tokens that are learned; none if the policy did not answer, or the environment failed. A conversation has
    several branches if an agent tries again, starts others, or edits its history."""
    score: float = math.nan
    """The weighted sum of its rewards; nan if no reward judged it, or it is not learned."""

    @property
    def trajectory(self) -> Trajectory | None:
        """The longest branch, which rewards read as the conversation."""
        return max(self.branches, key=lambda branch: len(branch.tokens), default=None)


def run(config: Config) -> Path:
    """Trains missing stages and then the actor; returns the folder of the final actor."""
    out = Path(config.out)
    if config.replay is not None:
        replay(config)
        return out
    config = begin_run(config, "agent")
    check_folder(out, config)
    check_model(config.model, config)
    if config.restart:
        move_aside(out, RUN_RESULTS)
    tokenizer = load_tokenizer(config.model) if config.model else build_tokenizer()
    load_judge = partial(LearnedReward.load, most_rows=config.rows_per_pass, dtype=torch_dtype(config.dtype))
    prepared = prepare_episodes(config, tokenizer, load_judge)
    config = prepared.config
    with prepared.playground:
        # A pupil who asks writes more than one who guesses: a step must contain both.
        first_stage = character_stage("calculator", config, group_by_length=False)
        source = config.model or str(sft_stage.run(first_stage))
        check_top_k(config, load_config(source), source)
        seed_everything(config.seed)
        rate = config.learning_rate or suitable_rate(config, small=1.5e-3)
        schedule = Schedule.of(config, config.steps, "agent")
        policy = build_policy(config, source, rate, schedule)
        if config.no_train:
            return dry_run(policy, prepared)
        read = read_episodes(config, policy.actor.module.config, prepared.answered)
        memory = follow_memory("agent", config, read, policy.sizes, [policy.actor])
        say(policy.actor.report())
        say(schedule.describe())
        say("\n".join(describe(config.algorithm)))
        num_episodes = min(config.num_clients, config.rollout_size * config.group_size)
        assert read.answered is not None, "episodes begin with prompts"
        warm_up(policy.actor, policy.tokenizer, AnswerSampling.of(config), num_episodes, read.answered.shortest)
        before = evaluate(policy, prepared, "before")["success"]
        started = time.perf_counter()
        first_step = 0
        if config.resume:
            first_step = load_checkpoints({"actor": policy.actor}, out / CHECKPOINTS, config).step
        train_loop(policy, prepared, RunLog(out, "agent", config.steps, config, first_step), first_step)
        seconds = time.perf_counter() - started
        after = evaluate(policy, prepared, "after")["success"]
    say(f"held-out tasks solved: {before:.1%} before, {after:.1%} after")
    write_result(out / "result.json", {"before": before, "after": after, "seconds": seconds}, memory)
    plot_metrics(read_metrics(out / METRICS), PLOT_PANELS, out / "plot.png")
    save_stage(policy.actor, policy.tokenizer, out / "actor")
    return out / "actor"


def train_loop(policy: TrainedPolicy, prepared: Prepared, log: RunLog, first_step: int) -> None:
    """Plays episodes, computes rewards and advantages and updates the policy, step by step."""
    config = prepared.config
    asked = prepared.tasks.train(first_step * config.rollout_size)
    with log:
        for step in range(first_step, config.steps):
            drawn = list(itertools.islice(asked, config.rollout_size))
            repeated = [task for task in drawn for _ in range(config.group_size)]
            started = time.perf_counter()
            prepared.rewards.begin_step(step, config.steps)
            episodes, scores = play(policy, repeated, prepared, step)
            seconds = time.perf_counter() - started
            note_failed(Path(config.out), str(step), repeated, [episode.played for episode in episodes])
            policy.actor.train()
            figures = update(policy, episodes, config)
            figures |= {"episode_seconds": seconds} | describe_episodes(episodes, config.pass_score)
            figures |= named_figures(scores.by_name) | policy.actor.latency_stats()
            if is_due(config.eval_every, step, config.steps):
                held_out = evaluate(policy, prepared, f"eval-{step}")
                figures |= {f"held_out_{name}": held_out[name] for name in ("success", "score")}
            log.write(step, figures, SHOWN)
            if is_due(config.save_every, step, config.steps):
                save_checkpoints({"actor": policy.actor}, Path(config.out) / CHECKPOINTS, step + 1, config, {})


def play(policy: TrainedPolicy, tasks: list[Task], prepared: Prepared, seed: int) -> tuple[list[Episode], Scores]:
    """An episode for each task, many at once, with the policy as it is now; and the scores of those that are learned.

    Another program on this machine has neither the key nor an episode's id, so its requests are not trained on.
    """
    policy.actor.eval()
    config, playground = prepared.config, prepared.playground
    ids = [secrets.token_urlsafe() for _ in tasks]
    options = {"api_key": secrets.token_urlsafe(), "session_ids": ids, "max_sessions": len(ids)}
    options |= {"record_supports": config.has_filters, "longest": config.max_prompt_tokens + config.max_new_tokens}
    seeds = [mix_seed(mix_seed(config.seed, seed), number) for number in range(len(tasks))]
    if isinstance(playground, Harnesses):
        drawing = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
            "min_p": config.min_p,
        }
        sampling = SessionSampling(drawing, config.max_new_tokens, dict(zip(ids, seeds, strict=True)))
        options["session_sampling"] = sampling
    with (
        policy.actor.serving(policy.tokenizer, model_name="policy", **options, **config.server_options) as server,
        server.client() as client,
    ):
        if isinstance(playground, Harnesses):
            addresses = [Address(server.url, f"{server.api_key}:{name}", server.name) for name in ids]
            ended = playground.play(tasks, addresses)
        else:
            asking = {"client": client, "sampling": request_options(config)}
            policies = [PolicyClient(session_id=ids[n], seed=seeds[n], **asking) for n in range(len(tasks))]
            ended = playground.play(tasks, policies, holds=prepared.holds_environments)
        found = branches_of(server.trajectories())
    if isinstance(playground, Harnesses):
        ended = [with_conversation(e, found.get(name, ())) for e, name in zip(ended, ids, strict=True)]
    episodes = [Episode(e, () if e.error else found.get(name, ())) for e, name in zip(ended, ids, strict=True)]
    try:
        return score(policy, tasks, episodes, prepared)
    finally:
        playground.release()


def branches_of(trajectories: Sequence[Trajectory]) -> dict[str, tuple[Trajectory, ...]]:
    """The branches of each session, in the order in which they began."""
    found: dict[str, tuple[Trajectory, ...]] = {}
    for trajectory in trajectories:
        found[trajectory.session_id] = (*found.get(trajectory.session_id, ()), trajectory)
    return found


def with_conversation(played: Played, branches: Sequence[Trajectory]) -> Played:
    """An episode of a command, with what its longest branch says after the task, and the number of answers."""
    longest = max(branches, key=lambda branch: len(branch.tokens), default=None)
    if longest is None:
        return played
    return replace(
        played,
        messages=[*played.messages, *longest.messages],
        num_turns=sum(map(num_answers, branches)),
        num_cut_off=sum(branch.finish_reason == "length" for branch in branches),
        is_cut_off=longest.finish_reason == "length",
    )


def num_answers(branch: Trajectory) -> int:
    """Number of answers of a branch that no earlier branch has."""
    written = [False, *branch.written[branch.num_shared :]]
    return sum(now and not before for before, now in itertools.pairwise(written))


def request_options(config: Config) -> dict[str, Any]:
    """How the policy is asked in every request."""
    filters = {"top_k": config.top_k, "min_p": config.min_p}
    drawing = {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_new_tokens}
    return {"model": "policy", **drawing, "extra_body": filters}


def score(
    policy: TrainedPolicy, tasks: list[Task], episodes: list[Episode], prepared: Prepared
) -> tuple[list[Episode], Scores]:
    """The episodes with the rewards of those that have a trajectory; the others have nan and are not learned from."""
    judged = [number for number, episode in enumerate(episodes) if episode.branches]
    scores = prepared.rewards(answers_of(policy, [tasks[n] for n in judged], [episodes[n] for n in judged]))
    totals = dict(zip(judged, scores.total, strict=True))
    return [replace(episode, score=totals.get(n, math.nan)) for n, episode in enumerate(episodes)], scores


def answers_of(policy: TrainedPolicy, tasks: list[Task], episodes: list[Episode]) -> Answers:
    """Episodes as rewards read them: the response is the last answer, the completion the whole conversation."""
    played, rows = [episode.played for episode in episodes], [learned_part(episode.trajectory) for episode in episodes]
    begins = [len(task.messages) for task in tasks]
    said = [[for_template(m) for m in one.messages[begin:]] for one, begin in zip(played, begins, strict=True)]
    names = dict.fromkeys(name for task in tasks for name in task.columns)
    columns = {name: [task.columns.get(name) for task in tasks] for name in names}
    return Answers(
        prompts=[one.messages[:begin] for one, begin in zip(played, begins, strict=True)],
        responses=[
            next((m.get("content") or "" for m in turns[::-1] if m["role"] == "assistant"), "") for turns in said
        ],
        conversations=said,
        prompt_ids=[row.prompt for row in rows],
        response_ids=[row.response for row in rows],
        is_cut_off=[one.is_cut_off or one.finish_reason == TOKENS for one in played],
        columns={
            **columns,
            OBJECTS: [one.instance for one in played],
            OWN_REWARD: [(one.reward_name, one.reward) for one in played],
            **of_harness(episodes),
        },
        decode=partial(policy.tokenizer.decode, skip_special_tokens=True),
    )


def of_harness(episodes: list[Episode]) -> dict[str, list[Any]]:
    """The columns of episodes that a command has played; empty for others."""
    runs = [episode.played.instance for episode in episodes]
    if not all(isinstance(run, HarnessRun) for run in runs):
        return {}
    return {
        FOLDERS: [run.folder for run in runs],
        OUTPUTS: [run.ended.output for run in runs],
        TRAJECTORIES: [episode.branches for episode in episodes],
    }


def evaluate(policy: TrainedPolicy, prepared: Prepared, label: str) -> dict[str, float]:
    """Figures of the held-out tasks, up to `--eval-prompts` of them; failed episodes are stored under `label`."""
    tasks = prepared.tasks.held_out
    episodes, _ = play(policy, tasks, prepared, EVALUATION_SEED)
    note_failed(Path(prepared.config.out), label, tasks, [episode.played for episode in episodes])
    return describe_episodes(episodes, prepared.config.pass_score)


def dry_run(policy: TrainedPolicy, prepared: Prepared) -> Path:
    """Plays `--episodes` held-out tasks and shows the conversations; returns the folder of the run."""
    config, out = prepared.config, Path(prepared.config.out)
    tasks = list(itertools.islice(itertools.cycle(prepared.tasks.held_out), config.episodes))
    episodes, _ = play(policy, tasks, prepared, EVALUATION_SEED)
    show_episodes([episode.played for episode in episodes], [episode.score for episode in episodes])
    note_failed(out, "dry", tasks, [episode.played for episode in episodes])
    return out


def describe_episodes(episodes: Sequence[Episode], pass_score: float) -> dict[str, float]:
    """Means over a step's episodes, and the share of all answers that were cut off; scores of judged ones alone."""
    played, count = [episode.played for episode in episodes], len(episodes)
    num_answers = sum(one.num_turns for one in played)
    judged = [episode.score for episode in episodes if not math.isnan(episode.score)]
    return {
        "success": sum(number >= pass_score for number in judged) / max(1, len(judged)),
        "score": sum(judged) / max(1, len(judged)),
        "turns": num_answers / count,
        "cut_off_share": sum(one.num_cut_off for one in played) / max(1, num_answers),
        "branches": sum(len(episode.branches) for episode in episodes) / count,
        "length": sum(sum(branch.written[branch.num_shared :]) for episode in episodes for branch in episode.branches)
        / count,
    } | episode_figures(played)


@dataclass(frozen=True)
class LearnedPart:
    """The tokens of an episode: the prompt is the part before the first answer."""

    prompt: list[int]
    response: list[int]
    written: list[bool]
    logprobs: list[float]
    supports: list[bytes]


def learned_part(row: Trajectory | None, pad_token: int = 0) -> LearnedPart:
    """The tokens of a branch, of which those that an earlier branch has are not learned again; padding for None."""
    if row is None:
        return LearnedPart([pad_token], [pad_token], [False], [0.0], [b""])
    written = [False] * row.num_shared + row.written[row.num_shared :]
    begin = written.index(True)
    return LearnedPart(
        row.tokens[:begin], row.tokens[begin:], written[begin:], row.logprobs[begin:], row.supports[begin:]
    )


def build_experience(policy: TrainedPolicy, episodes: list[Episode], config: Config) -> Experience:
    """Branches of episodes as R padded rows; tokens of others, and of episodes that are not learned from, are masked.

    The first branch of each episode is row number n of the first N; all branches of it have its advantage.
    """
    device, pad_token = policy.actor.device, policy.tokenizer.pad_token_id
    first = [episode.branches[0] if episode.branches else None for episode in episodes]
    more = [(number, branch) for number, episode in enumerate(episodes) for branch in episode.branches[1:]]
    rows = [learned_part(branch, pad_token) for branch in [*first, *(branch for _, branch in more)]]
    sequences = build_sequences(
        [row.prompt for row in rows],
        [row.response for row in rows],
        pad_token,
        device,
        [row.written for row in rows],
    )
    if config.has_filters:
        sequences = replace(sequences, supports=Supports.of([row.supports for row in rows]))
    algorithm, mask = config.algorithm, sequences.response_mask
    sampled = pad_numbers([row.logprobs for row in rows], mask.shape[1], device)
    logprobs, difference = policy.old_logprobs(sequences, sampled, config.temperature, config.logprob_bound)
    weights = correction_weights(algorithm, difference, logprobs, sampled, mask)
    scores = torch.tensor([episode.score for episode in episodes], device=device)
    count = len(episodes)
    own = compute_advantages(algorithm, scores, config.group_size, logprobs[:count], None, mask[:count], 0.0, None)
    advantages = with_branches(own, mask, [number for number, _ in more])
    batch = PolicyBatch(logprobs, logprobs, advantages, mask, weights=weights, logprobs_sampler=sampled)
    entropy = policy.entropies(sequences, config.temperature) if algorithm.top_entropy < 1 else None
    return Experience(sequences, sampled, choose_tokens(algorithm, batch, entropy, all_processes()))


def with_branches(own: torch.Tensor, mask: torch.Tensor, episodes: list[int]) -> torch.Tensor:
    """The advantages of all rows: those of the first branches, and for a further one that of its episode's first token.

    Args:
        own: `[N, T]`, of the first branch of each episode.
        mask: `[R, T]` bool, the learned tokens; rows from N on are further branches.
        episodes: the episode of each further branch.
    """
    if not episodes:
        return own
    place = mask[: len(own)].int().argmax(dim=1)
    of_episode = own.gather(1, place[:, None])[episodes]
    return torch.cat([own, of_episode * mask[len(own) :]])


def update(policy: TrainedPolicy, episodes: list[Episode], config: Config) -> dict[str, float]:
    """One optimizer step on the episodes of groups with variance; returns means over the policy's tokens in them."""
    actor, experience = policy.actor, build_experience(policy, episodes, config)
    step = count_step(experience.batch.mask, config.max_new_tokens * config.num_turns, all_processes())
    rate = actor.get_lr()[0]
    trained = trained_rows(has_gradient(config.algorithm, experience.batch).cpu())
    figures = {"learning_rate": rate, "trained_share": len(trained) / len(experience.batch.mask)}
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
