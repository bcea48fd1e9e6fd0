"""Guided decoding: limits a response to one of some strings, or to a regular expression, a JSON schema or a grammar.

The library llguidance reports after every token which tokens may come next; the logits of all others become -inf. Rules
read guides here, and servers compile them before a request enters the batch.

The library limits its work at each token, but not the time, the memory and the stack of a compilation: the schema
`{"type": "integer", "multipleOf": 99999999}` takes hours. Every guide is therefore compiled in another process first
(`GuideTrials`), which ends at these limits, and only then in this one, where nothing can end a compilation.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from hybrid_engine.generation.options import check_tokenizer

LIBRARY = "llguidance"
JSON_SPACE = r"( |\n[ \t]{0,24})?"
"""Default white space between the parts of guided JSON: what `json.dumps` writes, with or without indentation.

JSON itself allows any amount, and an uncertain model may write white space up to the end of its answer.
"""
_SPECIAL = str.maketrans({letter: f"\\{letter}" for letter in "\\.+*?()|[]{}^$#&-~"})
# Stop reasons with which the library reports that it passed one of its limits; other reasons are ends of the text.
_GIVEN_UP = ("InternalError", "LexerTooComplex", "ParserTooComplex")
SECONDS_TO_COMPILE = 10.0
"""Time limit for the compilation of a guide."""
SECONDS_TO_START = 120.0
"""Time limit for a process to read the tokenizer before its first guide."""
COMPILED_BYTES = 2**29
"""Limit for the address space that the compilation of a guide takes."""
_TRIAL = """
import json, os, resource, signal, sys, threading
from llguidance import LLMatcher, LLTokenizer

def compile(grammar):
    global problem
    try:
        problem = LLMatcher.validate_grammar(grammar, None)
        if not problem:
            LLMatcher(known, grammar, log_level=0).compute_bitmask()
    except BaseException as error:  # a panic of the library
        problem = str(error) or type(error).__name__

def end_after(seconds):  # also if the process that asks has ended
    signal.setitimer(signal.ITIMER_REAL, seconds)

