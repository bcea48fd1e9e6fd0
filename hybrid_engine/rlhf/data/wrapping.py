"""Wrapping of a data set's prompts by options: a template, a system's turn, the form of a conversation."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hybrid_engine.rlhf.data.bad_rows import each_good
from hybrid_engine.rlhf.data.columns import fill_template
from hybrid_engine.rlhf.data.data_files import Table
from hybrid_engine.rlhf.data.held_out import SYSTEM_ROLES, R
from hybrid_engine.rlhf.data.rows import ConversationRow, Message, PreferenceRow, PromptRow, TextRow, Turns
from hybrid_engine.rlhf.data.sources import DataSource


def write_prompts(table: Table, source: DataSource) -> Table:
    """The table with the column `prompt` written by `--prompt-template`, if that names other columns alone."""
    template = source.prompt_template
    if template is None or source.wraps_prompts:
        return table
    return table.changed(lambda row: row | {"prompt": fill_template(template, row)})


def wrap_rows(rows: Sequence[R], source: DataSource) -> list[R]:
    """The rows with what the options put around their prompts.

    Raises:
        ValueError: a row is plain text, which has no prompt, or the template names what a row does not have.
    """
    if source == source.as_found:
        return list(rows)
    return each_good(rows, partial(wrap_row, source), source.shown, skips=source.skips_bad_rows)[1]


def wrap_row(source: DataSource, row: R) -> R:
    """The row with what the options put around its prompt; ValueError as of `wrap_rows`."""
    if isinstance(row, TextRow):
        raise ValueError(
            f"{row.place} is plain text, around which --prompt-template, --system-prompt and --as-conversation put "
            "nothing; leave them out, or give the data set a prompt and a completion (--columns)"
        )
    if isinstance(row, ConversationRow):
        last = max(index for index, turn in enumerate(row.messages) if turn["role"] == "assistant")
        prompt = _wrapped(source, row, row.messages[:last])
        return replace(row, messages=[*prompt, *row.messages[last:]])
    prompt = _wrapped(source, row, row.prompt)
    if isinstance(row, PromptRow) or isinstance(row.prompt, str) == isinstance(prompt, str):
        return replace(row, prompt=prompt)
    if isinstance(row, PreferenceRow):
        return replace(row, prompt=prompt, chosen=_answer(row.chosen), rejected=_answer(row.rejected))
    return replace(row, prompt=prompt, completion=_answer(row.completion))


def _wrapped(source: DataSource, row: Any, prompt: Any) -> Any:
    if source.prompt_template is not None and source.wraps_prompts:
        prompt = _filled(source.prompt_template, row, prompt)
    if isinstance(prompt, str):
        if not source.is_conversation and source.system_prompt is None:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if source.system_prompt is None or (prompt and prompt[0]["role"] in SYSTEM_ROLES):
        return prompt
    return [{"role": "system", "content": source.system_prompt}, *prompt]


def _filled(template: str, row: Any, prompt: Turns) -> Turns:
    """The template around a text, or around the last of the user's turns."""
    if isinstance(prompt, str):
        return _text(template, row, prompt)
    asked = [index for index, turn in enumerate(prompt) if turn["role"] == "user"]
    if not asked or not isinstance(prompt[asked[-1]].get("content"), str):
        raise ValueError(f"{row.place} has no text of the user's for --prompt-template to stand around; fix the row")
    last = asked[-1]
    turn: Message = {**prompt[last], "content": _text(template, row, prompt[last]["content"])}
    return [*prompt[:last], turn, *prompt[last + 1 :]]


def _text(template: str, row: Any, prompt: str) -> str:
    try:
        return fill_template(template, {**row.columns, "prompt": prompt})
    except ValueError as error:
        raise ValueError(f"{row.place} {error}") from error


def _answer(text: Turns) -> Turns:
    return [{"role": "assistant", "content": text}] if isinstance(text, str) else text
