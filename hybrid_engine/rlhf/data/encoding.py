"""From rows to token ids: by the tokenizer alone for text, by its chat template for a conversation.

Text is encoded with prompt and answer separate, so that the prompt's tokens are those that a rollout begins from, and
an answer ends with the end-of-sequence token. A conversation is rendered as a whole, and split where it continues from
its prompt. Text that a template has already rendered keeps its first and last special tokens and gets no second ones.
"""

import inspect
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybrid_engine.config.checks import flag
from hybrid_engine.config.notices import say_once
from hybrid_engine.generation.detokenize import answer_ends
from hybrid_engine.ops.support_log_prob import Supports
from hybrid_engine.rlhf.batches.packing import SharedPrompt
from hybrid_engine.rlhf.data.rows import (
    CompletionRow,
    ConversationRow,
    LabelledRow,
    LearnedRow,
    Message,
    PreferenceRow,
    PromptRow,
    Row,
    TextRow,
)
from hybrid_engine.serving.tool_calls import asking_template, form_for_template

RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
"""Names that a row's `chat_template_kwargs` may not set: a row does not decide how a conversation becomes tokens."""
FAILURES = (TemplateError, ValueError, TypeError, KeyError)
"""Errors of a chat template that refuses a conversation."""
_UNMARKED = "the chat template does not mark the assistant's tokens ({% generation %})"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Token ids of a prompt, which is only read, and of the response after it."""

    prompt_ids: list[int]
    """At least one."""
    response_ids: list[int]
    """At least one, the end-of-sequence token included."""
    loss_mask: list[bool] | None = None
    """True on the response tokens that are learned; None: all of them."""
    supports: Supports | None = None
    """`[T]`: the tokens that each response token was drawn from, of an answer that a run sampled with filters."""
    routing: torch.Tensor | None = None
    """`[n, L, k]`: the experts that its first n tokens took, of an answer that a run sampled to replay them."""

    @property
    def prompts(self) -> tuple[SharedPrompt, ...]:
        """The prompt of the single sequence."""
        return (SharedPrompt(tuple(self.prompt_ids), len(self.prompt_ids)),)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of the single sequence."""
        return (len(self),)

    @property
    def num_learned(self) -> int:
        """Response tokens that are learned."""
        return len(self.response_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response together."""
        return len(self)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class EncodedPair(NamedTuple):
    """Two responses to one prompt."""

    chosen: Encoded
    rejected: Encoded

    @classmethod
    def of_tokens(cls, prompt_ids: list[int], chosen_ids: list[int], rejected_ids: list[int]) -> "EncodedPair":
        """A pair of responses of which every token is learned."""
        return cls(*(Encoded(prompt_ids=prompt_ids, response_ids=ids) for ids in (chosen_ids, rejected_ids)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the chosen and of the rejected sequence."""
        return len(self.chosen), len(self.rejected)

    @property
    def prompts(self) -> tuple[SharedPrompt, ...]:
        """The prompts of both sequences; a template may render them differently."""
        return self.chosen.prompts + self.rejected.prompts

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer sequence."""
        return max(self.lengths)


class _Conversation(NamedTuple):
    """A rendered conversation: its tokens, the prompt's length, and the tokens that the template marks as learned."""

    ids: list[int]
    prompt_length: int
    marks: list[bool] | None


def encode_prompt(tokenizer: PreTrainedTokenizerBase, row: PromptRow) -> list[int]:
    """The tokens that an answer to `row` continues; for a conversation they include the start of the assistant's turn.

    Raises:
        ValueError: naming the row: it has no tokens, there is no chat template, or the template refuses the
            conversation. The other functions of this module raise the same.
    """
    if isinstance(row.prompt, str):
        return _encode_question(tokenizer, row, row.prompt)
    return _render(tokenizer, row, row.prompt, **_opening(row.prompt))[0]


def encode_answer(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a finished answer, with an end-of-sequence token if the text has no end of its own."""
    return _ended(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_completion(tokenizer: PreTrainedTokenizerBase, row: LearnedRow | LabelledRow) -> Encoded:
    """The tokens of `row` for supervised training, with those that are learned.

    Of a conversation whose template marks the assistant's tokens (`{% generation %}`), only these are learned, in all
    turns; without marks it is the completion, or the last turn of `messages`. Of plain text every token is learned but
    the first, which has no token before it.
    """
    if isinstance(row, TextRow):
        ids = _ended(tokenizer, _encode_text_prompt(tokenizer, row, row.text))
        if len(ids) < 2:
            raise ValueError(
                f"{row.place} has text of one token, {row.text!r}, which has no token before it to learn from; remove "
                "it"
            )
        return Encoded(prompt_ids=ids[:1], response_ids=ids[1:])
    if isinstance(row, ConversationRow):
        return _encode_messages(tokenizer, row)
    if isinstance(row.prompt, str) and isinstance(row.completion, str):
        prompt = _encode_question(tokenizer, row, row.prompt)
        return Encoded(prompt_ids=prompt, response_ids=encode_answer(tokenizer, row.completion))
    assert not isinstance(row.prompt, str) and not isinstance(row.completion, str), f"{row=}"
    return _encode_turns(tokenizer, row, row.prompt, row.completion)


def encode_scored(tokenizer: PreTrainedTokenizerBase, row: CompletionRow | LabelledRow) -> Encoded:
    """Prompt and finished answer as a reward model reads them: its score is that of the last token."""
    if isinstance(row.prompt, str) or isinstance(row.completion, str):
        return encode_completion(tokenizer, row)
    ids, length, _ = _converse(tokenizer, row, row.prompt, row.completion)
    return Encoded(prompt_ids=ids[:length], response_ids=_until_end(tokenizer, row, ids[length:]))


def encode_pair(tokenizer: PreTrainedTokenizerBase, row: PreferenceRow) -> EncodedPair:
    """The prompt and both answers; in a conversation the prompt is the common beginning of both renderings.

    Of answers whose template marks the assistant's tokens, only these are learned. The tokens after them are kept: a
    reward model reads its score at the last token.
    """
    if isinstance(row.prompt, str):
        assert isinstance(row.chosen, str) and isinstance(row.rejected, str), f"{row=}"
        prompt = _encode_question(tokenizer, row, row.prompt)
        answers = (encode_answer(tokenizer, text) for text in (row.chosen, row.rejected))
        return _check_unlike(row, EncodedPair.of_tokens(prompt, *answers))
    assert not isinstance(row.chosen, str) and not isinstance(row.rejected, str), f"{row=}"
    chosen, rejected = (_converse(tokenizer, row, row.prompt, answer) for answer in (row.chosen, row.rejected))
    length = min(chosen.prompt_length, rejected.prompt_length)
    pair = EncodedPair(*(_answer_behind(tokenizer, row, whole, length) for whole in (chosen, rejected)))
    return _check_unlike(row, pair)


def read_template(path: str, option: str = "chat_template") -> str:
    """The chat template in the file that `option` names; ValueError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag(option)}={path!r} must be a file with a Jinja chat template: {error}") from error


def _owner(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name of the tokenizer in an error message; a tokenizer that was just trained does not have one."""
    name = tokenizer.name_or_path
    return f"the tokenizer of {name!r}" if name else "the tokenizer that is trained without --model"


def _check_unlike(row: Row, pair: EncodedPair) -> EncodedPair:
    if pair.chosen == pair.rejected:
        raise ValueError(
            f"{row.place} has chosen and rejected answers that become the same tokens, so it teaches nothing; remove "
            "the row"
        )
    return pair


def _encode_question(tokenizer: PreTrainedTokenizerBase, row: Row, text: str) -> list[int]:
    """The tokens of a prompt that is text; logs a note if the model's chat template was not applied to it."""
    ids = _encode_text_prompt(tokenizer, row, text)
    if tokenizer.chat_template and not {*ids[_num_added_before(tokenizer, ids) :]} & {*tokenizer.all_special_ids}:
        say_once(
            "prompts are text, so the model's chat template is not applied; --as-conversation makes them turns "
            'of a user, [{"role": "user", "content": ...}]'
        )
    return ids


def _encode_text_prompt(tokenizer: PreTrainedTokenizerBase, row: Row, text: str) -> list[int]:
    """The tokens of a text, with the token that the tokenizer puts before it, without one that some append."""
    ids = list(tokenizer(text)["input_ids"])
    eos = tokenizer.eos_token_id
    if ids and ids[-1] == eos and (ids[-2:-1] == [eos] or not text.endswith(tokenizer.eos_token)):
        ids.pop()
    if not ids:
        raise ValueError(f"{row.place} has text without tokens, {text!r}, which no answer can follow; remove it")
    length = _num_added_before(tokenizer, ids)
    if length and ids[length : 2 * length] == ids[:length]:
        say_once(f"text already begins with {tokenizer.decode(ids[:length])}; the tokenizer adds no second one")
        ids = ids[length:]
    return ids


def _num_added_before(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> int:
    """The number of `ids`, the tokens of a text, that the tokenizer puts before any text."""
    of_nothing = tokenizer("")["input_ids"]
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(of_nothing, ids, strict=False))])


