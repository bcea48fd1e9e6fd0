"""The start of a run of episodes: its environments, tasks, rewards and lengths, all checked before anything is trained.

`recipes/agent.py` and the memory plan call `prepare_episodes`. A task is a row of the data set, whose columns the
environment's `reset` gets by name; without a data set it is a seed. Held-out tasks are those of held-out rows, or seeds
that a hash holds out.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybrid_engine.rlhf.data.parts import is_held_out, load_parts
from hybrid_engine.rlhf.data.prompts import LONGEST_ANSWER, PromptTokens, Room, select_prompts
from hybrid_engine.rlhf.data.reading import NO_PROMPT, read_task_rows
from hybrid_engine.rlhf.data.rows import Message, PromptRow
from hybrid_engine.rlhf.environments.contract import Environment, with_observation
from hybrid_engine.rlhf.environments.harness import (
    FOLDERS,
    HARNESS,
    OUTPUTS,
    TRAJECTORIES,
    Harnesses,
    NoEnvironment,
    check_harness,
    tests_reward,
)
from hybrid_engine.rlhf.environments.loading import load_kinds
from hybrid_engine.rlhf.environments.playing import Hung, Kind, Limits, Loop, Playground, Task
from hybrid_engine.rlhf.options.reinforcement import AgentConfig
from hybrid_engine.rlhf.options.shared import DatasetOptions
from hybrid_engine.rlhf.rewards.loading import load_rewards, would_get
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.rewards.scores import Answers, Judge, Reward
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.rlhf.tasks.calculator import Problem, held_out_problems, problems, written
from hybrid_engine.serving.parsers import AUTO, NONE, choose_parser

OWN_REWARD, OBJECTS = "environment_reward", "environments"
"""Columns of scored episodes: the environment's own reward with its name, and the environment itself."""
OF_EPISODES = (OBJECTS, FOLDERS, OUTPUTS, TRAJECTORIES)
"""Columns that rewards get of episodes and not of the data."""
COLUMN = "environment"
"""The column of the data that names the environment, if there are several."""
LARGEST_SEED = 2**31
NUM_PROBED = 4
"""Number of tasks that are begun at the start, to measure how long they are."""
REPLY_TOKENS = 256
"""Tokens of what comes back after an answer, for environments that do not say how long it can be."""


