"""Guided decoding: limits a response to one of some strings, or to a regular expression, a JSON schema or a grammar.

The library llguidance reports after every token which tokens may come next; the logits of all others become -inf. Rules
read guides here, and servers check and compile them before a request enters the batch.
"""

import importlib.util
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

LIBRARY = "llguidance"
JSON_SPACE = r"( |\n[ \t]{0,24})?"
"""Default white space between the parts of guided JSON: what `json.dumps` writes, with or without indentation.

JSON itself allows any amount, and an uncertain model may write white space up to the end of its answer.
"""
_SPECIAL = str.maketrans({letter: f"\\{letter}" for letter in "\\.+*?()|[]{}^$#&-~"})
# Stop reasons with which the library reports that it passed one of its limits; other reasons are ends of the text.
_GIVEN_UP = ("InternalError", "LexerTooComplex", "ParserTooComplex")


SECONDS_TO_TRY = 10.0
_TRIAL = """
import resource, sys, threading
from llguidance import LLMatcher
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
threading.stack_size(2**21)  # a quarter of what threads have here
grammar = sys.stdin.read()
trial = threading.Thread(target=lambda: LLMatcher.validate_grammar(grammar, None))
trial.start()
trial.join()
"""


class GuideError(ValueError):
    """A guide passes the library's limits, or a token came that it does not allow."""


def read_guide(option: str, value: Any, json_space: str | None = None) -> tuple[str, str]:
    """Returns the kind and the content of a guide after the library has checked it.

    Args are those of `guide_of`. Raises ValueError if the library cannot read `value`.
    """
    guide = guide_of(option, value, json_space)
    problem = _library(option).LLMatcher.validate_grammar(_grammar(option, guide), None)
    if problem:
        beside = "" if json_space is None else f" with guided_whitespace_pattern={json_space!r}"
        raise ValueError(f"{option}={value!r}{beside} cannot guide: {problem.strip().splitlines()[0]}")
    return guide


def guide_of(option: str, value: Any, json_space: str | None = None) -> tuple[str, str]:
    """Returns the kind and the content of a guide, which the library does not check here.

    Args:
        option: `guided_choice`, `guided_regex`, `guided_json` or `guided_grammar`.
        json_space: regular expression of white space in JSON; None: `JSON_SPACE`.

    Raises ValueError if `value` does not have the option's type.
    """
    kind = option.removeprefix("guided_")
    if json_space is not None and (kind != "json" or not isinstance(json_space, str)):
        raise ValueError(
            f"guided_whitespace_pattern={json_space!r} must be a regular expression beside guided_json, not {option}; "
            "leave it out"
        )
    if kind == "choice":
        is_list = isinstance(value, list | tuple) and len(value) > 0
        if not is_list or not all(isinstance(choice, str) and choice for choice in value):
            raise ValueError(f"{option}={value!r} must be a list of strings, none of them empty")
    elif kind == "regex" and not isinstance(value, str):
        raise ValueError(f"{option}={value!r} must be a string with a regular expression")
    elif kind == "grammar" and not isinstance(value, str):
        raise ValueError(f"{option}={value!r} must be a string with a grammar in Lark's notation")
    elif kind == "json":
        value = _schema(option, value)
        if json_space is not None:
            value = value | {"x-guidance": value.get("x-guidance", {}) | {"whitespace_pattern": json_space}}
    return kind, json.dumps(value)


def try_guide(guide: tuple[str, str]) -> None:
    """Raises GuideError for an untrusted guide whose parsing would not end, or would end the process.

    The library does not limit its parsing time, and its depth is limited by the stack alone, so another process tries
    it.
    """
    option = f"guided_{guide[0]}"
    try:
        reason = _tried(_grammar(option, guide))
    except subprocess.TimeoutExpired:
        reason = f"reading it takes longer than {SECONDS_TO_TRY:g} s"
    if reason is not None:
        raise GuideError(f"{option} cannot guide: {reason}; make it smaller")


@lru_cache(maxsize=64)  # starting a process takes at least a tenth of a second
def _tried(grammar: str) -> str | None:
    """Parses `grammar` in another process; returns the failure of that process, or None.

    An error that the library itself reports is not a failure. Raises TimeoutExpired if parsing takes too long; that is
    not cached, because a busy machine may be the cause.
    """
    command = [sys.executable, "-c", _TRIAL]
    ended = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=SECONDS_TO_TRY)
    return None if ended.returncode == 0 else f"{LIBRARY} fails at its depth or size"


def _schema(option: str, value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{option}={value!r} is no JSON ({error}); pass a JSON schema as a dict or a string"
            ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{option}={value!r} must be a JSON schema: a dict, or a string that holds one")
    return value


def _library(option: str) -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            f"{option} needs the library {LIBRARY}, which is not installed ({error}); install it with "
            "pip install 'hybrid-engine[guided]'"
        ) from error
    return llguidance