os.nice(5)  # the model has precedence
start = json.loads(sys.stdin.readline())
end_after(start["seconds"])
known = LLTokenizer(start["tokenizer"], eos_token=start["end"])
stack, most = resource.getrlimit(resource.RLIMIT_STACK)[0], resource.getrlimit(resource.RLIMIT_AS)[1]
stack = 2**21 if stack == resource.RLIM_INFINITY else stack
threading.stack_size(max(2**17, stack // 4 // 4096 * 4096))  # a quarter of what threads have in the other process
if os.path.exists("/proc/self/statm"):
    limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + start["bytes"]
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
print(flush=True)
end_after(0)
for line in sys.stdin:
    seconds, grammar = json.loads(line)
    end_after(seconds)
    trial = threading.Thread(target=compile, args=(grammar,))
    trial.start()
    trial.join()
    end_after(0)
    print(json.dumps(problem), flush=True)
"""


class GuideError(ValueError):
    """A guide passes the library's limits, or a token came that it does not allow."""


def read_guide(option: str, value: Any, tokenizer: Any, json_space: str | None = None) -> tuple[str, str]:
    """Returns the kind and the content of a guide after another process has compiled it.

    Args are those of `guide_of`, and a fast tokenizer of transformers.

    Raises:
        GuideError: the compilation passes a limit of time, memory or depth.
        ValueError: the library cannot read `value`.
    """
    guide = guide_of(option, value, json_space)
    grammar = _grammar(option, guide)
    check_tokenizer(tokenizer, option)
    try:
        trial = _try(_read_tokenizer(tokenizer).trials, grammar)
    except TimeoutError as error:
        raise GuideError(f"{option} cannot be used as a guide: {error}; make it smaller") from error
    if trial.failure:
        raise GuideError(f"{option} cannot be used as a guide: {trial.failure}; make it smaller")
    if trial.problem:
        beside = "" if json_space is None else f" with guided_whitespace_pattern={json_space!r}"
        raise ValueError(
            f"{option}={value!r}{beside} cannot be used as a guide: {trial.problem.strip().splitlines()[0]}"
        )
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
            f"guided_whitespace_pattern={json_space!r} must be a regular expression and applies to guided_json, not to "
            f"{option}; leave it out"
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


class GuideTrial(NamedTuple):
    """The result of a compilation in another process."""

    problem: str = ""
    """The library's error, if it cannot read the guide."""
    failure: str = ""
    """How the process ended, if it did."""


class GuideTrials:
    """Processes that compile guides for one tokenizer. Thread-safe: each thread uses a process of its own meanwhile.

    A process serves one guide after another, because reading the tokenizer takes it half a second and more. It ends
    with this object, with the process that started it, and at the limits of a guide.

    Args:
        tokenizer: the tokenizer in the form of the library `tokenizers`.
        end: its end-of-text token.
    """

    def __init__(self, tokenizer: str, end: int | None):
        self._start = {"seconds": SECONDS_TO_START, "tokenizer": tokenizer, "end": end, "bytes": COMPILED_BYTES}
        self._idle: list[subprocess.Popen[str]] = []
        self._owner = os.getpid()
        weakref.finalize(self, _end_all, self._idle, self._owner)

    def compile(self, grammar: str) -> GuideTrial:
        """Compiles `grammar` in one of the processes.

        Raises TimeoutError if that takes longer than SECONDS_TO_COMPILE, and RuntimeError if no process starts.
        """
        process = self._take()
        try:
            answer = _ask(process, [SECONDS_TO_COMPILE, grammar])
        except BaseException:
            _end(process)
            raise
        if answer:
            self._idle.append(process)
            return GuideTrial(problem=json.loads(answer))
        status = _end(process)
        with suppress(RuntimeError):  # the next guide does not pay for this one
            self._idle.append(self._begin())
        if status == -signal.SIGALRM:
            raise TimeoutError(f"compiling it takes longer than {SECONDS_TO_COMPILE:g} s")
        return GuideTrial(failure=f"{LIBRARY} fails at its depth or size")

    def _take(self) -> subprocess.Popen[str]:
        """An idle process, or a new one."""
        if os.getpid() != self._owner:  # a fork shares the pipes
            self._idle, self._owner = [], os.getpid()
        with suppress(IndexError):
            process = self._idle.pop()
            if process.poll() is None:
                return process
        return self._begin()

    def _begin(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _TRIAL]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C is not for it
        )
        if not _ask(process, self._start):
            raise RuntimeError(f"the process that tries guides ended at its start with status {_end(process)}")
        return process


def _ask(process: subprocess.Popen[str], request: Any) -> str:
    """The process's answer, one line; an empty string if it ends instead."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    return process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> int:
    """Ends a process and returns its status."""
    process.kill()
    with suppress(BrokenPipeError):
        process.communicate()
    return process.returncode


def _end_all(processes: list[subprocess.Popen[str]], owner: int) -> None:
    if os.getpid() == owner:
        for process in processes:
            _end(process)


@lru_cache(maxsize=64)
def _try(trials: GuideTrials, grammar: str) -> GuideTrial:
    """Compiles `grammar` in another process. A TimeoutError is not cached: a busy machine may be its cause."""
    return trials.compile(grammar)


class KnownTokenizer(NamedTuple):
    """A tokenizer for guides."""

    library: Any
    """The library's form of it, with one end-of-text token; rows have end tokens of their own."""
    trials: GuideTrials


@lru_cache(maxsize=8)
def _read_tokenizer(tokenizer: Any) -> KnownTokenizer:
    """Reads a tokenizer. For 49,000 tokens that takes half a second of CPU, during which no other Python thread runs.

    Source: `from_tokenizer` of llguidance/hf.py.
    """
    from llguidance import LLTokenizer

    if not tokenizer.is_fast:
        raise ValueError("only fast tokenizers can be used for guides")
    fast = copy(tokenizer.backend_tokenizer)
    fast.no_padding()
    fast.no_truncation()
    text = fast.to_str()
    end = next((end for end in (tokenizer.eos_token_id, *tokenizer.all_special_ids) if end is not None), None)
    return KnownTokenizer(LLTokenizer(text, eos_token=end), GuideTrials(text, end))


def prepare_guides(tokenizer: Any) -> None:
    """Reads the tokenizer for later guides, if the library is installed and supports it."""
    if importlib.util.find_spec(LIBRARY) is not None and tokenizer.is_fast:
        with suppress(ValueError):  # an unknown decoder is an error only for a request with a guide
            _read_tokenizer(tokenizer)


@dataclass(eq=False)
class CompiledGuide:
    """A compiled guide in its initial state, which rows copy."""

    matcher: Any
    end: int
    """Token that the matcher allows once the text is complete."""


_compiled: WeakValueDictionary[tuple[Any, ...], CompiledGuide] = WeakValueDictionary()


def compile_guide(guide: tuple[str, str], tokenizer: Any) -> CompiledGuide:
    """Returns the compiled guide for this tokenizer; takes as long as it took `read_guide`, up to seconds.

    The result is cached as long as something else references it.

    Args:
        guide: result of `read_guide`, here or on the process that leads this one.
        tokenizer: a fast tokenizer of transformers.

    Raises:
        GuideError: the guide is too large for the library's limits.
    """
    compiled = _compiled.get((guide, tokenizer))
    if compiled is None:
        known, library = _read_tokenizer(tokenizer).library, _library(f"guided_{guide[0]}")
        matcher = library.LLMatcher(known, _grammar(f"guided_{guide[0]}", guide), log_level=0)
        _check_state(matcher, guide)
        matcher.compute_bitmask()  # the first call is the slowest
        _check_state(matcher, guide)
        compiled = _compiled[guide, tokenizer] = CompiledGuide(matcher, known.eos_tokens[0])
    return compiled


def _check_state(matcher: Any, guide: tuple[str, str], num_tokens: int = 0) -> None:
    """Raises GuideError if the library passed a limit, which it otherwise reports as the end of the text."""
    if matcher.is_error() or matcher.stop_reason() in _GIVEN_UP:
        reason = (matcher.get_error() or matcher.stop_reason()).strip().splitlines()[0]
        raise GuideError(
            f"guided_{guide[0]} gave up after {num_tokens} tokens of the text: {reason}; simplify it, or "
            "allow fewer continuations at a time"
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
        compiled = self._follow(input_ids[0, self.prompt_length :].tolist())
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _check_state(self._matcher, self.guide, self._num_read)
        # Logits beyond the tokenizer's tokens are padding: zeros for them.
        allowed: np.ndarray = np.unpackbits(bits, count=vocab, bitorder="little").astype(bool)
        if self.ends and compiled.end < vocab:
            is_complete, allowed[compiled.end] = allowed[compiled.end], False
            allowed[[end for end in self.ends if end < vocab]] |= is_complete
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), float("-inf"))

    def is_complete(self, tokens: list[int]) -> bool:
        """Whether only an end of sequence may follow the response `tokens`. Raises GuideError."""
        self._follow(tokens)
        return self._has_ended or self._matcher.is_stopped()

    def _follow(self, tokens: list[int]) -> CompiledGuide:
        if self._compiled is None:
            self._compiled = compile_guide(self.guide, self.tokenizer)
            self._matcher = self._compiled.matcher.deep_copy()
        for token in tokens[self._num_read :]:
            self._has_ended = self._has_ended or token in self.ends
            if not self._has_ended and not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                _check_state(self._matcher, self.guide, self._num_read)
            self._num_read += 1
        return self._compiled
