"""Answering prompts on processes that share one model: parts of every layer, stages of layers, or both."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import nn
from transformers import PreTrainedTokenizerBase

from hybrid_engine.distributed.processes import get_rank, get_world_size, init_distributed, on_rank_zero
from hybrid_engine.generation.batching.sequence import Sequence
from hybrid_engine.inference.build import check_policy
from hybrid_engine.inference.empty import build_empty_model
from hybrid_engine.rlhf.batch.model import (
    BaseModelOptions,
    build_answering,
    load_answering_tokenizer,
    with_adapter,
)
from hybrid_engine.rlhf.runs.stages import explained


def join(tp: int, pp: int, command: str) -> None:
    """Joins the processes started for `command`; collective. ValueError where they are not `tp` times `pp`."""
    init_distributed()
    if get_world_size() != tp * pp:
        raise ValueError(
            f"--tp={tp} times --pp={pp} makes {tp * pp} processes, and {get_world_size()} were started; start them by "
            f"torchrun --nproc-per-node {tp * pp} -m hybrid_engine.cli.cli {command} ..., or change the numbers"
        )


def load_shared(
    config: BaseModelOptions, tp: int, pp: int, adapters: Mapping[str, str]
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model that answers, and its tokenizer, where each process reads its part of the weights; collective.

    `adapters`: folders by peft's names; the first is active. Raises ValueError for a model without containers.
    """
    tokenizer = load_answering_tokenizer(config)
    folder = on_rank_zero(lambda: _local_folder(str(config.model)))
    with explained("model", folder):
        model: nn.Module = build_empty_model(folder)
    _, reason = check_policy(model)
    if reason is not None:
        raise ValueError(
            f"--tp={tp} --pp={pp}: processes share models with containers only, and {reason}; leave both at 1"
        )
    for name, adapter in adapters.items():
        model = with_adapter(model, adapter, name)
    layout: dict[str, Any] = {"tensor_parallel": {"tp_size": tp}, "pipeline_parallel_size": pp}
    return build_answering(model, config, checkpoint=folder, **layout), tokenizer


def _local_folder(source: str) -> str:
    """The folder of a model, fetched where `source` is a name."""
    if Path(source).is_dir():
        return source
    try:
        return snapshot_download(source, allow_patterns=["*.safetensors", "*.json"])
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"--model={source!r} must be a Hugging Face folder or name that loads: {error}") from error


def telling(sequences: dict[int, list[Sequence]], add: Callable[[int], None]) -> Callable[[], None]:
    """What calls `add` on rank 0 for each row of `sequences` that has ended since it was called last.

    It raises RuntimeError where the logits of a row were not finite.
    """
    unfinished = dict(sequences)

    def tell() -> None:
        if get_rank() != 0:
            return
        for number in [number for number, samples in unfinished.items() if all(map(_is_finished, samples))]:
            if not all(math.isfinite(value) for sample in unfinished.pop(number) for value in sample.logprobs):
                raise RuntimeError(f"row {number + 1}: the model's logits are not finite; check the weights")
            add(number)

    return tell


def _is_finished(sequence: Sequence) -> bool:
    return sequence.finish_reason is not None and len(sequence.logprobs) == len(sequence.tokens)
