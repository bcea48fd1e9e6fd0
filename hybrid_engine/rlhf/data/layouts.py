"""Public datasets in their own layouts: each layout is recognized by its columns and converted to those of `rows.py`.

A layout adds columns and keeps the existing ones, so that rewards can read them. It applies only if the columns that a
recipe needs are missing; verl's also applies otherwise, for the reference answer.
"""

import json
import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybrid_engine.rlhf.data.data_files import Table
from hybrid_engine.rlhf.data.rows import Message
from hybrid_engine.rlhf.options.columns import MISSING, find_value
from hybrid_engine.rlhf.runs.run_log import say
from hybrid_engine.serving.tool_calls import for_template

AnyRow = dict[str, Any]
ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function", "ipython"), "tool"),
    "system": "system",
    "developer": "developer",
}
"""Roles, by the names that conversations use."""
COMPARISON = frozenset({"chosen", "rejected"})
"""Columns that a layout must provide itself where they are needed: existing ones may include a row's other columns."""


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The format of a family of datasets."""

    name: str
    needed: frozenset[str]
    """The columns by which it is recognized."""
    gives: frozenset[str]
    """The columns of ours that it provides."""
    convert: Callable[[AnyRow], AnyRow]
    """The columns that it provides for a row; ValueError, with a message that follows the row's place, for other
    formats.
    """
    is_added: bool = False
    """Whether it also applies where nothing is missing."""


def as_ours(table: Table, *needs: frozenset[str]) -> Table:
    """The table with the columns of one of `needs` if its layout is known; otherwise unchanged."""
    columns = frozenset(table.columns)
    is_complete = any(need <= columns for need in needs)
    for layout in LAYOUTS:
        is_able = any(need <= columns | layout.gives and need & COMPARISON <= layout.gives for need in needs)
        is_wanted = not layout.gives <= columns if layout.is_added else not is_complete
        if layout.needed <= columns and is_able and is_wanted:
            say(f"{table.source} is read in the layout of {layout.name}")
            return table.changed(partial(_with, layout))
    return table


def _with(layout: RowLayout, row: AnyRow) -> AnyRow:
    return row | layout.convert(row)


def _alias(**names: str) -> Callable[[AnyRow], AnyRow]:
    """Maps their columns to ours."""
    return lambda row: {ours: row.get(theirs) for ours, theirs in names.items()}


def _filled(value: Any) -> bool:
    return value is not None and value != "" and value != []


def _behind_system(system: Any, question: Any, history: Sequence[Any] = ()) -> Any:
    """A prompt: text, or a conversation if there is a system turn or earlier turns."""
    if not _filled(system) and not history:
        return question
    turns = [{"role": "system", "content": system}] if _filled(system) else []
    for asked, answered in history:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return [*turns, {"role": "user", "content": question}]


def _like(prompt: Any, answer: Any) -> Any:
    """An answer as text or as a conversation, as the prompt is."""
    return answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]


def _question(answer: str, question: str, *more: str, system: str = "") -> Callable[[AnyRow], AnyRow]:
    """Converts a question, possibly in several columns, and its answer."""

    def convert(row: AnyRow) -> AnyRow:
        parts = [row.get(name) for name in (question, *more)]
        asked = "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())
        history = row.get("history") or [] if system else []
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise ValueError(f"has history={history!r}; it must be a list of [question, answer] pairs")
        prompt = _behind_system(row.get(system), asked, history)
        return {"prompt": prompt, "completion": _like(prompt, row.get(answer))}

    return convert


def _problem(row: AnyRow) -> AnyRow:
    solution = row.get("solution") if _filled(row.get("solution")) else row.get("answer")
    answer = row.get("answer") if _filled(row.get("answer")) else solution
    return {"prompt": row.get("problem"), "completion": solution, "answer": answer}


def _conversations(row: AnyRow) -> AnyRow:
    turns = _turns_of("conversations", row.get("conversations"))
    if _filled(row.get("system")) and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": row["system"]}, *turns]
    return _from_messages(turns) | _tools_of(row.get("tools"))


def _compared_conversations(row: AnyRow) -> AnyRow:
    found = _conversations(row)
    chosen, rejected = (_turns_of(name, _as_list(row.get(name))) for name in ("chosen", "rejected"))
    return found | {"prompt": found["messages"], "chosen": chosen, "rejected": rejected}


def _openai(row: AnyRow) -> AnyRow:
    messages = row.get("messages")
    return _from_messages(messages if isinstance(messages, list) else [])


def _compared_question(row: AnyRow) -> AnyRow:
    prompt = _behind_system(row.get("system"), row.get("question"))
    return {"prompt": prompt, **{name: _like(prompt, row.get(name)) for name in ("chosen", "rejected")}}


def _openai_preferences(row: AnyRow) -> AnyRow:
    asked = row["input"] if isinstance(row.get("input"), dict) else {}
    return {
        "prompt": asked.get("messages"),
        "chosen": row.get("preferred_output"),
        "rejected": row.get("non_preferred_output"),
        **_tools_of(asked.get("tools")),
    }


def _from_messages(messages: list[Any]) -> AnyRow:
    """A conversation, its prompt (all turns before the last answer) and that answer."""
    is_answered = bool(messages) and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"
    last = len(messages) - is_answered
    return {"messages": messages, "prompt": messages[:last], "completion": messages[last:]}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _turns_of(name: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"has {name}={value!r}; it must be a non-empty list of turns")
    return [_turn(f"{name}[{index}]", turn) for index, turn in enumerate(value)]


def _turn(name: str, turn: Any) -> Message:
    """Converts a turn of ShareGPT, `{"from": "human", "value": "..."}`; a turn of OpenAI's stays as it is."""
    if isinstance(turn, dict) and _filled(turn.get("role")):
        return turn
    is_turn = isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("from", "value"))
    if not is_turn or not turn["from"]:
        raise ValueError(f'has {name}={turn!r}; a turn must be like {{"from": "human", "value": "..."}}')
    if turn["from"] == "function_call":
        return {"role": "assistant", "tool_calls": _calls(name, turn["value"])}
    if turn["from"] not in ROLES:
        raise ValueError(f"has {name}['from']={turn['from']!r}; it must be one of {', '.join(ROLES)}, function_call")
    return {"role": ROLES[turn["from"]], "content": turn["value"]}


