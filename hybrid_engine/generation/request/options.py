"""Hugging Face's generation options of a rollout: merges and checks them, and tells which backend serves them.

The order of priority is Hugging Face's: keyword arguments, then `generation_config`, then the model's own, then
defaults.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

from transformers import GenerationConfig

from hybrid_engine.config.checks import check_flag, check_integer, check_number, whole_number
from hybrid_engine.generation.request.rules import NO_RULES, RULE_DEFAULTS, Rules, is_on, read_rules
from hybrid_engine.ops import SamplingOptions

# Options that the native backend serves, with transformers' defaults
# (`GenerationConfig._get_default_generation_params`).
NATIVE_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": None,
    "max_length": None,
    "min_new_tokens": None,
    "min_length": None,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "num_return_sequences": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "return_dict_in_generate": False,
    **RULE_DEFAULTS,
}
# Options without an effect here: the engine itself decides on caching, compiling and batching. Some of them only
# qualify another option, which is not served natively.
WITHOUT_EFFECT = {
    "assistant_tokenizer",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "continuous_batching_config",
    "disable_compile",
    "early_stopping",
    "length_penalty",
    "prefill_chunk_size",
    "remove_invalid_values",
    "renormalize_logits",
    "synced_gpus",
    "tokenizer",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
    "use_model_defaults",
}


@cache
def transformers_options() -> frozenset[str]:
    """Names of the fields of transformers' GenerationConfig; building one takes as long as ten tensor operations."""
    return frozenset(vars(GenerationConfig()))


# Options that transformers' generate() does not have.
OWN_OPTIONS = {"row_options", *RULE_DEFAULTS} - transformers_options()
# Settings of decoding strategies that only another option can select, with their neutral values.
NEUTRAL_VALUES: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "top_h": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
DEFAULT_MAX_NEW_TOKENS = 20  # transformers', when no length is given at all


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Checked options of a rollout, or of one of its rows."""

    max_new_tokens: int
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1
    num_beams: int = 1
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    return_dict: bool = False
    rules: Rules = NO_RULES

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_integer("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        check_integer("num_beams", self.num_beams, 1)
        check_integer("num_return_sequences", self.num_return_sequences, 1)
        check_flag("do_sample", self.do_sample)
        check_flag("return_dict_in_generate", self.return_dict)
        check_number("repetition_penalty", self.repetition_penalty, 0)
        _check(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "be above 0", "1.0 is off")
        if self.do_sample:
            check_number("temperature", self.temperature, 0)
            hint = "for greedy decoding pass do_sample=False"
            _check(self.temperature > 0, "temperature", self.temperature, "be above 0", hint)
            check_integer("top_k", self.top_k, 0)
            check_number("top_p", self.top_p, 0, 1)
            _check(self.top_p > 0, "top_p", self.top_p, "be above 0", "pass 1.0 to switch it off")
            check_number("min_p", self.min_p, 0, 1)
        many = self.num_return_sequences
        differ = many == 1 or self.do_sample or self.num_beams > 1
        _check(differ, "num_return_sequences", many, "be 1 with do_sample=False", "pass do_sample=True")

    @cached_property
    def is_plain(self) -> bool:
        """Whether `sampling` describes completely how tokens are drawn and reported."""
        return not self.rules.shapes_draws

    @cached_property
    def sampling(self) -> SamplingOptions:
        """The sampling options of these options."""
        return SamplingOptions(**{field.name: getattr(self, field.name) for field in fields(SamplingOptions)})


def _check(holds: bool, option: str, value: object, rule: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{option}={value} must {rule}; {remedy}")


def merge_options(model_config: GenerationConfig, given: GenerationConfig | None, kwargs: dict) -> dict[str, Any]:
    """Returns every option that is set, by name. As in transformers, a keyword of None switches an option off.

    With `use_model_defaults=False` only the special tokens of the model's config are used.
    """
    uses_defaults = kwargs.get("use_model_defaults")
    if uses_defaults is not None:
        check_flag("use_model_defaults", uses_defaults)
    merged = _set_options(model_config)
    if uses_defaults is False:
        merged = {name: value for name, value in merged.items() if name in SPECIAL_TOKENS}
    if _is_unset_pad(merged.get("pad_token_id")):
        del merged["pad_token_id"]
    if given is not None:
        merged |= _set_options(given)
    return override(merged, kwargs)


def _set_options(config: GenerationConfig) -> dict[str, Any]:
    # Not `to_dict()`, which copies every value: no caller writes into them.
    return {k: v for k, v in vars(config).items() if v is not None and not k.startswith("_")}


def _is_unset_pad(pad: Any) -> bool:
    """Whether the pad token is -1, with which the configs of the first Llamas say that there is none."""
    return isinstance(pad, int) and pad < 0


def override(options: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns `options` overridden by `kwargs`; None switches an option off."""
    merged = dict(options)
    off = NATIVE_DEFAULTS | {"top_k": 0}
    for name, value in kwargs.items():
        merged.pop(name, None)
        if value is not None or name in off:
            merged[name] = off[name] if value is None else value
    return merged