class Tasks(NamedTuple):
    """The tasks of a run."""

    train: Callable[[int], Iterator[Task]]
    """An endless series of tasks to train on, from one on, counted from 0."""
    held_out: list[Task]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that a run of episodes begins with, besides the policy."""

    config: AgentConfig
    """With lengths that fit."""
    playground: "Playground | Harnesses"
    tasks: Tasks
    rewards: Rewards
    holds_environments: bool
    """Whether a reward looks at the environments of all episodes of a step."""
    answered: PromptTokens
    """Tokens of the first messages."""


def prepare_episodes(
    config: AgentConfig, tokenizer: PreTrainedTokenizerBase, load_model: Callable[[str], Judge]
) -> Prepared:
    """The environments, tasks, rewards and lengths of a run.

    Each environment is built once, and a few tasks are begun with it, so that what is wrong is told now.

    Args:
        config: of the recipe.
        tokenizer: of the policy.
        load_model: builds a reward model's judge from its folder or hub name.

    Raises:
        ValueError: an option, an environment, the data or a reward is wrong, or the policy cannot use the tools; it
            names the option and the remedy.
    """
    if config.harness is not None:
        return prepare_harness(config, tokenizer, load_model)
    loop = Loop()
    kinds = load_kinds(config, loop.wait)
    limits = Limits(config.num_turns, config.max_episode_seconds, config.reward_time_limit)
    playground = Playground(kinds, limits, config.num_clients, loop)
    try:
        built = {kind.name: build_once(playground, kind) for kind in kinds}
        rewards = Rewards(rewards=(), time_limit_seconds=config.reward_time_limit)
        if config.reward:
            weights = config.reward_weights or None
            rewards = load_rewards(config.reward, weights, config.reward_time_limit, load_model)
        rewards = with_own_rewards(rewards, kinds, built)
        tasks = load_tasks(config, rewards, built)
        openings = begin_some(playground, tasks.held_out)
        if not config.dataset and not config.plays_calculator:
            check_repeats(playground, *openings[0])
        config, shortest = with_lengths(config, tokenizer, built, openings)
    except BaseException:
        playground.close()
        raise
    return Prepared(
        config=config,
        playground=playground,
        tasks=tasks,
        rewards=rewards,
        holds_environments=any(would_get(spec, OBJECTS) for spec in config.reward),
        answered=PromptTokens(shortest, config.max_prompt_tokens),
    )


def prepare_harness(
    config: AgentConfig, tokenizer: PreTrainedTokenizerBase, load_model: Callable[[str], Judge]
) -> Prepared:
    """The tasks, rewards and lengths of a run in which a command plays; see `prepare_episodes`."""
    check_harness(config)
    rewards = Rewards(rewards=(), time_limit_seconds=config.reward_time_limit)
    if config.reward:
        rewards = load_rewards(config.reward, config.reward_weights or None, config.reward_time_limit, load_model)
    if config.harness_tests is not None:
        rewards = replace(rewards, rewards=(*rewards.rewards, tests_reward(config.harness_tests)))
    built: dict[str, Environment] = {HARNESS: NoEnvironment()}  # type: ignore[dict-item]
    tasks = load_tasks(config, rewards, built)
    openings = [(task, task.messages) for task in tasks.held_out[:NUM_PROBED]]
    config, shortest = with_lengths(config, tokenizer, built, openings)
    limits = Limits(config.num_turns, config.max_episode_seconds, config.reward_time_limit)
    return Prepared(
        config=config,
        playground=Harnesses(str(config.harness), config.harness_env, limits, config.num_clients),
        tasks=tasks,
        rewards=rewards,
        holds_environments=True,
        answered=PromptTokens(shortest, config.max_prompt_tokens),
    )


def with_lengths(
    config: AgentConfig,
    tokenizer: PreTrainedTokenizerBase,
    built: Mapping[str, Environment],
    openings: Sequence[tuple[Task, list[Message]]],
) -> tuple[AgentConfig, int]:
    """The options with lengths that fit every environment, and the tokens of the shortest first messages."""
    longest: dict[str, list[Message]] = {}
    lengths: dict[str, list[int]] = {}
    for name, environment in built.items():
        check_template(config, tokenizer, environment)
        begun = [messages for task, messages in openings if task.environment == name] or [list(NO_PROMPT)]
        lengths[name] = [num_tokens(config, tokenizer, environment, messages) for messages in begun]
        longest[name] = max(begun, key=lambda messages: len(str(messages)))
    for name in sorted(built, key=lambda name: -max(lengths[name])):  # the first one settles them
        config = settle_conversations(config, tokenizer, built[name], longest[name])
    return config, min(map(min, lengths.values()))


def build_once(playground: Playground, kind: Kind) -> Environment:
    """An environment of a kind, whose instance then waits for an episode; ValueError if it cannot be built."""
    instance = playground.take(kind.name)
    try:
        environment = instance.build(playground.limits.seconds)
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and str(error).startswith("--"):
            raise  # of the contract
        raise ValueError(
            f"--environment={kind.spec!r} cannot be built: {type(error).__name__}: {error}; fix it"
        ) from error
    playground.give_back(instance)
    return environment


def begin_some(playground: Playground, tasks: Sequence[Task]) -> list[tuple[Task, list[Message]]]:
    """The first messages of some tasks, without those that fail; ValueError if one hangs or all fail."""
    openings: list[tuple[Task, list[Message]]] = []
    failed: ValueError | None = None
    for task in tasks[:NUM_PROBED]:
        try:
            openings.append((task, begin(playground, task)))
        except ValueError as error:
            failed = error
            if isinstance(error.__cause__, Hung):
                break
    if failed is not None and (not openings or isinstance(failed.__cause__, Hung)):
        raise failed
    return openings


def begin(playground: Playground, task: Task) -> list[Message]:
    """The first messages of a task; ValueError if its environment does not begin it."""
    instance = playground.take(task.environment)
    seconds = playground.limits.seconds
    try:
        environment = instance.build(seconds)
        messages = with_observation(task.messages, instance.call(lambda: environment.reset(task.arguments), seconds))
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--environment={instance.kind.spec!r}: reset() of a first task raised {type(error).__name__}: {error}; "
            "fix it"
        ) from error
    playground.give_back(instance)
    return messages


def check_repeats(playground: Playground, task: Task, opening: Sequence[Message]) -> None:
    """Logs a warning if an environment that makes its tasks begins one seed in two ways."""
    if begin(playground, task) != opening:
        say(
            f"--environment={task.environment!r}: two resets with one seed begin two different tasks, so that a group "
            "compares answers to different tasks; let reset(seed=...) decide the task"
        )


def with_own_rewards(given: Rewards, kinds: Sequence[Kind], built: Mapping[str, Environment]) -> Rewards:
    """The rewards, and one for each class of environments that has its own, under the class's name with weight 1.

    Raises:
        ValueError: an environment has no reward, and there is no other.
    """
    for kind in kinds:
        if not given.rewards and built[kind.name].reward_name is None:
            raise ValueError(
                f"--environment={kind.spec!r} has no get_reward(), and there is no --reward, so that nothing says how "
                "good an episode is; add one of them"
            )
    names = dict.fromkeys(name for kind in kinds if (name := built[kind.name].reward_name) is not None)
    for reward in given.rewards:
        if reward.name in names:
            raise ValueError(
                f"--reward={reward.spec!r} has the name of an environment's own reward; rename one of them"
            )
    own = (Reward(spec=f"{name}.get_reward", name=name, weight=1.0, judge=_judge_of(name)) for name in names)
    return replace(given, rewards=(*given.rewards, *own))


def _judge_of(name: str) -> Judge:
    def judge(answers: Answers) -> list[float | None]:
        return [reward if of == name else None for of, reward in answers.columns[OWN_REWARD]]

    return judge


def load_tasks(config: AgentConfig, rewards: Rewards, built: Mapping[str, Environment]) -> Tasks:
    """The tasks of a run; see `prepare_episodes`."""
    if config.plays_calculator:
        return own_problems(config, built)
    if not config.dataset:
        return tasks_of_seeds(config, built)
    rows = read_task_rows(config.source)
    is_by_prompt = config.harness is None and all(row.prompt != NO_PROMPT for row in rows)
    columns = rewards.task_columns - {*OF_EPISODES} if is_by_prompt else {name for row in rows for name in row.columns}
    train, held_out_rows = load_parts(config.source, read_task_rows, columns)
    seen = [replace(row, columns={**row.columns, **dict.fromkeys(OF_EPISODES)}) for row in [*train, *held_out_rows]]
    rewards.check_columns(seen)
    for row in seen:
        rewards.check_row(row)
    tasks = [_task_of_row(row, built) for row in train]
    return Tasks(
        lambda first: (tasks[index] for index in endless(len(tasks), first, config.seed)),
        [_task_of_row(row, built) for row in (held_out_rows or train)[: config.eval_prompts]],
    )


def own_problems(config: AgentConfig, built: Mapping[str, Environment]) -> Tasks:
    """The calculator's problems."""
    (environment,) = built

    def made(problem: Problem) -> Task:
        return _task(environment, built, NO_PROMPT, asdict(problem) | {"answer": written(problem.answer)})

    return Tasks(
        lambda first: map(made, itertools.islice(problems(False, config.seed), first, None)),
        [made(problem) for problem in held_out_problems()[: config.eval_prompts]],
    )


