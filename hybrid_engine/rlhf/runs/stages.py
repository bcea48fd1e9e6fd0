"""Code that training recipes share: seeds, models and tokenizers, and folders that are either complete or absent."""

import hashlib
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from hybrid_engine.checkpoint.export import save_adapter
from hybrid_engine.config.checks import flag
from hybrid_engine.containers.quantised import is_quantised
from hybrid_engine.distributed.processes import on_rank_zero
from hybrid_engine.engine.faster_linears import use_faster_linears
from hybrid_engine.generation.detokenize import end_token_ids
from hybrid_engine.rlhf.runs.model_card import ADAPTER, write_model_card
from hybrid_engine.rlhf.runs.run_folder import check_out, has_checkpoint, set_aside
from hybrid_engine.rlhf.runs.run_log import say

BEST = "best"


def seed_everything(seed: int) -> None:
    """Seeds Python's and torch's generators, the same on every process."""
    random.seed(seed)
    torch.manual_seed(seed)


def is_finished(folder: Path, runs_again: bool) -> bool:
    """Whether a stage left `folder` complete and may be skipped; never with `runs_again`. Collective.

    Raises:
        ValueError: nothing can be written to the folder of the run.
    """
    on_rank_zero(lambda: check_out(str(folder.parent)))
    found = not runs_again and on_rank_zero(folder.exists)
    if found:
        can_grow = on_rank_zero(lambda: has_checkpoint(folder.parent, folder.name))
        longer = ", and --resume with more --epochs makes it longer" if can_grow else ""
        say(f"{folder} is there: this stage is not run again (`hybrid-engine {folder.name} --restart` does{longer})")
    return found


def move_aside(folder: Path, names: Sequence[str]) -> None:
    """Moves the results of an earlier run under `names` to a folder of their own, and logs where; collective."""
    target = on_rank_zero(lambda: set_aside(folder, names))
    if target is not None:
        say(f"What an earlier run left is now in {target}")


def save_stage(engine: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes model and tokenizer as a Hugging Face folder that gets its name only when complete; collective.

    An adapter is merged into the weights, and also saved by itself in `adapter/` below them, for peft. The README.md
    describes the run's files so far, so call this after its options and figures are written.
    """
    _name_ends(engine.module, tokenizer)
    unfinished, replaced = (folder.with_name(f".{folder.name}-{state}") for state in ("unfinished", "replaced"))
    on_rank_zero(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    engine.save_16bit_model(unfinished)
    save_adapter(engine.module, unfinished / ADAPTER)

    def publish() -> None:
        tokenizer.save_pretrained(unfinished)
        write_model_card(unfinished, _run_folder(folder))
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)
        unfinished.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)

    on_rank_zero(publish)


def _name_ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Stores the end tokens of the run's answers in the model's generation_config, for programs that load it later."""
    if getattr(model, "generation_config", None) is not None:  # a classifier does not have one
        model.generation_config.eos_token_id = end_token_ids(model, tokenizer)


def _run_folder(folder: Path) -> Path:
    """The folder with options and figures of the run that saves a model to `folder`."""
    log = folder.with_name(f"{folder.name.partition('-')[0]}-log")
    return log if log.is_dir() else folder.parent


def load_config(source: str | Path, option: str = "model", **options: Any) -> PretrainedConfig:
    """The config of a Hugging Face folder or name; ValueError, naming `option`, if it does not load."""
    with explained(option, source):
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **options)


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """`config` itself, with every dropout probability set to 0."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def num_positions(config: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that the model can read; None without a limit, as with dynamic RoPE scaling."""
    text_config = config.get_text_config()
    if "dynamic" in str(getattr(text_config, "rope_parameters", None)):
        return None
    return getattr(text_config, "max_position_embeddings", None)


@contextmanager
def explained(option: str, source: str | Path) -> Iterator[None]:
    """Converts transformers' errors for a folder or name that does not load into a ValueError that names `option`."""
    try:
        yield
    except UnpicklingError as error:
        raise ValueError(
            f"{flag(option)}={str(source)!r} has weights in a pickle that holds more than tensors, which could run "
            "code and is not loaded; save them as safetensors"
        ) from error
    # The type depends on the model's family and on what is missing or damaged.
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split()).partition(" Model type should be one of ")[0]  # a list of hundreds
        raise ValueError(
            f"{flag(option)}={str(source)!r} must be a Hugging Face folder or name that loads: {reason}"
        ) from error