def _calls(name: str, text: str) -> list[AnyRow]:
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has {name}={reprlib.repr(text)}; a function_call must be JSON: {error}") from error
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def _tools_of(value: Any) -> AnyRow:
    """The column `tools`, with functions wrapped in the objects that templates expect."""
    tools = read_tools(value)
    bare = [isinstance(tool, dict) and "name" in tool and "function" not in tool for tool in tools]
    wrapped = [{"type": "function", "function": tool} if one else tool for tool, one in zip(tools, bare, strict=True)]
    return {"tools": wrapped} if wrapped else {}


def _rated(row: AnyRow) -> AnyRow:
    """UltraFeedback's answers of several models: the best rated and the worst."""
    answers = row.get("completions") or []
    if not isinstance(answers, list):
        raise ValueError(f"has completions={reprlib.repr(answers)}; it must be a list of objects, one per answer")
    rated = [answer for answer in answers if isinstance(answer, dict) and _is_number(answer.get("overall_score"))]
    ordered = sorted(rated, key=lambda answer: -answer["overall_score"])  # equal scores keep their order
    if not ordered or ordered[0]["overall_score"] == ordered[-1]["overall_score"]:
        raise ValueError("has no two completions with different overall_score values; remove it")
    best, worst = ordered[0].get("response"), ordered[-1].get("response")
    return {"prompt": row.get("instruction"), "completion": best, "chosen": best, "rejected": worst}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _verl(row: AnyRow) -> AnyRow:
    truth, shown = find_value(row, "reward_model.ground_truth"), find_value(row, "extra_info.answer")
    answer = {} if truth in (None, MISSING) or _filled(row.get("answer")) else {"answer": truth}
    has_answer = isinstance(shown, str) and not _filled(row.get("completion"))
    return answer | ({"completion": _like(row.get("prompt"), shown)} if has_answer else {})