def tasks_of_seeds(config: AgentConfig, built: Mapping[str, Environment]) -> Tasks:
    """Tasks that the environment makes from seeds; ValueError if there are several environments."""
    if len(built) > 1:
        raise ValueError(
            f"--environment names {len(built)} environments, and the data's column {COLUMN!r} says which one plays a "
            "task; give --dataset"
        )
    (environment,) = built

    def made(seed: int) -> Task:
        return _task(environment, built, NO_PROMPT, {"prompt": NO_PROMPT, "seed": seed})

    share = config.held_out_share or DatasetOptions.held_out_share
    return Tasks(
        lambda first: map(made, itertools.islice(seeds(False, config.seed, share), first, None)),
        [made(seed) for seed in itertools.islice(seeds(True, 0, share), config.eval_prompts)],
    )


def endless(num_tasks: int, first: int, seed: int) -> Iterator[int]:
    """The indices of an endless series of reshuffled passes, from its entry `first` on."""
    while True:
        yield from select_prompts(num_tasks, first, num_tasks, seed)
        first += num_tasks


def seeds(is_held_out_kind: bool, seed: int, share: float) -> Iterator[int]:
    """An endless series of different seeds; which of them are held out does not depend on the seed of the series."""
    generator, seen = random.Random(seed), set[int]()
    while True:
        number = generator.randrange(LARGEST_SEED)
        if number not in seen and is_held_out(str(number), share) == is_held_out_kind:
            seen.add(number)
            yield number


def _task_of_row(row: PromptRow, built: Mapping[str, Environment]) -> Task:
    name, columns = next(iter(built)), dict(row.columns)
    if len(built) > 1:
        name = columns.pop(COLUMN, "")
        if name not in built:
            raise ValueError(
                f"{row.place} has {COLUMN}={name!r}; it must be one of {', '.join(map(repr, built))}: fix it, or name "
                "the environment so: --environment NAME=SPEC"
            )
    prompt = {} if row.prompt == NO_PROMPT else {"prompt": row.prompt}
    return _task(name, built, row.prompt, prompt | columns)


