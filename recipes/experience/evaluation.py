"""The same held-out prompts before and after: how good the answers are, how diverse, how far from the reference."""

import json
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hybrid_engine.distributed.processes import gather_objects, get_rank, get_world_size
from hybrid_engine.recipes.data.sequences import in_parts, response_logprobs
from hybrid_engine.recipes.experience.rollout import Roles, Rollout, SamplingOptions, sample
from hybrid_engine.recipes.runs.run_log import samples_table, say
from hybrid_engine.recipes.tasks.pep257 import conforms
from hybrid_engine.rl.kl import kl_k1

EVALUATION_SEED = 20_257
NUM_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Answers to the held-out prompts and what was measured on them."""

    figures: dict[str, float]
    """Means over the prompts (`judge_pass_rate` only where the judge applies), and how diverse the responses are:
    `distinct_share` of them differ, `top_opening_share` begin with the most frequent first word."""
    prompts: list[str]
    responses: list[str]


def global_means(sums: dict[str, tuple[float, float]]) -> dict[str, float]:
    """From this process's (sum, count) of each figure to the mean over all processes; collective."""
    everyone = gather_objects(sums)
    return {
        name: sum(part[name][0] for part in everyone) / max(sum(part[name][1] for part in everyone), 1e-9)
        for name in sums
    }


def rollout_sums(rollout: Rollout, logprobs_ref: torch.Tensor, is_judged: bool) -> dict[str, tuple[float, float]]:
    """What a rollout says by itself, as (sum, count) for `global_means`; `logprobs_ref` is `[B, T]`.

    KL is the k1 estimate against the reference, in nats.
    """
    mask = rollout.sequences.response_mask
    rows, num_tokens = mask.shape[0], float(mask.sum())
    kl = kl_k1(rollout.logprobs, logprobs_ref).sum().item()
    sums = {
        "score": (rollout.scores.sum().item(), rows),
        "kl_per_sequence": (kl, rows),
        "kl_per_token": (kl, num_tokens),
        "length": (num_tokens, rows),
        "cut_off_share": (sum(rollout.is_cut_off), rows),
        "entropy_estimate": (-rollout.logprobs.sum().item(), num_tokens),
    }
    if is_judged:
        passed = [not cut and conforms(text) for text, cut in zip(rollout.responses, rollout.is_cut_off, strict=True)]
        sums["judge_pass_rate"] = (sum(passed), rows)
    return sums


@torch.no_grad()
def evaluate(roles: Roles, prompts: list[str], options: SamplingOptions, is_judged: bool) -> Evaluation:
    """Answers `prompts`, split over the processes, with one fixed seed; collective."""
    roles.actor.eval()
    mine = prompts[get_rank() :: get_world_size()]
    rollout = sample(roles, mine, options, EVALUATION_SEED)
    logprobs_of = partial(response_logprobs, roles.reference, temperature=options.temperature)
    logprobs_ref = in_parts(logprobs_of, rollout.sequences)
    figures = global_means(rollout_sums(rollout, logprobs_ref, is_judged))
    everyone = gather_objects(list(zip(rollout.prompts, rollout.responses, strict=True)))
    answered = dict(pair for part in everyone for pair in part)
    responses = [answered[prompt] for prompt in prompts]
    figures["distinct_share"] = len(set(responses)) / len(responses)
    openings = Counter(response.split(" ")[0] for response in responses)
    figures["top_opening_share"] = openings.most_common(1)[0][1] / len(responses)
    return Evaluation(figures=figures, prompts=prompts, responses=responses)


def show_comparison(before: Evaluation, after: Evaluation, kl_bound: float, folder: Path) -> None:
    """Prints the answers and figures of both and writes all answers to `samples.json`."""
    shown = {"prompt": before.prompts, "before": before.responses, "after": after.responses}
    say(
        samples_table(
            "Held-out prompts", {name: [text.strip() for text in texts[:NUM_SHOWN]] for name, texts in shown.items()}
        )
    )
    names = list(before.figures)
    columns = {"figure": names} | {
        heading: [f"{evaluation.figures[name]:.3f}" for name in names]
        for heading, evaluation in (("before", before), ("after", after))
    }
    say(samples_table(f"{len(before.prompts)} held-out prompts", columns))
    kl = after.figures["kl_per_sequence"]
    say(f"KL to the reference: {kl:.2f} nats per response, {'under' if kl < kl_bound else 'OVER'} the bound {kl_bound}")
    if get_rank() == 0:
        rows = [dict(zip(shown, row, strict=True)) for row in zip(*shown.values(), strict=True)]
        (folder / "samples.json").write_text(json.dumps(rows, indent=1) + "\n")
