"""Options of `hybrid-engine grpo`, `ppo` and `agent`, which learn from rewards."""

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_engine.config.checks import (
    LARGEST_SIZE,
    check_above,
    check_answers,
    check_at_least,
    check_between,
    check_count,
    check_divides,
    check_finite,
    flag,
    option,
)
from hybrid_engine.rlhf.options.algorithm import Algorithm
from hybrid_engine.rlhf.options.distillation import is_model
from hybrid_engine.rlhf.options.shared import (
    PromptRunOptions,
    RolloutOptions,
    check_minibatch,
    derive_minibatch,
)

if TYPE_CHECKING:
    from hybrid_engine.serving.sessions import Size

OF_SCORES = ("dynamic_sampling", "overlong_buffer")
"""Choices of an algorithm that act on the scores of answers, besides baselines and scales."""
NOT_OF_EPISODES = ("dynamic_sampling", "overlong_buffer", "mask_cut_off")
"""Choices of an algorithm that concern single answers to prompts."""
CALCULATOR = "calculator"
"""The environment of a run that names none."""
CALCULATOR_TURNS = 3
"""Answers of a conversation with the calculator without a detour."""
OTHER_TURNS = 10
"""Default limit of answers in other environments."""
MESSAGES_BYTES = 2**14
"""Bytes of a conversation's messages, as Python objects."""


@dataclass(frozen=True, kw_only=True)
class PartialOptions(RolloutOptions):
    """Whether a step waits for its longest answers."""

    partial_rollouts: bool = option(
        False,
        "Train as soon as enough groups are whole and continue the others in the next step, under its weights "
        "(docs/grpo.md)",
    )
    max_staleness: int | None = option(
        None,
        "With --partial-rollouts: steps after which a group must be trained since it was begun; default: 1",
    )

    @property
    def steps_of_staleness(self) -> int:
        """Steps after which a group must be trained since it was begun."""
        return 1 if self.max_staleness is None else self.max_staleness