def load_model(
    auto_class: Any, source: str | Path, option: str = "model", *, has_new_head: bool = False, **options: Any
) -> nn.Module:
    """`auto_class.from_pretrained(source)` in fp32 with every dropout probability of its config set to 0.

    Dropout would make the log-probabilities of two passes over the same weights differ.

    Args:
        auto_class: of transformers.
        source: Hugging Face name or folder.
        option: that named it.
        has_new_head: whether weights outside the model's body may be missing, and are then random.
        options: for the model's config.

    Raises:
        ValueError: naming `option`: nothing loads, or weights are missing or not finite.
    """
    config = without_dropout(load_config(source, option, **options))
    with explained(option, source):
        loading = {"config": config, "dtype": torch.float32, "output_loading_info": True, "trust_remote_code": False}
        model, info = auto_class.from_pretrained(source, **loading)
    body = f"{model.base_model_prefix}."
    missing = [name for name in sorted(info["missing_keys"]) if not has_new_head or name.startswith(body)]
    plain = ((name, p) for name, p in model.named_parameters() if not is_quantised(p))
    wrong = [name for name, parameter in plain if not torch.isfinite(parameter).all()]
    for names, problem in ((missing, "lacks weights of"), (wrong, "has weights that are not finite in")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{flag(option)}={str(source)!r} {problem} {names[0]}{more}; save the model anew")
    use_faster_linears(model)
    return model


def score_head(classifier: nn.Module, option: str, source: str | Path) -> nn.Linear:
    """The head `score` of a sequence classifier that was loaded from `source`; ValueError, naming `option`, if none."""
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{flag(option)}={str(source)!r} loads as {type(classifier).__name__}, which has no linear head named "
            "score; use a causal model family (such as Llama, Qwen2 or GPT-2)"
        )
    return head


def load_tokenizer(folder: str | Path, option: str = "model") -> PreTrainedTokenizerBase:
    """The tokenizer of a model, set to pad on the left; one without a pad token pads with its end-of-sequence token.

    That is safe here because padding is known from lengths, not from token ids.

    Raises:
        ValueError: naming `option`: nothing loads, the vocabulary is empty or there is no end-of-sequence token.
    """
    given = f"{flag(option)}={str(folder)!r}"
    with explained(option, folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.padding_side = "left"
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise ValueError(
            f"{given} must hold a tokenizer and encodes text to no tokens; save the model's tokenizer there"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{given} has a tokenizer without eos_token; responses could not end: set one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def mix_seed(seed: int, index: int) -> int:
    """A seed for part `index` of a run; 32 bits, which is all that torch's generator on the CPU uses of a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{index}".encode()).digest()[:4], "big")


class Best(NamedTuple):
    """The best measurement so far, as stored in checkpoints."""

    value: float | None = None
    """None before the first measurement."""
    step: int = 0
    """Number of steps before it."""

    def result(self, figure: str) -> dict[str, dict[str, float]]:
        """The entry for `result.json`, where `figure` names the measurement; empty before the first."""
        return {} if self.value is None else {"best": {figure: self.value, "step": self.step}}


def keep_highest(
    best: Best, value: float, step: int, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path
) -> Best:
    """The better of `best` and of `value` after `step` steps, whose weights are then saved below `out`; collective.

    NaN is never better.
    """
    is_better = value > (-math.inf if best.value is None else best.value)
    return _save(Best(value, step), actor, tokenizer, out) if is_better else best


def keep_lowest(best: Best, value: float, step: int, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path) -> Best:
    """Saves the weights with the lowest loss, as `keep_highest` does for the highest score."""
    is_better = value < (math.inf if best.value is None else best.value)
    return _save(Best(value, step), actor, tokenizer, out) if is_better else best


def _save(best: Best, actor: Any, tokenizer: PreTrainedTokenizerBase, out: Path) -> Best:
    save_stage(actor, tokenizer, out / BEST)
    return best