def _columns(*names: str) -> frozenset[str]:
    return frozenset(names)


ANSWERED = _columns("prompt", "completion")


COMPARED = _columns("prompt", "chosen", "rejected")


CONVERSED = _columns("messages", "prompt", "completion")


LAYOUTS = (
    RowLayout(
        name="verl",
        needed=_columns("prompt", "reward_model"),
        gives=_columns("answer", "completion"),
        convert=_verl,
        is_added=True,
    ),
    RowLayout(
        name="ShareGPT's preferences",
        needed=_columns("conversations", "chosen", "rejected"),
        gives=COMPARED,
        convert=_compared_conversations,
    ),
    RowLayout(name="ShareGPT", needed=_columns("conversations"), gives=CONVERSED, convert=_conversations),
    RowLayout(
        name="OpenAI's preferences",
        needed=_columns("input", "preferred_output", "non_preferred_output"),
        gives=COMPARED,
        convert=_openai_preferences,
    ),
    RowLayout(
        name="UltraFeedback",
        needed=_columns("instruction", "completions"),
        gives=COMPARED | ANSWERED,
        convert=_rated,
    ),
    RowLayout(
        name="UltraFeedback's pairs",
        needed=_columns("instruction", "chosen_response", "rejected_response"),
        gives=COMPARED,
        convert=_alias(prompt="instruction", chosen="chosen_response", rejected="rejected_response"),
    ),
    RowLayout(
        name="Orca's preferences",
        needed=_columns("question", "chosen", "rejected"),
        gives=COMPARED,
        convert=_compared_question,
    ),
    RowLayout(
        name="OpenOrca",
        needed=_columns("question", "response"),
        gives=ANSWERED,
        convert=_question("response", "question", system="system_prompt"),
    ),
    RowLayout(
        name="Alpaca",
        needed=_columns("instruction", "output"),
        gives=ANSWERED,
        convert=_question("output", "instruction", "input", system="system"),
    ),
    RowLayout(
        name="Dolly",
        needed=_columns("instruction", "response"),
        gives=ANSWERED,
        convert=_question("response", "instruction", "context"),
    ),
    RowLayout(
        name="GSM8K",
        needed=_columns("question", "answer"),
        gives=ANSWERED,
        convert=_alias(prompt="question", completion="answer"),
    ),
    RowLayout(
        name="MATH", needed=_columns("problem", "solution"), gives=ANSWERED | _columns("answer"), convert=_problem
    ),
    RowLayout(name="MATH", needed=_columns("problem", "answer"), gives=ANSWERED | _columns("answer"), convert=_problem),
    RowLayout(name="OpenAI", needed=_columns("messages"), gives=CONVERSED, convert=_openai),
)


def without_nones(value: Any) -> Any:
    """A JSON value without the keys whose values are None, at any depth; entries of lists stay."""
    if isinstance(value, dict):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    return [without_nones(item) for item in value] if isinstance(value, list) else value


def read_tools(value: Any) -> list[dict[str, Any]]:
    """A column `tools`: a list of objects, or JSON text of it or of each; empty for a row without tools.

    Raises:
        ValueError: with a message that follows the row's place.
    """
    found = without_nones(_read_json(value))
    if found in (None, "", [], {}):
        return []
    tools = [_read_json(tool) for tool in found] if isinstance(found, list) else [found]
    if not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"has tools={value!r}; it must be a list of objects such as "
            '{"type": "function", "function": {"name": "..."}}, or JSON text of it: fix the row'
        )
    return tools


def with_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its calls as templates read them: arguments as objects, OpenAI's older forms as the newer."""
    called = message.get("function_call")
    if isinstance(called, dict):
        others = {key: value for key, value in message.items() if key != "function_call"}
        message = {**others, "tool_calls": [{"type": "function", "function": called}]}
    if message.get("role") == "function":
        message = {**message, "role": "tool"}
    return for_template(message)


def _read_json(value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has tools={reprlib.repr(value)}, which is not JSON ({error}); fix the row") from error
