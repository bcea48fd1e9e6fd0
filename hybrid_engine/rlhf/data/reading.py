"""From a dataset's columns to checked rows: an error for a missing, empty or mistyped value names its row."""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from hybrid_engine.rlhf.data.data_files import RowOrError, Table, read_table
from hybrid_engine.rlhf.data.layouts import as_ours, read_tools, with_tool_calls, without_nones
from hybrid_engine.rlhf.data.parts import DataRow, wrap_rows, write_prompts
from hybrid_engine.rlhf.data.rows import (
    CompletionRow,
    ConversationRow,
    LabelledRow,
    LearnedRow,
    Message,
    PreferenceRow,
    PromptRow,
    TextRow,
    Turns,
    detect_format,
    each_good,
)
from hybrid_engine.rlhf.options.columns import MISSING, DataSource, find_value, read_names

R = TypeVar("R", bound=DataRow)
Needs = tuple[frozenset[str], ...]
"""Alternative sets of columns, of which one must be complete; other layouts are tried until one is."""
PROMPTS: Needs = (frozenset({"prompt"}),)
LEARNED: Needs = (frozenset({"messages"}), frozenset({"prompt", "completion"}))
COMPARED: Needs = (frozenset({"prompt", "chosen", "rejected"}),)
LABELLED: Needs = (frozenset({"prompt", "completion", "label"}), *COMPARED)
NO_PROMPT: list[Message] = [{"role": "user", "content": ""}]
"""The prompt of a task whose environment says everything, as in TRL."""
LABELS = {True: True, False: False, "true": True, "false": False, "True": True, "False": False, "1": True, "0": False}
"""Values of a label; a CSV file contains text. 1, 1.0, 0 and 0.0 equal True and False."""
LARGEST_NUMBER = 1e12


def read_prompt_rows(source: DataSource | str) -> list[PromptRow]:
    """The rows of a dataset with a column `prompt`; its other columns are kept in each row.

    Args:
        source: the dataset and how it is read; or only its name: a `.jsonl`, `.json`, `.csv` or `.parquet` file, a
            folder (saved with `save_to_disk`, or of data files) or a name on the Hugging Face hub.

    Raises:
        ValueError: nothing can be read, there is no such column, or a value is empty or neither text nor a
            conversation; it names the dataset, the rows and the remedy. All functions of this file raise the same.
    """
    return _read(source, PROMPTS, _prompt_rows)


def read_task_rows(source: DataSource | str) -> list[PromptRow]:
    """The rows of a dataset of tasks for environments: a row without `prompt` has NO_PROMPT; see `read_prompt_rows`."""
    return _read(source, PROMPTS, lambda table, skips: _build_each(table, _task_row, skips))


def read_learned_rows(source: DataSource | str) -> list[LearnedRow]:
    """Rows of supervised training: `messages`, `prompt` with `completion`, or `text`; see `read_prompt_rows`."""
    return _read(source, LEARNED, _learned_rows)


def read_preference_rows(source: DataSource | str) -> list[PreferenceRow]:
    """Preference pairs: `chosen` and `rejected`, with a `prompt` or beginning with it; see `read_prompt_rows`.

    A column `margin` says by how much the chosen answer is better. Two equal answers are refused.
    """
    return _read(source, COMPARED, _preference_rows)


def read_labelled_rows(source: DataSource | str) -> list[LabelledRow]:
    """Answers with a `label`, True for a good one; a dataset of preference pairs gives two answers for each pair."""
    return _read(source, LABELLED, _labelled_rows)


def _read(source: DataSource | str, needs: Needs, build: Callable[[Table, bool], list[R]]) -> list[R]:
    source = DataSource.of(source)
    return [row for one in source.each() for row in wrap_rows(build(_table(one, needs), one.skips_bad_rows), one)]


def read_given_answer(row: PromptRow) -> CompletionRow:
    """`row` with the answer in its column `completion`; ValueError, naming the row, if it has none."""
    return _completion_row(row.place, {**row.columns, "prompt": row.prompt})


def _table(source: DataSource, needs: Needs) -> Table:
    """The rows of one dataset under our column names."""
    table, names = read_table(source), read_names(source.columns)
    renamed, missing = _renamed(table, names)
    if missing and table.columns and not source.is_one_of_several:
        raise ValueError(
            f"--columns={f'{missing[0]}={names[missing[0]]}'!r}: {source.shown} has no column {missing[0]!r}, only "
            f"{', '.join(map(repr, table.columns))}; name one of them, with dots for nested values"
        )
    return write_prompts(as_ours(renamed, *needs), source)


def _renamed(table: Table, names: Mapping[str, str]) -> tuple[Table, list[str]]:
    """The table under our column names, and the names that no row has.

    A column that is renamed as a whole has only our name; a value inside of another column also stays there.
    """
    missing = set(names)

    def renamed(row: dict[str, Any]) -> dict[str, Any]:
        found = {theirs: value for theirs in names if (value := find_value(row, theirs)) is not MISSING}
        missing.difference_update(found)
        others = {name: value for name, value in row.items() if name not in names}
        return others | {names[theirs]: value for theirs, value in found.items()}

    return table.changed(renamed), sorted(missing)


