"""gpt-oss' form: an answer is a series of messages, each on a channel.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The recipient of a call may also come before the channel, as in the chat template.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re
from collections.abc import Callable
from typing import Any

from hybrid_engine.generation.detokenize import longest_beginning
from hybrid_engine.serving.parsers.form import Form, Shown, Tools, as_tool_call, read_json_arguments

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

GPT_OSS = Form(
    marks=(CHANNEL, MESSAGE),
    sign=CHANNEL,
    special=(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS),
    is_always_read=True,
)


class ChannelReader:
    """Splits an answer by its channels: analysis is reasoning, a message to a function is a call, others are text.

    Text before the first message, which a trained model does not write, stays text.
    """

    def __init__(self, tools: Tools):
        self.calls: list[dict[str, Any]] = []
        self._buffer = ""
        self._read: Callable[[bool], Shown] = self._read_header
        self._header = ""

    def add(self, text: str) -> Shown:
        """Adds text; returns the part of it, and of text held back before, that can be shown."""
        self._buffer += text
        return self._advance(False)

    def finish(self) -> Shown:
        """Returns the rest, at the end of the answer."""
        return self._advance(True)

    def _advance(self, is_end: bool) -> Shown:
        parts: list[Shown] = []
        before = None
        while before != (self._read, self._buffer):
            before = self._read, self._buffer
            parts.append(self._read(is_end))
        return Shown("".join(part.text for part in parts), "".join(part.reasoning for part in parts))

    def _read_header(self, is_end: bool) -> Shown:
        """Everything up to the message; a text that cannot be a header is shown."""
        header, found, rest = self._buffer.partition(MESSAGE)
        if found:
            self._header, self._buffer = header, rest
            self._read = self._read_call if _RECIPIENT.search(header) else self._read_message
            return Shown()
        could_be = any(
            sign.startswith(header[: len(sign)]) or header.startswith(sign)
            for sign in (START, CHANNEL, " to=", "to=", CONSTRAIN)
        )
        if could_be and not is_end:
            return Shown()
        self._buffer = ""
        return Shown(header)

    def _read_message(self, is_end: bool) -> Shown:
        text, end = self._up_to_end(is_end)
        if end:
            self._read = self._read_header
        channel = _CHANNEL.search(self._header)
        is_analysis = channel is not None and channel[1] == "analysis"
        return Shown(reasoning=text) if is_analysis else Shown(text)

    def _read_call(self, is_end: bool) -> Shown:
        place = min((self._buffer.find(end) for end in (*ENDS, START) if end in self._buffer), default=-1)
        if place < 0 and not is_end:
            return Shown()
        body = self._buffer if place < 0 else self._buffer[:place]
        recipient, arguments = _RECIPIENT.search(self._header), read_json_arguments(body)
        _, end = self._up_to_end(is_end)
        self._read = self._read_header
        assert recipient is not None
        if arguments is None:
            return Shown(f"{self._header}{MESSAGE}{body}{end}")
        self.calls.append(as_tool_call(recipient[1], arguments))
        return Shown()

    def _up_to_end(self, is_end: bool) -> tuple[str, str]:
        """Removes and returns the buffer up to the end of the message, and the end; or what cannot begin one."""
        found = [(self._buffer.find(end), end) for end in (*ENDS, START) if end in self._buffer]
        if found:
            place, end = min(found)
            text, self._buffer = self._buffer[:place], self._buffer[place + len(end) * (end != START) :]
            return text, end
        held = 0 if is_end else longest_beginning(self._buffer, [*ENDS, START])
        size = len(self._buffer) - held
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return text, ""
