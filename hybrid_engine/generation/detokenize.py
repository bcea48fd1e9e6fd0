"""The text of answers: turns tokens that arrive one by one into text at once, and finds the tokens that end an answer.

`IncrementalDetokenizer` serves streams and stop strings:

    shown so far + held back = tokenizer.decode(tokens so far), up to a stop string

Text that later tokens may change is held back: bytes of an unfinished UTF-8 character, a run of byte-fallback tokens
(which decodes as a whole or not at all), the end of a text whose spaces the tokenizer cleans up, and a possible
beginning of a stop string. Only the last tokens are decoded each time; they are enough context.

Four places name end tokens, and models differ in which of them they use: the tokenizer's `eos_token`,
`generation_config.json` (Gemma's `<end_of_turn>`, gpt-oss' `<|call|>`), `config.json`, and the chat template, by the
text that it writes after an assistant's turn (`<|im_end|>` of ChatML on a base model, for which the other three name
`<|endoftext|>`). `end_token_ids` joins them for rollouts, `generate`, servers and encodings of training data.
"""

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hybrid_engine.generation.options import check_stop_strings, token_ids

# Number of tokens that are decoded again for each new one: from CONTEXT to LONGEST_WINDOW.
CONTEXT = 16
LONGEST_WINDOW = 48
# Number of characters at the end that transformers' clean-up of spaces may still change, such as several " n't" in a
# row.
CLEANED_UP = 16
REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
PREFIX = "abcdef"
"""Text before a token that is decoded alone: a decoder may strip the first space of a text."""
# Stands for an answer when a template is rendered: no template changes its letters, and no text contains it.
_PLACEHOLDER = "ANSWERc2b90de7714f"
_turn_ends: "WeakKeyDictionary[PreTrainedTokenizerBase, _TurnEnd]" = WeakKeyDictionary()
"""The turn end of each tokenizer, with the chat template that it was read from."""