def _prompt_rows(table: Table, skips: bool) -> list[PromptRow]:
    _check_columns(table, {"prompt"}, "rename the column with the prompts: --columns THEIRS=prompt")
    return _build_each(table, _prompt_row, skips)


def _learned_rows(table: Table, skips: bool) -> list[LearnedRow]:
    if "messages" in table.columns:
        return _build_each(table, _conversation_row, skips)
    if "completion" not in table.columns and "text" in table.columns:
        return _build_each(table, _text_row, skips)
    remedy = "or 'messages', or 'text': rename the columns with the prompts and answers using --columns"
    _check_columns(table, {"prompt", "completion"}, remedy)
    return _build_each(table, _completion_row, skips)


def _preference_rows(table: Table, skips: bool) -> list[PreferenceRow]:
    remedy = "rename the columns with the better and the worse answers using --columns"
    _check_columns(table, {"chosen", "rejected"}, remedy)
    return _build_each(table, _preference_row, skips)


def _labelled_rows(table: Table, skips: bool) -> list[LabelledRow]:
    if "label" not in table.columns and detect_format(table.columns) == "preference pairs":
        return label_pairs(_preference_rows(table, skips))
    remedy = "rename the columns with the prompts, the answers and the labels using --columns"
    _check_columns(table, {"prompt", "completion", "label"}, remedy)
    return _build_each(table, _labelled_row, skips)


def label_pairs(pairs: Sequence[PreferenceRow]) -> list[LabelledRow]:
    """Both answers of each pair, one after the other; the chosen one has the label True."""
    return [
        LabelledRow(prompt=pair.prompt, completion=answer, label=label, place=pair.place, columns=pair.columns)
        for pair in pairs
        for answer, label in ((pair.chosen, True), (pair.rejected, False))
    ]


def _build_each(table: Table, build: Callable[[str, dict[str, Any]], R], skips: bool) -> list[R]:
    def make(entry: tuple[str, RowOrError]) -> R:
        place, row = entry
        if isinstance(row, ValueError):
            raise ValueError(f"{place} {row}")
        return build(place, row)

    return each_good(table.rows, make, table.source, skips=skips, is_reading=True)[1]


def _check_columns(table: Table, needed: set[str], remedy: str) -> None:
    missing = needed - set(table.columns)
    if not missing or not table.columns:  # no row could be read, which is reported with the rows
        return
    found = detect_format(table.columns)
    raise ValueError(
        f"{table.source} has the columns {', '.join(map(repr, table.columns))}"
        f"{f' ({found})' if found else ''} and must have {' and '.join(map(repr, sorted(missing)))}; {remedy}"
    )


def _prompt_row(place: str, row: dict[str, Any]) -> PromptRow:
    return PromptRow(prompt=_turns(place, "prompt", row), **_rest(place, row, "prompt"))


def _task_row(place: str, row: dict[str, Any]) -> PromptRow:
    return _prompt_row(place, row if row.get("prompt") is not None else row | {"prompt": NO_PROMPT})


def _text_row(place: str, row: dict[str, Any]) -> TextRow:
    return TextRow(text=_text(place, "text", row.get("text")), **_rest(place, row, "text"))