def _task(name: str, built: Mapping[str, Environment], prompt: Any, arguments: dict[str, Any]) -> Task:
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    try:
        chosen = built[name].accepted(arguments, optional=("prompt",))
    except ValueError as error:
        raise ValueError(f"--environment: {name}: {error}") from error
    return Task(name, messages, chosen, {key: value for key, value in arguments.items() if key != "prompt"})


def num_tokens(
    config: AgentConfig, tokenizer: PreTrainedTokenizerBase, environment: Environment, messages: Sequence[Message]
) -> int:
    """Tokens of a conversation up to the policy's next answer; ValueError if the chat template refuses it."""
    try:
        return len(
            tokenizer.apply_chat_template(
                list(messages), tools=list(environment.tools) or None, add_generation_prompt=True, return_dict=False
            )
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--model={config.model}: its chat template refuses a conversation of user, assistant and "
            f"{environment.reply_role}: {' '.join(str(error).split())}; use a model that is trained for tool calls"
        ) from error


def settle_conversations(
    config: AgentConfig, tokenizer: PreTrainedTokenizerBase, environment: Environment, first: Sequence[Message]
) -> AgentConfig:
    """The options, with lengths of 0 replaced by those of the model and of long conversations, which is logged.

    Args:
        config: of the recipe.
        tokenizer: of the policy.
        environment: one that is played with.
        first: the first messages of a task.

    Raises:
        ValueError: the tokenizer has no chat template, one that refuses the roles of an episode, or none that shows how
            to call tools; --max-prompt-tokens is too small for the first messages, or, where replies have a known
            length, for the turns before the last answer.
    """
    turns, reply = config.num_turns, environment.longest_reply
    messages = list(first)
    for _ in range(turns - 1):
        messages += one_turn(environment)
    said, opening = (num_tokens(config, tokenizer, environment, part) for part in (messages, first))
    config = _settle_lengths(config, opening, said + (0 if reply is not None else (turns - 1) * REPLY_TOKENS), reply)
    longest = said + (turns - 1) * config.max_new_tokens if reply is not None else opening
    if longest > config.max_prompt_tokens:
        what = f"come before the last of {turns} answers of --max-new-tokens={config.max_new_tokens}"
        raise ValueError(
            f"--max-prompt-tokens={config.max_prompt_tokens} must be at least {longest}: so many can "
            f"{what if reply is not None else 'come before the first answer'}; raise the one or lower the other"
        )
    return config


def check_template(config: AgentConfig, tokenizer: PreTrainedTokenizerBase, environment: Environment) -> None:
    """Raises ValueError for a tokenizer without a chat template, or one without calls where there are tools."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"--model={config.model}: its tokenizer has no chat template to render conversations; use a "
            "model with one (their names often end in Instruct or Chat), or set tokenizer.chat_template and save it"
        )
    if environment.tools and choose_parser(AUTO, tokenizer) == NONE:
        names = ", ".join(tool["function"]["name"] for tool in environment.tools)
        raise ValueError(
            f"--model={config.model}: its chat template shows no known form of tool calls, and the environment has the "
            f"tools {names}; use a model that is trained for tool calls, or play the environment as a text game"
        )


def one_turn(environment: Environment) -> list[Message]:
    """An empty answer and the reply to it."""
    reply: Message = {"role": environment.reply_role, "content": environment.longest_reply or ""}
    if not environment.tools:
        return [{"role": "assistant", "content": ""}, reply]
    name = environment.tools[0]["function"]["name"]
    call: Message = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": {}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        reply | {"name": name, "tool_call_id": "call_1"},
    ]


def _settle_lengths(config: AgentConfig, opening: int, others: int, reply: str | None) -> AgentConfig:
    """`settle_conversations` for a conversation with `others` tokens that are not the policy's, at most."""
    if config.max_prompt_tokens and config.max_new_tokens:
        return config
    room, turns = Room.of(config), config.num_turns
    if reply is not None:
        num_new = config.max_new_tokens or max(1, min(LONGEST_ANSWER, (room.total - others) // turns))
        num_prompt = config.max_prompt_tokens or others + (turns - 1) * num_new
    else:
        num_new = config.max_new_tokens or max(1, min(LONGEST_ANSWER, (room.total - opening) // 4))
        num_prompt = config.max_prompt_tokens or min(room.total - num_new, others + (turns - 1) * num_new)
    say(
        f"up to {num_prompt} tokens before the last of {turns} answers, each of up to {num_new}: {room.reason}; "
        "--max-prompt-tokens and --max-new-tokens change it"
    )
    return replace(config, max_prompt_tokens=num_prompt, max_new_tokens=num_new)