def check_names(kwargs: dict[str, Any], accepted: Iterable[str]) -> None:
    """Raises ValueError for the first keyword that neither `generate()` nor the model knows.

    With `custom_generate`, any name is accepted, because it may be an argument of that function.
    """
    if kwargs.get("custom_generate") is not None:
        return
    known = {*transformers_options(), *WITHOUT_EFFECT, *OWN_OPTIONS, *accepted}
    for name in kwargs:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "transformers' GenerationConfig lists them"
            raise ValueError(f"{name}={kwargs[name]!r} is no option of generate(); {hint}")


def foreign_options(merged: dict[str, Any]) -> list[str]:
    """Names of the options that only the model's own `generate()` serves."""

    def is_off(name: str, value: Any) -> bool:
        if name in NATIVE_DEFAULTS or name in WITHOUT_EFFECT:
            return True
        if name in NEUTRAL_VALUES:
            return value == NEUTRAL_VALUES[name]
        if isinstance(value, bool | int | float):
            return value == 0
        return hasattr(value, "__len__") and len(value) == 0

    return [name for name, value in merged.items() if not is_off(name, value)]


def own_options(merged: dict[str, Any]) -> list[str]:
    """Names of the options that are on and that transformers does not have."""
    return [name for name in RULE_DEFAULTS if name in OWN_OPTIONS and is_on(name, merged.get(name))]


def read_options(merged: dict[str, Any], prompt_width: int, vocab_size: int) -> GenerationOptions:
    """Returns the native options of `merged`; raises ValueError for the first that is out of range.

    `prompt_width` is the width of the padded prompts, which `max_length` and `min_length` include.
    """
    values = NATIVE_DEFAULTS | {name: value for name, value in merged.items() if name in NATIVE_DEFAULTS}
    max_new_tokens, max_length = values["max_new_tokens"], values["max_length"]
    if max_new_tokens is None and max_length is not None:
        check_integer("max_length", max_length, 1)
        _check(
            max_length > prompt_width,
            "max_length",
            max_length,
            f"exceed the prompts' width {prompt_width}, which it includes",
            "raise it or pass max_new_tokens",
        )
        max_new_tokens = max_length - prompt_width
    if max_new_tokens is None:
        max_new_tokens = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens = values["min_new_tokens"]
    if min_new_tokens is None:
        min_length = 0 if values["min_length"] is None else values["min_length"]
        check_integer("min_length", min_length, 0)
        check_integer("max_new_tokens", max_new_tokens, 1)
        min_new_tokens = min(max(0, min_length - prompt_width), max_new_tokens)
    eos_token_ids = token_ids("eos_token_id", values["eos_token_id"], vocab_size)
    pad = values["pad_token_id"]
    if pad is not None:
        check_integer("pad_token_id", pad, 0, vocab_size - 1)
    pad_token_id = pad if pad is not None else (eos_token_ids[0] if eos_token_ids else 0)
    return GenerationOptions(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        do_sample=values["do_sample"],
        temperature=values["temperature"],
        top_k=whole_number(values["top_k"]),  # some trainers pass 0.0
        top_p=values["top_p"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        num_return_sequences=values["num_return_sequences"],
        num_beams=merged.get("num_beams", 1),
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        return_dict=values["return_dict_in_generate"],
        rules=read_rules(merged, prompt_width, vocab_size),
    )


def token_ids(option: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Returns an id, or a list or tensor of ids, as a tuple, without ids beyond the vocabulary."""
    if value is None:
        return ()
    ids = value.flatten().tolist() if hasattr(value, "flatten") else value
    ids = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    for token in ids:
        is_id = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        _check(is_id, option, token, "be a token id", "pass an int or a list of ints")
    return tuple(token for token in ids if token < vocab_size)