def _encode_messages(tokenizer: PreTrainedTokenizerBase, row: ConversationRow) -> Encoded:
    ids, marks = _render(tokenizer, row, row.messages)
    if marks is None:
        if any(turn["role"] == "assistant" for turn in row.messages[:-1]):
            say_once(f"{_UNMARKED}: only the last turn of a conversation is learned")
        if row.messages[-1]["role"] != "assistant" or len(row.messages) == 1:
            raise ValueError(
                f"{row.place}: {_UNMARKED}, so the last turn is learned; it must be the assistant's and follow another "
                "turn: fix the row or the template"
            )
        return _encode_turns(tokenizer, row, row.messages[:-1], row.messages[-1:])
    first = max(marks.index(True), 1) if True in marks else len(ids)
    return _learned(row, ids, first, marks)


def _encode_turns(
    tokenizer: PreTrainedTokenizerBase, row: Row, prompt: list[Message], completion: list[Message]
) -> Encoded:
    ids, length, marks = _converse(tokenizer, row, prompt, completion)
    if marks is not None:
        return _learned(row, ids, length, marks)
    return Encoded(prompt_ids=ids[:length], response_ids=_until_end(tokenizer, row, ids[length:]))


def _answer_behind(tokenizer: PreTrainedTokenizerBase, row: Row, whole: _Conversation, length: int) -> Encoded:
    """The answer after the first `length` tokens of a conversation, with the marks of its template."""
    ids = _until_end(tokenizer, row, whole.ids[length:])
    mask = None if whole.marks is None else _check_marked(row, whole.marks[length : length + len(ids)])
    is_whole = mask is None or all(mask)
    return Encoded(prompt_ids=whole.ids[:length], response_ids=ids, loss_mask=None if is_whole else mask)