def check_partial(config: PartialOptions) -> None:
    """Raises ValueError for options that do not go with rollouts that end before all answers have."""
    check_count("max_staleness", config.max_staleness, 1)
    if config.max_staleness is not None and not config.partial_rollouts:
        raise ValueError(
            f"--max-staleness={config.max_staleness} applies to --partial-rollouts; give both, or leave it out"
        )
    if config.partial_rollouts and (config.has_filters or config.router_replay):
        recorded = "the filters of --top-k, --top-p and --min-p" if config.has_filters else "--router-replay"
        raise ValueError(f"--partial-rollouts does not record {recorded}; leave one of them out")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PartialOptions, PromptRunOptions):
    """Trains a language model with GRPO: the model answers each prompt several times and learns from the best answers.

        hybrid-engine grpo
        hybrid-engine grpo --model Qwen/Qwen3-0.6B --dataset problems.jsonl --reward math --out runs/mine
        hybrid-engine grpo --preset dapo --kl-place loss --kl-coef 0.01

    Without --model, a small model that adds numbers and forgets the carry is trained first; without --reward, correct
    sums are rewarded. Writes to --out: config.yaml, metrics.jsonl (one line per step), plot.png, samples.json (answers
    before and after), result.json, checkpoints/, best/ (the best weights on held-out prompts) and actor/ (the final
    weights), both Hugging Face folders. --resume continues an interrupted run from its last checkpoint.
    """

    OWN_LENGTHS = (96, 48)
    out: str = "runs/sums"
    model: str | None = option(
        None,
        "Hugging Face name or folder of the initial actor; default: a small model that adds numbers, trained if "
        "missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" and the '
        "columns that the rewards read; default: sums",
    )
    group_size: int = option(8, "Answers per prompt")
    minibatch_size: int = option(
        0,
        "Answers per optimizer step, over all processes; 0: the largest divisor of a step's answers, up to 256, that "
        "the processes share equally",
    )
    epochs: int = option(1, "Passes over each rollout")
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 7e-4, with --model 1e-6, for an adapter on it 1e-5",
    )
    measure_kl: bool = option(
        True,
        "Report the KL to the initial weights even if the algorithm uses none; costs a forward pass per answer and, "
        "without an adapter, a second model",
    )
    teacher: str | None = option(
        None,
        "Hugging Face name or folder of a model with the actor's tokens; the log of its probability of a token over "
        "the actor's is added to the token's advantage (docs/distillation.md)",
    )
    teacher_coef: float | None = option(None, "With --teacher: weight of that, per nat; default: 1")
    teacher_clamp: float | None = option(
        None, "With --teacher: bound of that, in nats, before it is weighed; default: none; verl's is 10"
    )
    teacher_alone: bool = option(
        False,
        "With --teacher: learn from it alone; rewards only say how good the answers are",
    )
    eval_prompts: int = 128
    eval_samples: int = option(8, "Answers per held-out prompt, the k of pass@k")
    pass_score: float = option(1.0, "Minimum score of a correct answer in pass@k and in pass rates")
    pass_window: tuple[float, ...] = option(
        (),
        "Lowest and highest pass rate of the prompts to draw again, such as 0.1 0.9; prompts without a rate yet are "
        "always drawn; default: draw all",
    )
    revisit_after: int = option(
        4,
        "Times that a prompt outside of --pass-window is skipped before it is drawn again; 0: it never is",
    )
    replay_best: bool = option(
        False,
        "Put the best answer to a prompt so far into a group whose answers all score lower, in place of its worst",
    )
    algorithm: Algorithm = Algorithm()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        PromptRunOptions.__post_init__(self)
        RolloutOptions.__post_init__(self)
        derive_minibatch(self, self.rollout_size * self.group_size, 256)
        for name in ("group_size", "minibatch_size", "epochs", "eval_samples"):
            check_count(name, getattr(self, name), 1)
        check_finite("pass_score", self.pass_score)
        self._check_window()
        if self.replay_best and self.algorithm.policy_loss == "reinforce":
            raise ValueError(
                "--replay-best needs a policy loss with a ratio, which corrects for the age of an answer, and "
                "--policy-loss=reinforce has none; use clip, or leave it out"
            )
        check_above("learning_rate", self.learning_rate, 0)
        check_answers(self.rollout_size, self.group_size)
        check_teacher_options(self)
        check_partial(self)
        if self.partial_rollouts and self.algorithm.dynamic_sampling:
            raise ValueError(
                f"--dynamic-sampling={self.algorithm.dynamic_sampling} draws other prompts in the same step, for which "
                "--partial-rollouts does not wait; leave one of them out"
            )
        if self.partial_rollouts and self.algorithm.policy_loss == "reinforce" and self.algorithm.correction == "none":
            raise ValueError(
                "--policy-loss=reinforce has no ratio, which corrects for the age of an answer of --partial-rollouts; "
                "use clip, or give --correction"
            )
        if not self.teacher_alone:
            self.algorithm.check_group_size("group_size", self.group_size)
        check_minibatch(self.rollout_size, self.group_size, self.minibatch_size)

    def _check_window(self) -> None:
        """Raises ValueError for a window that is no range of pass rates, or `revisit_after` without one."""
        check_count("revisit_after", self.revisit_after, 0)
        shown = " ".join(f"{rate:g}" for rate in self.pass_window)
        if self.pass_window and not (
            len(self.pass_window) == 2 and 0 <= self.pass_window[0] <= self.pass_window[1] <= 1
        ):
            raise ValueError(
                f"--pass-window={shown} must be two rates from 0 to 1, the lower one first; write --pass-window 0.1 0.9"
            )
        if not self.pass_window and self.revisit_after != GRPOConfig.revisit_after:
            raise ValueError(
                f"--revisit-after={self.revisit_after} needs prompts that are skipped; give --pass-window, or leave it "
                "out"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the run compares its actor with the first weights."""
        return self.measure_kl or self.algorithm.needs_reference

    @property
    def learns_from(self) -> tuple[str | None, ...]:
        """The teacher."""
        return () if self.teacher is None else (self.teacher,)

    @property
    def weight_of_teacher(self) -> float:
        """Weight of the teacher's log-probabilities in advantages."""
        return 1.0 if self.teacher_coef is None else self.teacher_coef


def check_teacher_options(config: GRPOConfig) -> None:
    """Raises ValueError for options of a teacher without one, and for those of rewards that are not learned from."""
    for name in ("teacher_coef", "teacher_clamp", "teacher_alone"):
        if getattr(config, name) not in (None, False) and config.teacher is None:
            raise ValueError(f"{flag(name)} applies to a run with a teacher; give --teacher, or leave it out")
    if config.teacher is not None and not is_model(config.teacher):
        raise ValueError(
            f"--teacher={config.teacher} is a teacher of distill; grpo learns from a model in memory: give its Hugging "
            "Face name or folder"
        )
    for name in ("teacher_coef", "teacher_clamp"):
        if getattr(config, name) is not None:
            check_above(name, getattr(config, name), 0)
    if not config.teacher_alone:
        return
    for name in OF_SCORES:
        if value := getattr(config.algorithm, name):
            raise ValueError(
                f"{flag(name)}={value} acts on rewards, but --teacher-alone does not learn from them; leave it out, or "
                f"with --preset set it to {getattr(Algorithm, name)}"
            )
    if config.algorithm.kl_place in ("reward", "token-reward"):
        raise ValueError(
            f"--kl-place={config.algorithm.kl_place} puts the KL into rewards, but --teacher-alone does not learn from "
            "them; use --kl-place loss or none"
        )


@dataclass(frozen=True, kw_only=True)
class AgentConfig(RolloutOptions, PromptRunOptions):
    """Trains a language model on episodes of several turns in an environment.

        hybrid-engine agent
        hybrid-engine agent --model Qwen/Qwen3-0.6B --environment my_game:Wordle --dataset words.jsonl
        hybrid-engine agent --model Qwen/Qwen3-0.6B --environment my_game:Wordle --episodes 4 --no-train

    An environment is a class as TRL's `environment_factory` takes it: `reset`, public methods as tools, `get_reward`
    (docs/environments.md). Without --environment it is a calculator; without --model, a small model that sometimes uses
    the calculator and often guesses is trained first. Writes to --out: config.yaml, metrics.jsonl (one line per step),
    plot.png, result.json, failed_episodes.jsonl and actor/, a Hugging Face folder.
    """

    OWN_LENGTHS = (256, 24)

    out: str = "runs/agent"
    model: str | None = option(
        None,
        "Hugging Face name or folder of the initial actor; default: one trained on a pupil's conversations",
    )
    environment: tuple[str, ...] = option(
        (),
        "Environments: module:factory, gymnasium:..., reasoning_gym:NAME, mcp:COMMAND_OR_URL or openenv:URL "
        "(docs/environments.md); several, each as NAME=SPEC, are chosen by the data's column environment; "
        "default: a calculator",
    )
    harness: str | None = option(
        None,
        "Command that plays an episode in place of an environment, with {base_url}, {address}, {api_key}, {model}, "
        "{task}, {folder} and {python} in braces (docs/agents.md); needs --dataset",
    )
    harness_env: tuple[str, ...] = option(
        (),
        "Environment variables of --harness in addition to PATH, LANG and a HOME of its own: NAME, or NAME=VALUE with "
        "the same words in braces",
    )
    harness_tests: str | None = option(
        None,
        "Command that tests what --harness left in its folder: the reward is 1 if it succeeds; the data's column tests "
        "has files that are written first",
    )
    tools: tuple[str, ...] = option((), "Functions that the model may call in addition, each as module:function")
    action_pattern: str | None = option(
        None,
        "Regular expression that finds a text game's action in an answer: its first group, or all of it; default: the "
        "whole answer",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        "Tasks: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, whose columns `reset` gets by name; "
        "default: the environment makes tasks from seeds",
    )
    steps: int = 20
    rollout_size: int = option(32, "Tasks per step")
    group_size: int = option(8, "Episodes per task")
    num_clients: int = option(32, "Concurrent episodes, each with an instance of its environment")
    max_turns: int = option(0, "Maximum answers of an episode; 0: 3 for the calculator, otherwise 10")
    max_episode_seconds: float = option(300.0, "Maximum duration of an episode, in seconds; also ends one that hangs")
    pass_score: float = option(1.0, "Minimum score of an episode that counts as a success")
    episodes: int = option(0, "With --no-train: number of held-out tasks to play, one episode each")
    no_train: bool = option(False, "Only play --episodes and show their conversations")
    replay: str | None = option(
        None,
        "Id of an episode in failed_episodes.jsonl of --out: give its environment the same answers again and show what "
        "happens; needs no model",
    )
    max_prompt_tokens: int = option(0, "Maximum tokens before the last answer; 0: what the turns before it can need")
    max_new_tokens: int = option(
        0,
        "Maximum length of an answer, per turn, in tokens; 0: 256, or what the model's positions allow (24 without "
        "--model)",
    )
    serving_memory: str | None = option(
        None,
        "KV cache memory while episodes run: a size such as 6GiB, or a fraction of the free memory; default: 0.5 on a "
        "CPU, 0.9 on a GPU",
    )
    max_session_bytes: int | None = option(
        None,
        "Memory for the conversations of a step; default: 2 GiB, or more if the longest ones need it",
    )
    stall_seconds: float = option(
        30.0,
        "Disconnect a client that reads less than 4 KiB of a waiting answer in this many seconds",
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate; default: 1.5e-3, with --model 1e-6, for an adapter 1e-5",
    )
    algorithm: Algorithm = Algorithm()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        from hybrid_engine.generation.memory import read_memory  # imports torch

        PromptRunOptions.__post_init__(self)
        RolloutOptions.__post_init__(self)
        for name in ("group_size", "num_clients"):
            check_count(name, getattr(self, name), 1)
        self._check_environment()
        if self.learning_rate is not None:
            check_above("learning_rate", self.learning_rate, 0)
        check_answers(self.rollout_size, self.group_size)
        read_memory(self.serving_memory, "cpu", "serving_memory")
        check_at_least("stall_seconds", self.stall_seconds, 0.1)
        check_count("max_session_bytes", self.max_session_bytes, 1, LARGEST_SIZE)
        if self.max_session_bytes is not None and self.max_session_bytes < self.largest_step.num_bytes:
            raise ValueError(
                f"--max-session-bytes={self.max_session_bytes} is less than the {self.largest_step.num_bytes} that a "
                "step's conversations may need, all of which are trained on; raise it or leave it out"
            )
        self.algorithm.check_group_size("group_size", self.group_size)
        if self.router_replay:
            raise ValueError("--router-replay: the conversations of agent do not record experts; leave it out")
        if self.algorithm.needs_reference:
            raise ValueError("--kl-place: agent has no reference model; leave it at none")
        if self.algorithm.is_decoupled:
            raise ValueError(
                f"--reward-aggregation={self.algorithm.reward_aggregation}: agent learns from the sum of an episode's "
                "rewards; leave it out"
            )
        if self.algorithm.entropy_target:
            raise ValueError(
                f"--entropy-target={self.algorithm.entropy_target}: agent keeps the entropy's coefficient fixed; use "
                "--entropy-coef alone"
            )
        for name in NOT_OF_EPISODES:
            if getattr(self.algorithm, name):
                raise ValueError(
                    f"{flag(name)}={getattr(self.algorithm, name)} applies to single answers, not to episodes; leave "
                    f"it out, or with --preset set it to {getattr(Algorithm, name)}"
                )

    def _check_environment(self) -> None:
        """Raises ValueError for options of the environment and its episodes that are wrong or do not go together."""
        check_count("max_turns", self.max_turns, 0)
        check_above("max_episode_seconds", self.max_episode_seconds, 0)
        check_finite("pass_score", self.pass_score)
        check_count("episodes", self.episodes, 0)
        if self.no_train != bool(self.episodes):
            raise ValueError(
                f"--episodes={self.episodes} and --no-train={self.no_train} belong together: --episodes 4 --no-train "
                "plays 4 episodes and shows them; give both, or leave both out"
            )
        if isinstance(self.environment, str):
            object.__setattr__(self, "environment", (self.environment,))
        self._check_harness()
        others = [name for name in ("environment", "dataset", "tools") if getattr(self, name)]
        if others and not self.plays_calculator and not self.model and self.replay is None:
            raise ValueError(
                f"{flag(others[0])}: the model that is trained without --model only knows the calculator; give --model"
            )
        if self.tools and not (self.environment or self.dataset):
            raise ValueError("--tools needs tasks in which they are used; give --dataset or --environment")
        if self.dataset and not self.environment and not self.reward and not self.harness_tests:
            raise ValueError("--dataset without --environment needs --reward to score its episodes; give one")

    def _check_harness(self) -> None:
        if self.harness is None:
            for name in ("harness_env", "harness_tests"):
                if getattr(self, name):
                    raise ValueError(f"{flag(name)} belongs to --harness; give it, or leave this out")
            return
        for name in ("environment", "tools", "action_pattern"):
            if getattr(self, name):
                raise ValueError(f"--harness and {flag(name)} exclude each other: the command plays; leave one out")
        if not self.dataset and self.replay is None:
            raise ValueError("--harness needs tasks; give --dataset, whose column prompt is the task")
        for name, command in (("harness", self.harness), ("harness_tests", self.harness_tests)):
            try:
                words = shlex.split(command) if command is not None else ["x"]
            except ValueError as error:
                raise ValueError(f"{flag(name)}={command!r} is not a command: {error}; fix its quotes") from error
            if not words:
                raise ValueError(f"{flag(name)} is empty; give a command")

    @property
    def plays_calculator(self) -> bool:
        """Whether the run's environment is the calculator, which makes its own problems."""
        return self.environment in ((), (CALCULATOR,)) and not self.dataset

    @property
    def needs_reference(self) -> bool:
        """Whether the run compares its actor with the first weights."""
        return False

    @property
    def num_turns(self) -> int:
        """Maximum answers of an episode."""
        return self.max_turns or (CALCULATOR_TURNS if self.plays_calculator else OTHER_TURNS)

    @property
    def minibatch_size(self) -> int:
        """Episodes of an optimizer step."""
        return self.rollout_size * self.group_size

    @property
    def largest_step(self) -> "Size":
        """Memory of a step's conversations, or an evaluation's, with answers of the maximum length."""
        from hybrid_engine.serving.sessions import size_of, support_bytes

        num_answers = self.num_turns * max(self.minibatch_size, self.eval_prompts)
        num_tokens = num_answers * (self.max_prompt_tokens + self.max_new_tokens)
        record = support_bytes(self.top_k) if self.has_filters else 0
        return size_of(num_answers, num_tokens, num_answers * (MESSAGES_BYTES + self.max_new_tokens * record))

    @property
    def server_options(self) -> dict[str, Any]:
        """Limits of the server for episodes, which stores all of a step's conversations."""
        from hybrid_engine.serving.sessions import MAX_SESSION_BYTES, MAX_SESSION_TOKENS

        return {
            "memory": self.serving_memory,
            "stall_seconds": self.stall_seconds,
            "max_session_bytes": self.max_session_bytes or max(MAX_SESSION_BYTES, self.largest_step.num_bytes),
            "max_session_tokens": max(MAX_SESSION_TOKENS, self.largest_step.num_tokens),
        }


@dataclass(frozen=True, kw_only=True)
class PPOConfig(PartialOptions, PromptRunOptions):
    """Trains a language model with PPO: the model answers prompts, and updates increase the rewards of its answers.

        hybrid-engine ppo --out runs/docs
        hybrid-engine ppo --model Qwen/Qwen3-0.6B --dataset prompts.jsonl --reward my_rewards:score --out runs/mine

    Missing models are trained first: the actor by `hybrid-engine sft`, the reward model by `hybrid-engine reward`.
    Writes to --out: metrics.jsonl (one line per step), plot.png, samples.json (answers before and after), result.json,
    checkpoints/, best/ (the best weights on held-out prompts) and actor/ (the final weights), both Hugging Face
    folders. --resume continues an interrupted run from its last checkpoint.
    """

    model: str | None = option(
        None,
        "Hugging Face name or folder of the initial actor; default: the run's sft, trained if missing",
    )
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt"; default: the '
        "standard library's signatures",
    )
    minibatch_size: int = option(
        0,
        "Responses per optimizer step, over all processes; 0: the largest divisor of a step's responses, up to 32, "
        "that the processes share equally",
    )
    micro_batch_size: int = 16
    ppo_epochs: int = option(2, "Passes over each rollout")
    temperature: float = 0.8
    actor_lr: float | None = option(
        None,
        "Peak learning rate of the actor; default: 1e-4, with --model 1e-6, for an adapter on it 1e-5",
    )
    critic_lr: float | None = option(None, "Peak learning rate of the critic; default: 5e-4, with --model 1e-5")
    kl_coef: float = option(0.07, "Coefficient of the KL penalty in the reward, per nat")
    gamma: float = option(1.0, "Discount factor of rewards")
    lam: float = option(0.95, "Lambda of generalized advantage estimation (GAE)")
    clip: float = option(0.2, "Clip range of the probability ratio around 1")
    value_clip: float = option(0.5, "Clip range of a value around its value at the rollout")
    missing_eos_penalty: float = option(
        0.0,
        "Penalty subtracted from the reward of a response that was cut off at --max-new-tokens",
    )
    missing_eos_score: float | None = option(
        None,
        "Deprecated, removed in the next version: score of a cut-off response, instead of its reward",
    )
    kl_bound: float = option(
        6.0,
        "Bound on the mean KL to the reference on held-out prompts, in nats per response; the run reports whether it "
        "is exceeded",
    )
    shared_base: bool = option(
        False,
        "Share one frozen base between all roles, each an adapter on it: actor, critic and reward models; needs "
        "--lora-rank",
    )

    def __post_init__(self) -> None:
        PromptRunOptions.__post_init__(self)
        RolloutOptions.__post_init__(self)
        derive_minibatch(self, self.rollout_size, 32)
        check_shared_base(self)
        check_partial(self)
        for name in ("minibatch_size", "ppo_epochs"):
            check_count(name, getattr(self, name), 1)
        for name in ("kl_coef", "kl_bound", "missing_eos_penalty"):
            check_at_least(name, getattr(self, name), 0)
        for name in ("actor_lr", "critic_lr", "clip", "value_clip"):
            check_above(name, getattr(self, name), 0)
        for name in ("gamma", "lam"):
            check_between(name, getattr(self, name), 0, 1)
        if self.missing_eos_score is not None:
            check_finite("missing_eos_score", self.missing_eos_score)
            if self.missing_eos_penalty:
                raise ValueError(
                    f"--missing-eos-score={self.missing_eos_score} replaces the reward from which "
                    f"--missing-eos-penalty={self.missing_eos_penalty} is subtracted; give only the penalty"
                )
        check_divides("rollout_size", self.rollout_size, self.minibatch_size)

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.ppo_epochs * (self.rollout_size // self.minibatch_size)


def check_shared_base(config: PPOConfig) -> None:
    """Raises ValueError for roles on one base without adapters, or in exact mode."""
    if config.shared_base and not config.lora_rank:
        raise ValueError("--shared-base needs adapters on the base; give --lora-rank, such as --lora-rank 8")
    if config.shared_base and config.exact:
        raise ValueError("--exact does not support --shared-base; leave one of them out")
