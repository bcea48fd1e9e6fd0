"""The options of a rollout: merges Hugging Face's, checks them, and tells which backend serves them.

`preparing.py` reads them once per call. The order of priority is Hugging Face's: keyword arguments, then
`generation_config`, then the model's own, then defaults.

`Rules` are what a row asks for beyond temperature and filters: which tokens are allowed, which end it, and what is
reported. Names, meanings and order of application follow transformers (`GenerationMixin._get_logits_processor`).
OpenAI's penalties and `logit_bias`, and the rules that only this engine has, come in addition.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

from transformers import GenerationConfig

from hybrid_engine.config.checks import check_choice, check_flag, check_integer, check_number, whole_number
from hybrid_engine.ops import SamplingOptions

MOST_TOP_LOGPROBS = 100
# The distribution of a reported log-probability: the model's logits; the logits divided by the temperature; the
# distribution that the token was drawn from, after all rules and filters.
LOGPROBS = ("raw", "scaled", "processed")
GUIDES = ("guided_choice", "guided_regex", "guided_json", "guided_grammar")
# Each rule with the value that switches it off.
RULE_DEFAULTS: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "sequence_bias": None,
    "bad_words_ids": None,
    "no_repeat_ngram_size": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "stop_sequences": None,
    "stop_strings": None,
    "trim_stop": False,
    "guided_choice": None,
    "guided_regex": None,
    "guided_json": None,
    "guided_grammar": None,
    "guided_whitespace_pattern": None,
    "logprobs": "scaled",
    "top_logprobs": 0,
    "prompt_logprobs": None,
    "record_supports": False,
    "record_routing": False,
}
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
class Rules:
    """Checked rules of a row; the default values change nothing. Token sequences are tuples of ids."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the response contains; -2 to 2, OpenAI's formula."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the response contains it; -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of single tokens."""
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    """Added to the logit of a token that would complete the sequence."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    """First token after a prompt of one token; None if prompts are padded to more than one token."""
    forced_eos_token_id: tuple[int, ...] = ()
    """Tokens of which one is the last token of a row that reaches its length."""
    exponential_decay_length_penalty: tuple[int, float] | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that end the row once the response ends with one of them."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the row, found as by transformers' StopStringCriteria."""
    trim_stop: bool = False
    """Whether tokens and log-probabilities leave out a stop sequence or string, and the tokens that hold part of it."""
    guide: tuple[str, str] | None = None
    """Kind of the guide ("choice", "regex", "json" or "grammar") and its content as JSON."""
    logprobs: str = "scaled"
    top_logprobs: int = 0
    """Number of likeliest tokens reported at each position."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens reported at each prompt position, with its log-probabilities; None: not reported."""
    record_supports: bool = False
    """Whether the tokens that each token was drawn from are recorded (`ops/support_log_prob.py`)."""
    record_routing: bool = False
    """Whether the experts that each token took are recorded (`containers/routing.py`)."""
    tokenizer: Any = field(default=None, compare=False)
    """Tokenizer that stop strings and guides need."""

    @cached_property
    def has_ends(self) -> bool:
        """Whether something other than end-of-sequence tokens can end the row."""
        return bool(self.stop_sequences or self.stop_strings or self.guide)

    @cached_property
    def changes_by_tokens(self) -> bool:
        """Whether the draw depends on the tokens of the row, which the host must know in that case."""
        return bool(
            self.sequence_bias
            or self.bad_words_ids
            or self.no_repeat_ngram_size
            or self.suppress_tokens
            or self.begin_suppress_tokens
            or self.forced_bos_token_id is not None
            or self.forced_eos_token_id
            or self.exponential_decay_length_penalty
            or self.guide
        )

    @property
    def shapes_draws(self) -> bool:
        """Whether a step that draws by SamplingOptions alone would draw or report something else."""
        return self.changes_by_tokens or bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.typical_p < 1.0
            or self.epsilon_cutoff
            or self.eta_cutoff
            or self.logprobs != "scaled"
            or self.top_logprobs
            or self.record_supports
        )


NO_RULES = Rules()


