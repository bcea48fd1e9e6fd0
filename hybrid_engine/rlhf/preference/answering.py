"""The actor's answers to held-out prompts before and after training; a data set of answers has no reward to judge them.

The standard library's summaries have a judge: the rules of PEP 257, which are not trained on.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import get_world_size
from hybrid_engine.rlhf.data.held_out import prompt_text
from hybrid_engine.rlhf.data.rows import LabelledRow, PreferenceRow, PromptRow
from hybrid_engine.rlhf.experience.evaluation import Evaluation, evaluate
from hybrid_engine.rlhf.experience.rollout import SamplingOptions
from hybrid_engine.rlhf.preference.options import PreferenceOptions
from hybrid_engine.rlhf.rewards.answers import Answers
from hybrid_engine.rlhf.rewards.scores import Scores
from hybrid_engine.rlhf.tasks.pep257 import conforms


def prompts_of(rows: Sequence[PreferenceRow | LabelledRow], config: PreferenceOptions) -> list[PromptRow]:
    """The first `eval_prompts` different prompts of held-out rows.

    Raises:
        ValueError: there are fewer than processes.
    """
    prompts = {prompt_text(row.prompt): PromptRow(prompt=row.prompt, place=row.place) for row in reversed(rows)}
    chosen = list(prompts.values())[::-1][: config.eval_prompts]
    if len(chosen) < get_world_size():
        raise ValueError(
            f"--eval-prompts={config.eval_prompts} of {len(prompts)} held-out prompts must reach the number of "
            f"processes, {get_world_size()}; raise it, or give more rows"
        )
    return chosen


def answer_prompts(
    actor: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[PromptRow],
    config: PreferenceOptions,
    is_judged: bool,
) -> Evaluation:
    """One answer to each prompt, judged by PEP 257 or by nothing; the actor is in training mode afterwards. Collective.

    Without a judge the figures have no score.
    """
    judge = judge_by_pep257 if is_judged else None
    found = evaluate(actor, tokenizer, prompts, judge, SamplingOptions.of(config))
    actor.train()
    return found


def judge_by_pep257(answers: Answers) -> Scores:
    """1 for a finished answer that is a summary line by PEP 257, else 0."""
    pairs = zip(answers.responses, answers.is_cut_off, strict=True)
    return Scores(total=[float(not cut and conforms(text)) for text, cut in pairs], by_name={}, per_token=None)
