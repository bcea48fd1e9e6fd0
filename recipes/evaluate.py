"""Evaluates a model: answers each prompt of a dataset k times and scores the answers with the recipes' rewards.

    hybrid-engine evaluate --model runs/docs/actor --dataset problems.jsonl --reward number -k 8

The engine's own rollouts sample the answers (`experience/evaluation.py`, as in training), without an optimizer.

Writes to `--out`: config.yaml, result.json (metrics with confidence intervals) and samples.jsonl (all answers and
scores).
"""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.distributed.processes import get_rank, get_world_size, on_rank_zero
from hybrid_engine.rlhf.data.parts import read_once
from hybrid_engine.rlhf.data.prompts import fit_prompts, load_prompt_rows, settle_lengths
from hybrid_engine.rlhf.data.reading import read_prompt_rows
from hybrid_engine.rlhf.data.rows import PromptRow, told_together
from hybrid_engine.rlhf.experience.answering import build_answering
from hybrid_engine.rlhf.experience.evaluation import Evaluation, PassRule, evaluate, prompt_shown
from hybrid_engine.rlhf.experience.rollout import AnswerSampling
from hybrid_engine.rlhf.experience.start import keep_usable
from hybrid_engine.rlhf.options.answering import EvaluateConfig as Config
from hybrid_engine.rlhf.rewards.learned import LearnedReward
from hybrid_engine.rlhf.rewards.loading import load_rewards
from hybrid_engine.rlhf.rewards.rewards import Rewards
from hybrid_engine.rlhf.runs.engine_config import torch_dtype
from hybrid_engine.rlhf.runs.run_checks import check_positions
from hybrid_engine.rlhf.runs.run_folder import CONFIG, check_out, left_behind, write_config
from hybrid_engine.rlhf.runs.run_log import samples_table, say, write_json
from hybrid_engine.rlhf.runs.stages import load_config, load_model, load_tokenizer, move_aside, num_positions

RESULTS = ("result.json", "samples.jsonl", CONFIG)
NUM_SHOWN = 6
LONGEST_MEASURED_ANSWER = 4096
"""Tokens of an answer, if `--max-new-tokens` is not given and the model has positions for more."""


def run(config: Config) -> Path:
    """Answers, scores and writes the results; returns their folder. Collective."""
    hybrid_engine.init_distributed()
    on_rank_zero(lambda: check_folder(config))
    rewards = load_rewards(
        config.reward,
        config.reward_weights or None,
        config.reward_time_limit,
        partial(LearnedReward.load, most_rows=config.rows_per_pass, dtype=torch_dtype(config.dtype)),
    )
    tokenizer = load_tokenizer(str(config.model))
    config, rows = load_rows(config, tokenizer, rewards)
    rows = fit_prompts(rows, tokenizer, config.max_prompt_tokens, skips=config.skip_too_long)
    model = load_model(AutoModelForCausalLM, str(config.model))
    engine = build_answering(model, config, max_running=config.max_running)
    say(engine.report())

    num_samples = config.num_samples or config.pass_k
    evaluation = evaluate(
        engine,
        tokenizer,
        rows,
        rewards,
        AnswerSampling(
            max_prompt_tokens=config.max_prompt_tokens,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            num_samples=num_samples,
        ),
        passes=PassRule(threshold=config.threshold, ks=sorted({1, config.pass_k})),
        seed=config.seed,
        has_bar=True,
    )
    out = Path(config.out)
    if config.restart:
        move_aside(out, RESULTS)
    write_results(out, config, evaluation)
    show(evaluation, num_samples)
    return out


def check_folder(config: Config) -> None:
    """Raises ValueError if the folder cannot be written, or holds an earlier evaluation; for one process."""
    found = left_behind(check_out(config.out), RESULTS)
    if found and not config.restart:
        raise ValueError(
            f"--out={config.out!r} contains an earlier evaluation ({', '.join(found)}): --restart moves it aside, "
            "another --out keeps it"
        )


@told_together()
def load_rows(config: Config, tokenizer: PreTrainedTokenizerBase, rewards: Rewards) -> tuple[Config, list[PromptRow]]:
    """The prompts to answer, with their other columns; and the options with lengths that fit them.

    Raises:
        ValueError: there are too few, a reward lacks a column or cannot read a row, or the model has too few positions.
    """
    if config.held_out:
        rows = load_prompt_rows(config.source, rewards.task_columns)[1]
    else:
        rows = read_once(config.source, read_prompt_rows, rewards.task_columns)
    rows = rows[: config.max_prompts]
    rewards.check_columns(rows)
    rows, lengths = keep_usable(config, rows, tokenizer, rewards)
    if len(rows) < get_world_size():
        raise ValueError(
            f"{config.source.shown}: {len(rows)} prompts are fewer than the {get_world_size()} processes; give more "
            "prompts, or start fewer processes"
        )
    config = settle_lengths(config, lengths, most=LONGEST_MEASURED_ANSWER)
    positions = num_positions(load_config(str(config.model)))
    check_positions(config, max(lengths), f"--model={config.model!r}", positions)
    return config, rows


def write_results(folder: Path, config: Config, evaluation: Evaluation) -> None:
    """Writes `result.json` (the figures), `samples.jsonl` (per prompt its answers and scores) and the options."""
    if get_rank() != 0:
        return
    write_config(folder, config)
    with (folder / "samples.jsonl").open("w") as file:
        for group in evaluation.groups:
            line = asdict(group) | {"lengths": [len(tokens) for tokens in group.response_ids]}
            del line["prompt_ids"], line["response_ids"]
            if not group.extra:
                del line["extra"]
            file.write(json.dumps(line, default=str) + "\n")
    write_json(folder / "result.json", {"figures": evaluation.figures, "num_prompts": len(evaluation.groups)})


def shown_score(score: float | None) -> str:
    """A score for a table cell; empty for an answer that no reward judged."""
    return "" if score is None else f"{score:.3g}"


def show(evaluation: Evaluation, num_samples: int) -> None:
    """Prints some answers and the figures."""
    groups = evaluation.groups[:NUM_SHOWN]
    answers = {
        "prompt": [prompt_shown(group.prompt).strip() for group in groups],
        "answer": [group.responses[0].strip() for group in groups],
        "score": [shown_score(group.scores[0]) for group in groups],
    }
    say(samples_table(f"The first of {num_samples} answers", answers))
    figures = evaluation.figures
    names = [name for name in figures if not name.endswith(("_low", "_high"))]
    intervals = [
        f"{figures[name + '_low']:.3f} to {figures[name + '_high']:.3f}" if name + "_low" in figures else ""
        for name in names
    ]
    columns = {"figure": names, "mean": [f"{figures[name]:.3f}" for name in names], "95% interval": intervals}
    say(samples_table(f"{len(evaluation.groups)} prompts, {num_samples} answers to each", columns))
