"""What ends a row beside end-of-sequence tokens: stop sequences, stop strings, a guide that nothing may follow."""

from functools import lru_cache
from typing import Any

import torch
from transformers import StopStringCriteria

from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.generation.detokenize import first_stop
from hybrid_engine.generation.sampling.processors import build_row_processors


def is_ended(row: Sequence, vocab: int) -> bool:
    """Whether the last token that was read of `row` ends it; an error of its rules is noted there, and does."""
    try:
        return _is_ended(row, vocab)
    except Exception as error:
        row.error = row.error or error
        return True


def _is_ended(row: Sequence, vocab: int) -> bool:
    rules, tokens = row.options.rules, row.tokens[: len(row.logprobs)]
    if any(tuple(tokens[-len(stop) :]) == stop for stop in rules.stop_sequences):
        return True
    if rules.stop_strings and _ends_with_string(rules.tokenizer, rules.stop_strings, row.prompt.tokens, tokens):
        return True
    if rules.guide is None:
        return False
    if row.processors is None:  # drawn elsewhere: this process holds no last stage
        row.processors = build_row_processors(row.options, len(row.prompt.tokens), torch.device("cpu"))
    return row.processors.guide.is_complete(tokens, vocab)


def _ends_with_string(tokenizer: Any, strings: tuple[str, ...], prompt: list[int], tokens: list[int]) -> bool:
    """Whether the last token completes the string, which may begin in the prompt; transformers' rule.

    That knows the bytes of tokens of the backends of `tokenizers`; for others, text of more than ASCII is decoded.
    """
    longest = max(len(string.encode()) for string in strings)  # tokens: one may be a single byte
    last = (prompt[-longest:] + tokens[-longest:])[-longest:]
    criteria = _criteria(tokenizer, strings)
    if criteria is not None and bool(criteria(torch.tensor([last]), None)[0]):
        return True
    wide = [string for string in strings if not string.isascii()]
    if not wide or not tokens:
        return False
    text, before = (tokenizer.decode(part, skip_special_tokens=False) for part in (last, last[:-1]))
    return any(text.count(string) > before.count(string) for string in wide)


@lru_cache(maxsize=32)
def _criteria(tokenizer: Any, strings: tuple[str, ...]) -> StopStringCriteria | None:
    """transformers'; None where it knows no token that has part of the text of more than ASCII."""
    try:
        return StopStringCriteria(tokenizer, list(strings))
    except ValueError:
        if all(string.isascii() for string in strings):
            raise
        return None


def num_before_stop(row: Sequence) -> int:
    """Tokens of a finished `row` that have no part of the stop sequence or string that ended it."""
    rules, tokens = row.options.rules, row.tokens
    if row.finish_reason != "stop":
        return len(tokens)
    stops = [stop for stop in rules.stop_sequences if tuple(tokens[-len(stop) :]) == stop]
    if stops:
        return len(tokens) - max(map(len, stops))
    if not rules.stop_strings or (tokens and tokens[-1] in row.options.eos_token_ids):
        return len(tokens)

    def text(count: int) -> str:
        return rules.tokenizer.decode(tokens[:count], skip_special_tokens=False)

    found, count = first_stop(text(len(tokens)), rules.stop_strings), len(tokens)
    end = 0 if found is None else found[0]  # it began in the prompt
    while count > 0 and len(text(count)) > end:
        count -= 1
    return count