class IncrementalDetokenizer:
    """The text of one response; takes its tokens and returns text once and in order.

    `stopped` is the stop string that came, or None; after it no text is returned.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_strings: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        includes_stop: bool = False,
        shown_tokens: Collection[int] = (),
        min_tokens: int = 0,
    ):
        """Raises ValueError for an empty stop string.

        Args:
            tokenizer: a tokenizer of transformers.
            includes_stop: whether the stop string itself is shown.
            shown_tokens: special tokens that are not skipped.
            min_tokens: a stop string that ends within this many first tokens is ordinary text.
        """
        check_stop_strings(stop_strings)
        self.tokenizer, self.stop_strings, self.includes_stop = tokenizer, tuple(stop_strings), includes_stop
        self.stopped: str | None = None
        # Skipped tokens never enter the window, so if some special tokens are shown, the window is decoded with all of
        # them.
        self._options = {"skip_special_tokens": skip_special_tokens and not shown_tokens}
        cleans_up = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._unstable = CLEANED_UP if cleans_up else 0
        self._decode_tokens = _decoder(tokenizer, cleans_up)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._skipped = {token for token, kind in added.items() if kind.special and skip_special_tokens}
        self._skipped -= set(shown_tokens)
        self._window: list[int] = []  # tokens that are decoded again
        self._num_read = 0  # characters of the window's text that `_text` has received
        self._num_unstoppable = min_tokens  # number of tokens to come in which no stop string may end
        self._free = 0  # leading characters of `_text` + `_held` in which no stop string may end
        self._text = ""  # stable text not returned yet: it may begin a stop string
        self._held: str | None = ""  # unstable rest of the window's text; None: not decoded yet

    def add(self, token: int) -> str:
        """Adds `token` and returns the text that can be shown now, which is often empty."""
        self._num_unstoppable -= 1
        if self.stopped is not None or token in self._skipped:
            return ""
        self._window.append(token)
        if self._is_byte(token):
            self._held = None
            return ""
        text = self._decode()
        stable = max(self._num_read, len(text) - self._unstable)
        if text.endswith(REPLACEMENT):
            stable = max(self._num_read, min(stable, len(text) - 1))
        self._text += text[self._num_read : stable]
        self._num_read, self._held = stable, text[stable:]
        if self._num_unstoppable >= 0:
            self._free = len(self._text) + len(self._held)
        self._shorten(text)
        return self._give_out()

    @property
    def held(self) -> str:
        """The text that `finish()` would return now: the rest of all tokens so far, up to a stop string."""
        if self.stopped is not None:
            return ""
        if self._held is None:
            self._held = self._decode()[self._num_read :]
        text = self._text + self._held
        found = first_stop(text, self.stop_strings, self._free)
        return text if found is None else text[: self._end_of(found)]

    def finish(self) -> str:
        """Returns the rest of the text after the last token, up to a stop string."""
        rest = self.held
        if self.stopped is None:
            found = first_stop(self._text + (self._held or ""), self.stop_strings, self._free)
            self.stopped = None if found is None else found[1]
        self._text, self._held, self._num_read, self._window = "", "", 0, []
        return rest

    def _decode(self) -> str:
        return self._decode_tokens(self._window, **self._options)

    def _is_byte(self, token: int) -> bool:
        return bool(_BYTE_TOKEN.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token))))

    def _give_out(self) -> str:
        found = first_stop(self._text, self.stop_strings, self._free)
        if found is not None:
            self.stopped = found[1]
            given, self._text = self._text[: self._end_of(found)], ""
            return given
        end = len(self._text) - longest_beginning(self._text, self.stop_strings)
        given, self._text = self._text[:end], self._text[end:]
        self._free = max(0, self._free - end)
        return given

    def _end_of(self, found: tuple[int, str]) -> int:
        return found[0] + (len(found[1]) if self.includes_stop else 0)

    def _shorten(self, text: str) -> None:
        """Drops leading tokens that later text does not depend on; `text` is the decoded window."""
        if len(self._window) <= LONGEST_WINDOW:
            return
        window, num_held = self._window[-CONTEXT:], len(text) - self._num_read
        shorter = self._decode_tokens(window, **self._options)
        # The tokenizer may drop a text's first space, so something visible must precede the held text.
        if shorter[: len(shorter) - num_held].strip() and text.endswith(shorter[len(shorter) - num_held - 1 :]):
            self._window, self._num_read = window, len(shorter) - num_held


class TextOffsets:
    """Offsets in a text at which its tokens begin: after the characters that the tokens before them complete.

    Args:
        tokenizer: a tokenizer of transformers.
        skip_special_tokens: whether special tokens have no text.
        first: number of characters before the first token.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, first: int = 0):
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._num_given = first

    def next(self, token: int) -> int:
        """Adds `token` and returns its offset in characters."""
        offset = self._num_given + len(self._detokenizer.held.rstrip(REPLACEMENT))
        self._num_given += len(self._detokenizer.add(token))
        return offset


def _decoder(tokenizer: Any, cleans_up: bool) -> Callable[..., str]:
    """Returns `tokenizer.decode` or an equivalent without its checks, which cost twice the decoding of a few tokens."""
    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and not cleans_up
    if is_plain and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    ):
        return tokenizer.backend_tokenizer.decode
    return tokenizer.decode


@lru_cache(maxsize=2**16)  # an answer may have 2**18 log-probabilities, each with the name of its token
def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Returns the UTF-8 bytes that `token` adds to a text, which may be part of a character."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:  # the model's vocabulary may be longer than the tokenizer's
        return b""
    if token in getattr(tokenizer, "added_tokens_decoder", {}):
        return name.encode()
    if _BYTE_TOKEN.fullmatch(name):
        return bytes([int(name[3:5], 16)])
    letters = _byte_letters(tokenizer)
    if letters and all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    prefix = _prefix(tokenizer)
    before, text = tokenizer.decode(prefix), tokenizer.decode([*prefix, token])
    return text.removeprefix(before).encode() if text.startswith(before) else tokenizer.decode([token]).encode()