def _learned(row: Row, ids: list[int], first: int, marks: list[bool]) -> Encoded:
    """The tokens up to the last marked one, with a response that begins at `first`."""
    mask = _check_marked(row, marks[first:])
    length = len(mask) - mask[::-1].index(True)
    mask = mask[:length]
    return Encoded(
        prompt_ids=ids[:first], response_ids=ids[first : first + length], loss_mask=None if all(mask) else mask
    )


def _check_marked(row: Row, mask: list[bool]) -> list[bool]:
    """Returns `mask`; raises ValueError if no entry is True."""
    if True not in mask:
        raise ValueError(
            f"{row.place} has no token that the chat template marks as the assistant's; add an assistant turn, or fix "
            "the template"
        )
    return mask


def _converse(
    tokenizer: PreTrainedTokenizerBase, row: Row, prompt: list[Message], completion: list[Message]
) -> _Conversation:
    """Prompt and completion as one conversation, split where it first differs from the prompt's own rendering."""
    before = _render(tokenizer, row, prompt, **_opening(prompt))[0]
    ids, marks = _render(tokenizer, row, [*prompt, *completion])
    length = next((n for n, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids)))
    question = prompt[-1].get("content")
    if prompt[-1]["role"] == "user" and isinstance(question, str):
        read = "".join(tokenizer.decode(ids[:length]).split())
        if "".join(question.split()) not in read:
            raise ValueError(
                f"{row.place}: the chat template renders the prompt differently when an answer follows it, so the "
                "answer's tokens cannot be identified; use another template"
            )
    if marks is None and any(turn["role"] != "assistant" for turn in completion):
        say_once(f"{_UNMARKED}: turns of other roles within an answer are learned too")
    return _Conversation(ids, length, marks)


def _opening(prompt: list[Message]) -> dict[str, bool]:
    """Options that make a template render a prompt for an answer, or continue the assistant's last turn."""
    return {"continue_final_message" if prompt[-1]["role"] == "assistant" else "add_generation_prompt": True}