def _grammar(option: str, guide: tuple[str, str]) -> str:
    kind, content = guide
    matcher = _library(option).LLMatcher
    if kind == "choice":  # one lexeme, because a grammar may have at most 2000 alternatives
        return matcher.grammar_from_regex("|".join(choice.translate(_SPECIAL) for choice in json.loads(content)))
    if kind == "regex":
        return matcher.grammar_from_regex(json.loads(content))
    if kind == "grammar":
        return matcher.grammar_from_lark(json.loads(content))
    return matcher.grammar_from_json_schema(content, {"whitespace_pattern": JSON_SPACE})


@lru_cache(maxsize=8)
def _read_tokenizer(tokenizer: Any, vocab: int) -> Any:
    """The library's form of the tokenizer, with one end-of-text token; rows have end tokens of their own.

    Reading a tokenizer of 49,000 tokens takes half a second of CPU, during which no other Python thread runs.
    """
    from llguidance.hf import from_tokenizer

    ends = (end for end in (tokenizer.eos_token_id, *tokenizer.all_special_ids) if end is not None)
    return from_tokenizer(tokenizer, n_vocab=max(vocab, len(tokenizer)), eos_token=next(ends, None))


def prepare_guides(tokenizer: Any, vocab: int) -> None:
    """Reads the tokenizer for later guides, if the library is installed and supports it."""
    if importlib.util.find_spec(LIBRARY) is not None and tokenizer.is_fast:
        with suppress(ValueError):  # an unknown decoder is an error only for a request with a guide
            _read_tokenizer(tokenizer, vocab)


@dataclass(eq=False)
class CompiledGuide:
    """A compiled guide in its initial state, which rows copy."""

    matcher: Any
    end: int
    """Token that the matcher allows once the text is complete."""


_compiled: WeakValueDictionary[tuple[Any, ...], CompiledGuide] = WeakValueDictionary()


def compile_guide(guide: tuple[str, str], tokenizer: Any, vocab: int) -> CompiledGuide:
    """Returns the compiled guide for this tokenizer; takes up to seconds.

    The result is cached as long as something else references it.

    Args:
        guide, tokenizer: those of `GuidedTokens`.
        vocab: width of the logits.

    Raises:
        GuideError: the guide is too large for the library's limits.
    """
    key = guide, tokenizer, vocab
    compiled = _compiled.get(key)
    if compiled is None:
        known, library = _read_tokenizer(tokenizer, vocab), _library(f"guided_{guide[0]}")
        matcher = library.LLMatcher(known, _grammar(f"guided_{guide[0]}", guide), log_level=0)
        _check_state(matcher, guide)
        matcher.compute_bitmask()  # the first call is the slowest
        _check_state(matcher, guide)
        compiled = _compiled[key] = CompiledGuide(matcher, known.eos_tokens[0])
    return compiled


def _check_state(matcher: Any, guide: tuple[str, str], num_tokens: int = 0) -> None:
    """Raises GuideError if the library passed a limit, which it otherwise reports as the end of the text."""
    if matcher.is_error() or matcher.stop_reason() in _GIVEN_UP:
        reason = (matcher.get_error() or matcher.stop_reason()).strip().splitlines()[0]
        raise GuideError(
            f"guided_{guide[0]} gave up after {num_tokens} tokens of the text: {reason}; make it smaller, or let it "
            "allow fewer ways to go on at once"
        )


class GuidedTokens:
    """Logits processor of one row that allows only tokens that continue the guide.

    Args:
        guide: result of `read_guide`.
        tokenizer: a fast tokenizer of transformers.
        ends: the row's end-of-sequence tokens, allowed once the text is complete; empty: the tokenizer's.
        prompt_length: number of leading tokens of the row that are not guided.
    """

    def __init__(self, guide: tuple[str, str], tokenizer: Any, ends: tuple[int, ...], prompt_length: int):
        self.guide, self.tokenizer, self.ends, self.prompt_length = guide, tokenizer, ends, prompt_length
        self._compiled: CompiledGuide | None = None
        self._matcher: Any = None
        self._num_read = 0
        self._has_ended = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Masks `scores [1, V]` after the tokens `input_ids [1, L]`, prompt included. Raises GuideError."""
        vocab = scores.shape[1]
        compiled = self._follow(input_ids[0, self.prompt_length :].tolist(), vocab)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _check_state(self._matcher, self.guide, self._num_read)
        allowed: np.ndarray = np.unpackbits(bits, count=vocab, bitorder="little").astype(bool)
        if self.ends and compiled.end < vocab:
            is_complete, allowed[compiled.end] = allowed[compiled.end], False
            allowed[[end for end in self.ends if end < vocab]] |= is_complete
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), float("-inf"))

    def is_complete(self, tokens: list[int], vocab: int) -> bool:
        """Whether only an end of sequence may follow the response `tokens`. Raises GuideError."""
        self._follow(tokens, vocab)
        return self._has_ended or self._matcher.is_stopped()

    def _follow(self, tokens: list[int], vocab: int) -> CompiledGuide:
        if self._compiled is None:
            self._compiled = compile_guide(self.guide, self.tokenizer, vocab)
            self._matcher = self._compiled.matcher.deep_copy()
        for token in tokens[self._num_read :]:
            self._has_ended = self._has_ended or token in self.ends
            if not self._has_ended and not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                _check_state(self._matcher, self.guide, self._num_read)
            self._num_read += 1
        return self._compiled