def read_rules(merged: dict[str, Any], prompt_width: int, vocab_size: int) -> Rules:
    """Reads the rules among the options `merged`; raises ValueError for the first that is invalid."""
    given = {name: merged[name] for name in RULE_DEFAULTS if is_on(name, merged.get(name))}
    if not given:
        return NO_RULES
    values = {name: value for name, value in given.items() if name not in GUIDES}
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id"):
        if name in given:
            values[name] = _token_sequence(name, given[name], vocab_size)
    for name in ("bad_words_ids", "stop_sequences"):
        if name in given:
            values[name] = _token_sequences(name, given[name], vocab_size)
    if "logit_bias" in given:
        values["logit_bias"] = _logit_bias(given["logit_bias"], vocab_size)
    if "sequence_bias" in given:
        values["sequence_bias"] = _sequence_bias(given["sequence_bias"], vocab_size)
    if "exponential_decay_length_penalty" in given:
        values["exponential_decay_length_penalty"] = _decay(given["exponential_decay_length_penalty"])
    if "forced_bos_token_id" in given:
        check_integer("forced_bos_token_id", given["forced_bos_token_id"], 0, vocab_size - 1)
        values["forced_bos_token_id"] = given["forced_bos_token_id"] if prompt_width == 1 else None
    if "stop_strings" in given:
        strings = [given["stop_strings"]] if isinstance(given["stop_strings"], str) else given["stop_strings"]
        check_stop_strings(strings)
        values["stop_strings"] = tuple(strings)
    _check_numbers(values)
    _check_forced(values)
    if not ({"stop_sequences", "stop_strings"} & set(values)):
        values.pop("trim_stop", None)
    guides = {name: given[name] for name in GUIDES if name in given}
    guide = _guide(guides, merged.get("tokenizer"), values.pop("guided_whitespace_pattern", None))
    if guide is not None:
        values["guide"] = guide
    if guide is not None or "stop_strings" in values:
        check_tokenizer(merged.get("tokenizer"), "stop_strings")
        values["tokenizer"] = merged["tokenizer"]
    return Rules(**values)


def is_on(name: str, value: Any) -> bool:
    """Whether the rule `name` is switched on by this value."""
    if value is None or name in GUIDES or name == "guided_whitespace_pattern":
        return value is not None
    if isinstance(value, list | tuple | dict) and len(value) == 0:
        return False
    default = RULE_DEFAULTS[name]
    return not (type(value) in (type(default), int, float) and value == default)


def _check_forced(values: dict[str, Any]) -> None:
    """Raises ValueError if no token is left to draw: transformers suppresses tokens after it has forced one."""
    suppressed = values.get("suppress_tokens", ())
    first = values.get("forced_bos_token_id")
    forced = {
        "forced_eos_token_id": (values.get("forced_eos_token_id", ()), {"suppress_tokens": suppressed}),
        "forced_bos_token_id": (
            () if first is None else (first,),
            {"suppress_tokens": suppressed, "begin_suppress_tokens": values.get("begin_suppress_tokens", ())},
        ),
    }
    for name, (tokens, others) in forced.items():
        for other, taken in others.items():
            if tokens and set(tokens) <= set(taken):
                raise ValueError(
                    f"{name}={tokens[0] if len(tokens) == 1 else list(tokens)} must not be in {other}={list(taken)}: "
                    "no token would be left; take it out of one of them"
                )


def _check_numbers(values: dict[str, Any]) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        check_number(name, values.get(name, 0.0), -2, 2)
    check_integer("no_repeat_ngram_size", values.get("no_repeat_ngram_size", 0), 0)
    for name in ("typical_p", "epsilon_cutoff", "eta_cutoff"):
        check_number(name, values.get(name, 0.0), 0, 1)
    if values.get("typical_p") == 0:
        raise ValueError("typical_p=0 must be above 0; pass 1.0 to switch it off")
    for name in ("trim_stop", "record_supports", "record_routing"):
        check_flag(name, values.get(name, False))
    check_choice("logprobs", values.get("logprobs", "scaled"), LOGPROBS)
    for name in ("top_logprobs", "prompt_logprobs"):
        check_integer(name, values.get(name, 0), 0, MOST_TOP_LOGPROBS)


