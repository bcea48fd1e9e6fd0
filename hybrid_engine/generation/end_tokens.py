"""Finds the tokens that end an answer, for rollouts, `generate`, servers and encodings of training data.

Four places name end tokens, and models differ in which of them they use: the tokenizer's `eos_token`,
`generation_config.json` (Gemma's `<end_of_turn>`, gpt-oss' `<|call|>`), `config.json`, and the chat template, by the
text that it writes after an assistant's turn (`<|im_end|>` of ChatML on a base model, for which the other three name
`<|endoftext|>`).
"""

from collections.abc import Collection
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.generation.options import token_ids

# Stands for an answer when a template is rendered: no template changes its letters, and no text contains it.
_PLACEHOLDER = "ANSWERc2b90de7714f"


class ModelWithEnds(Protocol):
    """A model of transformers, or an engine over one."""

    config: PretrainedConfig
    generation_config: GenerationConfig


class _TurnEnd(NamedTuple):
    template: Any
    token: int | None


_turn_ends: "WeakKeyDictionary[PreTrainedTokenizerBase, _TurnEnd]" = WeakKeyDictionary()
"""The turn end of each tokenizer, with the chat template that it was read from."""


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