def _conversation_row(place: str, row: dict[str, Any]) -> ConversationRow:
    messages = _turns(place, "messages", row)
    if isinstance(messages, str):
        raise ValueError(f"{place} has text in messages; it must be a list of messages: name the column 'text'")
    if any(turn.get("weight") == 0 for turn in row["messages"]):
        raise ValueError(
            f"{place} has a turn with weight=0, but all assistant turns are learned; shorten the conversation, or mark "
            "the learned tokens in the chat template"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{place} has messages without an assistant turn to learn; add one or remove the row")
    return ConversationRow(messages=messages, **_rest(place, row, "messages"))


def _completion_row(place: str, row: dict[str, Any]) -> CompletionRow:
    prompt, completion = _turns(place, "prompt", row), _turns(place, "completion", row)
    if isinstance(completion, str) and not isinstance(prompt, str):  # as `generate` writes it
        completion = [{"role": "assistant", "content": completion}]
    _check_alike(place, prompt, completion, "completion")
    return CompletionRow(prompt=prompt, completion=completion, **_rest(place, row, "prompt", "completion"))


def _labelled_row(place: str, row: dict[str, Any]) -> LabelledRow:
    answer, label = _completion_row(place, row), row.get("label")
    if not isinstance(label, (bool, int, float, str)) or label not in LABELS:
        raise ValueError(
            f"{place} has label={reprlib.repr(label)}; it must be true for a good answer, false for a bad one"
        )
    return LabelledRow(
        prompt=answer.prompt,
        completion=answer.completion,
        label=LABELS[label],
        **_rest(place, row, "prompt", "completion", "label"),
    )


def _preference_row(place: str, row: dict[str, Any]) -> PreferenceRow:
    chosen, rejected = _turns(place, "chosen", row), _turns(place, "rejected", row)
    if type(chosen) is not type(rejected):
        raise ValueError(
            f"{place} has text in one of chosen and rejected and a conversation in the other; use the same form for "
            "both"
        )
    if chosen == rejected:
        raise ValueError(f"{place} has equal chosen and rejected answers, so it teaches nothing; remove the row")
    if "prompt" in row and not _begin_with(row["prompt"], chosen, rejected):
        prompt = _turns(place, "prompt", row)
        _check_alike(place, prompt, chosen, "chosen")
    else:
        prompt, chosen, rejected = _without_common_beginning(place, chosen, rejected)
    margin = _number(place, "margin", row["margin"]) if "margin" in row else None
    rest = _rest(place, row, "prompt", "chosen", "rejected", "margin")
    return PreferenceRow(prompt=prompt, chosen=chosen, rejected=rejected, margin=margin, **rest)


def _begin_with(prompt: Any, chosen: Turns, rejected: Turns) -> bool:
    """Whether a text prompt equals the first turn of both conversations, which then already contain it."""
    return isinstance(prompt, str) and all(
        isinstance(answer, list) and answer[0]["role"] == "user" and answer[0].get("content") == prompt
        for answer in (chosen, rejected)
    )


def _without_common_beginning(place: str, chosen: Turns, rejected: Turns) -> tuple[Turns, Turns, Turns]:
    """The common beginning of both answers in turns or words, and the rest of each: TRL's "implicit prompt"."""
    length = min(len(chosen), len(rejected))
    same = next((index for index in range(length) if chosen[index] != rejected[index]), length)
    if isinstance(chosen, str):  # not within a word, which would change its tokens
        same = max((index for index in range(same) if chosen[index].isspace()), default=0)
    if same == 0 or same == length:
        problem = "have no common beginning to use as" if same == 0 else "differ only after the end of one, which hides"
        raise ValueError(f"{place}: chosen and rejected {problem} the prompt; add a column 'prompt', or remove the row")
    return chosen[:same], chosen[same:], rejected[same:]


def _rest(place: str, row: dict[str, Any], *used: str) -> dict[str, Any]:
    """The fields that every row has: its place, and the columns other than those `used`."""
    columns = {name: value for name, value in row.items() if name and name not in used}
    if columns.get("tools") or columns.get("functions"):
        try:
            columns["tools"] = read_tools(columns.get("tools") or columns["functions"])
        except ValueError as error:
            raise ValueError(f"{place} {error}") from error
    return {"place": place, "columns": columns}


def _turns(place: str, name: str, row: dict[str, Any]) -> Turns:
    value = row.get(name)
    if isinstance(value, list) and value:
        return [_message(place, f"{name}[{index}]", message) for index, message in enumerate(value)]
    return _text(place, name, value, "text or a list of messages")


def _text(place: str, name: str, value: Any, kind: str = "text") -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{place} has {name}={reprlib.repr(value)}; it must be {kind}, not empty: fix or remove it")
    _check_encodable(place, name, [value])
    return value


def _message(place: str, name: str, message: Any) -> Message:
    """The message without the keys that are None: `datasets` gives every message the keys of all."""
    kept = with_tool_calls(without_nones(message)) if isinstance(message, dict) else {}
    kept.pop("weight", None)  # OpenAI's flag for whether a turn is learned
    if not isinstance(kept.get("role"), str) or not kept["role"] or len(kept) < 2:
        raise ValueError(
            f'{place} has {name}={reprlib.repr(message)}; a message must be like {{"role": "user", "content": "..."}}'
        )
    if "content" in kept:
        kept["content"] = _content(place, f"{name}['content']", kept["content"])
        _check_encodable(place, name, [kept["content"]])
    return kept


def _content(place: str, name: str, content: Any) -> str:
    """The text of a turn; OpenAI's form of text in parts becomes a single text, which every template reads."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place} has {name}={reprlib.repr(content)}; it must be text: fix the row")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'{place} has {name} with the part {reprlib.repr(part)}; a part must be {{"type": "text", "text": '
                '"..."}, since models are trained on text alone: fix or remove the row'
            )
    return "".join(part["text"] for part in content)


def _check_encodable(place: str, name: str, texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can contain and no tokenizer reads
            raise ValueError(f"{place} has a {name} that is not text: {error}; fix it") from error


def _check_alike(place: str, prompt: Turns, answer: Turns, name: str) -> None:
    if type(prompt) is not type(answer):
        kinds = ("text", "a conversation") if isinstance(prompt, str) else ("a conversation", "text")
        raise ValueError(
            f"{place} has {kinds[0]} in prompt and {kinds[1]} in {name}; use the same form for both, a conversation as "
            f'[{{"role": "user", "content": "..."}}]'
        )


def _number(place: str, name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST_NUMBER:
        raise ValueError(
            f"{place} has {name}={reprlib.repr(value)}; it must be a finite number from -{LARGEST_NUMBER:g} to "
            f"{LARGEST_NUMBER:g}: fix the row"
        )
    return number