@lru_cache(maxsize=8)
def _prefix(tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer(PREFIX, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=8)
def _byte_letters(tokenizer: Any) -> dict[str, int]:
    """Returns the byte for each letter of a token's name; empty if the tokenizer's names are plain text."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = b"" if decoder is None else decoder.__getstate__()
    if b'"ByteLevel"' not in (state.encode() if isinstance(state, str) else state):
        return dict(getattr(tokenizer, "byte_decoder", {}))
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def first_stop(text: str, stop_strings: Sequence[str], free: int = 0) -> tuple[int, str] | None:
    """Returns the start in `text` and the value of the stop string that is complete first, or None.

    Of several that end at the same place, the longest is returned. A stop string that ends in the first `free`
    characters does not count.
    """
    found = [(text.find(stop, max(0, free - len(stop) + 1)), stop) for stop in stop_strings]
    return min(
        ((start, stop) for start, stop in found if start >= 0),
        key=lambda place: (place[0] + len(place[1]), place[0]),
        default=None,
    )


def longest_beginning(text: str, stop_strings: Sequence[str]) -> int:
    """Returns the number of characters at the end of `text` that may begin a stop string."""
    longest = 0
    for stop in stop_strings:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


class ModelWithEnds(Protocol):
    """A model of transformers, or an engine over one."""

    config: PretrainedConfig
    generation_config: GenerationConfig


class _TurnEnd(NamedTuple):
    template: Any
    token: int | None


def end_token_ids(model: ModelWithEnds, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids of the tokens that end an answer of `model`, without duplicates, those of its configs first.

    Ids outside the model's vocabulary cannot be drawn and are left out.
    """
    config = model.config.get_text_config()
    of_configs = (
        ("generation_config.eos_token_id", getattr(model.generation_config, "eos_token_id", None)),
        ("config.eos_token_id", getattr(model.config, "eos_token_id", None)),
        ("config.eos_token_id", getattr(config, "eos_token_id", None)),
    )
    ends = [token for option, value in of_configs for token in token_ids(option, value, config.vocab_size)]
    ends += token_ids("eos_token_id", answer_ends(tokenizer), config.vocab_size)
    return list(dict.fromkeys(ends))


def answer_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids of the end tokens that the tokenizer knows: its `eos_token` and its `turn_end`."""
    ends = (tokenizer.eos_token_id, turn_end(tokenizer))
    return list(dict.fromkeys(end for end in ends if end is not None))


def answer_text(tokenizer: PreTrainedTokenizerBase, tokens: list[int], ends: Collection[int]) -> str:
    """Decodes an answer without special tokens and its end token, which some tokenizers do not mark as special."""
    is_ended = bool(tokens) and tokens[-1] in ends
    return tokenizer.decode(tokens[:-1] if is_ended else tokens, skip_special_tokens=True)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the id of the special token with which the chat template ends an assistant's turn, or None.

    Blanks before the token and everything after it are ignored: Phi-3 ends a turn with `<|end|>`, then a line feed and,
    after the last turn, `<|endoftext|>`.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    known = _turn_ends.get(tokenizer)
    if known is None or known.template != template:
        known = _turn_ends[tokenizer] = _TurnEnd(template, _find_turn_end(tokenizer))
    return known.token


def _find_turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _PLACEHOLDER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # templates are programs; the code that renders rows reports the refused ones
        return None
    _, shown, behind = text.rpartition(_PLACEHOLDER)
    ids = tokenizer(behind.lstrip(), add_special_tokens=False)["input_ids"] if shown else []
    first = next((token for token in ids if tokenizer.decode([token]).strip()), None)
    specials = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return first if first in specials else None