def _token_sequence(option: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = value.flatten().tolist() if hasattr(value, "flatten") else value
    ids = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    for token in ids:
        check_integer(option, token, 0, vocab_size - 1)
    return ids


def _token_sequences(option: str, value: Any, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(ids, list | tuple) and ids for ids in value):
        raise ValueError(f"{option}={value!r} must be a list of lists of token ids, none of them empty")
    return tuple(_token_sequence(option, ids, vocab_size) for ids in value)


def _logit_bias(value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Reads OpenAI's form: keys may be strings, because JSON's are."""
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias={value!r} must be a dict from token ids to numbers")
    biases = []
    for token, bias in value.items():
        number = int(token) if isinstance(token, str) and token.isdecimal() else token
        check_integer("logit_bias: token", number, 0, vocab_size - 1)
        check_number(f"logit_bias[{token}]", bias, -100, 100)
        biases.append((number, float(bias)))
    return tuple(biases)


def _sequence_bias(value: Any, vocab_size: int) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Reads transformers' form: a dict from tuples of ids to numbers, or a list of pairs."""
    pairs: Iterable = value.items() if isinstance(value, dict) else value
    biases = []
    for pair in pairs if isinstance(pairs, Iterable) else [pairs]:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], list | tuple) or not pair[0]:
            raise ValueError(f"sequence_bias={value!r} must be a dict from tuples of token ids to numbers")
        ids = _token_sequence("sequence_bias", pair[0], vocab_size)
        is_number = isinstance(pair[1], int | float) and not isinstance(pair[1], bool)
        if not is_number or math.isnan(pair[1]) or pair[1] == math.inf:
            raise ValueError(f"sequence_bias[{ids}]={pair[1]!r} must be a number; -inf forbids the sequence")
        biases.append((ids, float(pair[1])))
    return tuple(biases)


def _decay(value: Any) -> tuple[int, float]:
    option = "exponential_decay_length_penalty"
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{option}={value!r} must be (first token, factor)")
    check_integer(f"{option}[0]", value[0], 0)
    check_number(f"{option}[1]", value[1], 0)
    return value[0], float(value[1])


def _guide(given: dict[str, Any], tokenizer: Any, json_space: str | None) -> tuple[str, str] | None:
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot both guide a row; pass one of them")
    if not given and json_space is not None:
        raise ValueError(f"guided_whitespace_pattern={json_space!r} needs guided_json; pass both or neither")
    if not given:
        return None
    from hybrid_engine.generation.guides import read_guide

    option, value = next(iter(given.items()))
    return read_guide(option, value, tokenizer, json_space)


def check_tokenizer(tokenizer: Any, option: str) -> None:
    """Raises ValueError if an option that needs the tokenizer has none."""
    if tokenizer is None:
        raise ValueError(f"{option} needs the model's tokenizer; pass tokenizer= with it")


@cache
def transformers_options() -> frozenset[str]:
    """Names of the fields of transformers' GenerationConfig; building one takes as long as ten tensor operations."""
    return frozenset(vars(GenerationConfig()))


# Options that transformers' generate() does not have.
OWN_OPTIONS = {"row_options", *RULE_DEFAULTS} - transformers_options()


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
        greedy = self.rules.record_supports and not self.do_sample
        _check(not greedy, "record_supports", True, "have do_sample=True", "a greedy token is not drawn from a support")
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
            raise ValueError(f"{name}={kwargs[name]!r} is not an option of generate(); {hint}")


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


def check_stop_strings(stop_strings: Any, option: str = "stop_strings") -> None:
    """Raises ValueError unless `stop_strings` is a list of non-empty strings."""
    if not isinstance(stop_strings, list | tuple) or not all(isinstance(stop, str) for stop in stop_strings):
        raise ValueError(f"{option}={stop_strings!r} must be a list of strings")
    if not all(stop_strings):
        raise ValueError(
            f"{option}={list(stop_strings)!r} has an empty string, which every text contains; leave it out"
        )