def _until_end(tokenizer: PreTrainedTokenizerBase, row: Row, ids: list[int]) -> list[int]:
    """The response up to the token that ends its last turn, where a rollout stops; templates append more after it."""
    if not ids:
        raise ValueError(f"{row.place} has an answer without tokens; fix or remove the row")
    return ids[: _end_of_answer(tokenizer, ids)]


def _ended(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """`ids` with the end-of-sequence token appended, or cut after the end that they have."""
    length = _end_of_answer(tokenizer, ids)
    if length is None:
        return [*ids, tokenizer.eos_token_id]
    say_once(
        f"text already ends with {tokenizer.decode(ids[length - 1 : length])}; no {tokenizer.eos_token} is added after "
        "it"
    )
    return ids[:length]


def _end_of_answer(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> int | None:
    """The length of the answer in `ids`, up to the first end token after its text; None if there is no end token."""
    ends, length = answer_ends(tokenizer), len(ids)
    while length and (ids[length - 1] in ends or not tokenizer.decode([ids[length - 1]]).strip()):
        length -= 1
    return next((place + 1 for place in range(length, len(ids)) if ids[place] in ends), None)


def _template_options(row: Row) -> dict[str, Any]:
    """The row's variables of the template; ValueError if they are not an object or set a reserved name."""
    given = row.columns.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or RESERVED & given.keys():
        raise ValueError(
            f"{row.place} has chat_template_kwargs={given!r}; it must be an object of variables of the chat template, "
            f"without {', '.join(sorted(RESERVED))}: fix the row"
        )
    return dict(given)


def _as_template_takes(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]
) -> list[Message]:
    """The messages in the form that the template takes; unchanged if it takes none, which is reported later."""
    taken = messages

    def render(form: list[Message]) -> str:
        nonlocal taken
        taken = form
        return _render_text(tokenizer, form, tools, options)

    try:
        form_for_template(messages, render)
    except FAILURES:
        return messages
    return taken


def _check_shown(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    messages: list[Message],
    tools: list[Any] | None,
    options: dict[str, Any],
) -> None:
    """Raises ValueError if the chat template omits the row's tools or tool calls: a model could not learn them.

    A template that fails is reported where the conversation is rendered for its tokens.
    """
    has_calls = any(turn.get("tool_calls") for turn in messages)
    bare = [{"content": "", **{key: turn[key] for key in turn if key != "tool_calls"}} for turn in messages]
    shown = _text_of(tokenizer, messages, tools, options) if tools or has_calls else None
    for is_there, what, without, remedy in (
        (tools, "tools", lambda: _text_of(tokenizer, messages, None, options), "remove the column 'tools'"),
        (has_calls, "calls of tools", lambda: _text_of(tokenizer, bare, tools, options), "write them into the content"),
    ):
        if is_there and shown is not None and shown == without():
            raise ValueError(
                f"{row.place} has {what}, but the chat template of {_owner(tokenizer)} does not render them; use a "
                f"model whose template does, give another template, or {remedy}"
            )


def _text_of(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]
) -> str | None:
    """The text that the chat template renders for the conversation; None if it fails."""
    try:
        return _render_text(tokenizer, messages, tools, options)
    except FAILURES:
        return None


def _render_text(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]
) -> str:
    template = asking_template(tokenizer, tools)
    return str(tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False, **options))


def _render(
    tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[Message], **opening: bool
) -> tuple[list[int], list[bool] | None]:
    """The tokens of a conversation, and a mask of the assistant's tokens; None if the template marks nothing."""
    tools = row.columns.get("tools") or None
    try:
        template = asking_template(tokenizer, tools)
    except ValueError as error:
        raise ValueError(
            f"{row.place} is a conversation, but {_owner(tokenizer)} has no chat template; use a model with one (their "
            "names often end in Instruct or Chat), set tokenizer.chat_template and save it, or write prompts and "
            "answers as text"
        ) from error
    is_marked = not opening and _GENERATION_MARK.search(template) is not None
    options = _template_options(row) | opening
    messages = _as_template_takes(tokenizer, messages, tools, options)
    _check_shown(tokenizer, row, messages, tools, options)
    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=is_marked,
            **options,
        )
    except FAILURES as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{row.place}: the chat template refuses the conversation: {reason}; fix the row") from error
    return rendered["input_ids"], [bool(mark) for mark in rendered["assistant_masks"]] if is_marked else None
