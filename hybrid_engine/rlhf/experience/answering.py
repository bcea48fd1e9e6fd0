"""Answers without training: loads the model of `generate` and `serve`, runs sequences, and writes answers to a file.

Each answer is journaled when it finishes. `FILE.part` holds a line with what the answers depend on and then a line per
finished row, in the order in which rows finish. A killed run loses at most the line that was being written. The file
itself appears at the end, complete and in the order of the rows.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from peft import PeftModel, load_peft_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

import hybrid_engine
from hybrid_engine.checkpoint.export import without_renamed_attribute_warning
from hybrid_engine.distributed.processes import get_rank, get_world_size, init_distributed, on_rank_zero
from hybrid_engine.distributed.verdict import holding_interrupts
from hybrid_engine.generation.core import Sequence
from hybrid_engine.generation.detokenize import IncrementalDetokenizer
from hybrid_engine.generation.live.batches import LiveBatch
from hybrid_engine.generation.memory import check_lengths, plan_rollout
from hybrid_engine.generation.rollout.generator import Generator
from hybrid_engine.inference.build import check_policy
from hybrid_engine.inference.checkpoint import build_empty_model
from hybrid_engine.rlhf.data.parts import wrap_row
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.options.answering import TERMINAL, BaseModelOptions, ModelOptions
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.runs.engine_config import DtypeOptions, apply_tf32, choose_dtype
from hybrid_engine.rlhf.runs.run_folder import set_aside
from hybrid_engine.rlhf.runs.stages import explained, load_model, load_tokenizer

MOST_TOKENS_WITHOUT_LIMIT = 32768
"""Largest number of tokens of a prompt and its answer, for a model whose config names no limit."""


def load_answering(config: ModelOptions) -> tuple[Any, PreTrainedTokenizerBase]:
    """An InferenceEngine and the tokenizer; ValueError, naming the option, for what does not load."""
    tokenizer = load_answering_tokenizer(config)
    model = load_model(AutoModelForCausalLM, str(config.model))
    if config.adapter is not None:
        model = with_adapter(model, config.adapter)
    return build_answering(model, config), tokenizer


def build_answering(model: nn.Module, config: DtypeOptions, **options: Any) -> Any:
    """An InferenceEngine for prompts and answers as long as `model` takes them; `options` go to `init_inference`."""
    apply_tf32(config)
    dtype = choose_dtype(config.dtype)
    return hybrid_engine.init_inference(model.eval(), dtype=dtype, max_out_tokens=most_tokens(model.config), **options)


def most_tokens(config: PretrainedConfig) -> int:
    """The tokens of a prompt and its answer together that a model with this config takes."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS_WITHOUT_LIMIT


def load_answering_tokenizer(config: BaseModelOptions) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the chat template of `--chat-template` if there is one."""
    tokenizer = load_tokenizer(str(config.model))
    if config.chat_template is not None:
        try:
            tokenizer.chat_template = Path(config.chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template={config.chat_template!r} cannot be read: {error}") from error
    return tokenizer


def with_adapter(model: nn.Module, folder: str, name: str = "default") -> PeftModel:
    """`model`, which may be on the meta device, with another adapter; ValueError for an adapter that does not load."""
    if not (Path(folder) / "adapter_config.json").exists():
        raise ValueError(f"--adapter={folder!r} has no adapter_config.json; name a folder that peft wrote")
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    with without_renamed_attribute_warning(), explained("adapter", folder):
        if isinstance(model, PeftModel):
            model.load_adapter(folder, name, low_cpu_mem_usage=is_empty)
        else:
            model = PeftModel.from_pretrained(model, folder, name, low_cpu_mem_usage=is_empty)
        if is_empty:
            _fill(model, folder, name)
    return model


def _fill(model: PeftModel, folder: str, name: str) -> None:
    """Loads the weights of an adapter that peft left on the meta device, because the model's are there."""
    for key, tensor in load_peft_weights(folder, device="cpu").items():
        path, _, kind = key.rpartition(".")
        setattr(model.get_submodule(f"{path}.{name}"), kind, nn.Parameter(tensor, requires_grad=False))


class NamedAdapter(NamedTuple):
    """A folder that peft wrote, with its name."""

    name: str
    """The model name that clients use for it."""
    folder: str


def read_adapters(given: tuple[str, ...], model: str, model_name: str) -> list[NamedAdapter]:
    """Each of `given`, which is `name=folder` or a folder with that name, as peft wrote it for `model`.

    Raises:
        ValueError: a folder holds no adapter or one of another model, or a name is used twice.
    """
    adapters = [_read(value) for value in given]
    names = [model_name, *(adapter.name for adapter in adapters)]
    for adapter in adapters:
        if names.count(adapter.name) > 1:
            raise ValueError(
                f"--adapter={adapter.folder!r} is called {adapter.name!r}, as another one or the model itself is; pass "
                "another name before it, NAME=FOLDER, or --model-name"
            )
        _check_config(adapter, model)
    return adapters


def _read(value: str) -> NamedAdapter:
    name, sign, folder = value.partition("=")
    adapter = NamedAdapter(name, folder) if sign else NamedAdapter(Path(value).resolve().name, value)
    if not adapter.name or not (Path(adapter.folder) / "adapter_config.json").is_file():
        raise ValueError(
            f"--adapter={value!r} has no adapter_config.json; name a folder that peft wrote, or NAME=FOLDER"
        )
    return adapter


def _check_config(adapter: NamedAdapter, model: str) -> None:
    try:
        config = json.loads((Path(adapter.folder) / "adapter_config.json").read_text())
        kind, base = config.get("peft_type"), config.get("base_model_name_or_path") or model
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"--adapter={adapter.folder!r}: its adapter_config.json cannot be read: {error}") from error
    if kind != "LORA":
        raise ValueError(f"--adapter={adapter.folder!r} is of peft_type {kind}, and only LORA is fused; leave it out")
    if Path(base).name != Path(model).resolve().name and Path(base).name != Path(model).name:
        raise ValueError(
            f"--adapter={adapter.folder!r} was trained on {base!r}, and --model={model!r} is another model; where they "
            "are the same, change base_model_name_or_path in its adapter_config.json"
        )


def peft_names(adapters: list[NamedAdapter]) -> dict[str, str]:
    """peft's names by those of clients: peft's are names of modules, which may not contain dots."""
    return {adapter.name: f"adapter_{number}" for number, adapter in enumerate(adapters)}


def load_with_adapters(
    config: BaseModelOptions, adapters: list[NamedAdapter]
) -> tuple[Any, PreTrainedTokenizerBase, dict[str, str]]:
    """An InferenceEngine with `adapters`, its tokenizer, and peft's names of the adapters by those of clients."""
    tokenizer = load_answering_tokenizer(config)
    model = load_model(AutoModelForCausalLM, str(config.model))
    names = peft_names(adapters)
    for adapter in adapters:
        model = with_adapter(model, adapter.folder, names[adapter.name])
    return build_answering(model, config), tokenizer, names


def join(tp: int, pp: int, command: str) -> None:
    """Joins the processes started for `command`; collective. ValueError unless there are `tp` times `pp` of them."""
    init_distributed()
    if get_world_size() != tp * pp:
        raise ValueError(
            f"--tp={tp} times --pp={pp} makes {tp * pp} processes, and {get_world_size()} were started; start them by "
            f"torchrun --nproc-per-node {tp * pp} -m hybrid_engine.cli.cli {command} ..., or change the numbers"
        )


def load_shared(
    config: BaseModelOptions, tp: int, pp: int, adapters: Mapping[str, str]
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model that answers and its tokenizer, where each process reads its part of the weights; collective.

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
    """The folder of a model, downloaded if `source` is a name."""
    if Path(source).is_dir():
        return source
    try:
        return snapshot_download(source, allow_patterns=["*.safetensors", "*.json"])
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"--model={source!r} must be a Hugging Face folder or name that loads: {error}") from error


def telling(sequences: dict[int, list[Sequence]], add: Callable[[int], None]) -> Callable[[], None]:
    """A function that calls `add` on rank 0 for each row of `sequences` that finished since its last call.

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


def run_sequences(
    generator: Generator, sequences: list[Sequence], max_running: int | None, tell: Callable[[], None]
) -> None:
    """Runs `sequences`, the same on all processes and with the same options, until all have finished; collective.

    Args:
        max_running: sequences that decode at once; None: as many as in a rollout.
        tell: called repeatedly on every process. A sequence has finished once it has a `finish_reason` and as many
            log-probabilities as tokens. An error of `tell` ends the rollout on all processes.

    Raises:
        ValueError: the model has no containers, a sequence is too long or there is no memory for one.
    """
    if not sequences:
        return
    if generator.model is None or generator.native is None:
        raise ValueError(f"{generator.fallback_reason}; processes share models with containers only")
    model, native, partners, options = generator.model, generator.native, generator.partners, sequences[0].options
    config = replace(generator.config, max_running=max_running or generator.config.max_running)
    check_lengths([s.prompt.tokens for s in sequences], [options] * len(sequences), config, model.max_positions)
    num_samples = sum(sequence.prompt is sequences[0].prompt for sequence in sequences)
    if options.do_sample:
        options = replace(options, num_return_sequences=num_samples)
    else:  # all samples of a prompt are the same then, and none is a fork
        for sequence in sequences:
            sequence.prompt = sequence.prompt.with_own_blocks()
    spare = generator.memory.spare_bytes(model)
    (least,) = partners.highest([-spare])
    plan = plan_rollout(model, sequences, options, config, -least, native.num_reserved)
    with holding_interrupts(), torch.inference_mode(False), torch.no_grad(), ExitStack() as release:
        cache = partners.agree(lambda: native.gather(plan, release))
        partners.agree(lambda: native.run_turns(plan, cache, None, tell))
    partners.agree(tell)


class Journal:
    """The answers of one run over the rows of a file.

    Args:
        target: the file for the answers.
        identity: what the answers depend on; a journal with another identity is refused.
        restart: move an earlier result and an unfinished journal aside.
        defaults: values for a journal that was begun before an option existed.

    Raises:
        ValueError: there is an earlier result or a journal of another run, or the folder cannot be written to.
    """

    def __init__(
        self, target: Path, identity: dict[str, Any], restart: bool, defaults: Mapping[str, Any] | None = None
    ):
        self.target, self.part = target, target.with_name(f"{target.name}.part")
        if restart:
            set_aside(target.parent, (target.name, self.part.name))
        if target.is_dir():
            raise ValueError(f"--out={str(target)!r} is a folder; name the file that the answers go to")
        if target.exists():
            raise ValueError(f"--out={str(target)!r} is there already; --restart moves it aside, or name another file")
        self.finished: dict[int, dict[str, Any]] = self._read(identity, defaults or {})
        """Answers by row."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            raise ValueError(f"--out={str(target)!r} cannot be written: {error.strerror}; name another file") from error
        self._identity = identity
        self._file: IO[str] | None = None

    def _read(self, identity: dict[str, Any], defaults: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The finished rows of an earlier run; a line that a kill left half-written is cut off."""
        if not self.part.exists():
            return {}
        text = self.part.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self.part, len(whole))
        lines = whole.split(b"\n")[:-1]  # texts may contain other line breaks, which JSON leaves as they are
        if not lines:
            return {}
        options = json.loads(json.dumps(identity))  # turns tuples into lists, as in the journal
        begun = json.loads(json.dumps({name: defaults[name] for name in identity if name in defaults}))
        begun |= json.loads(lines[0])
        if begun != options:
            differing = [name for name in options if begun.get(name) != options[name]]
            raise ValueError(
                f"{self.part} holds answers of a run that differs in {', '.join(differing) or 'its options'}; give the "
                "same options to go on with it, or --restart"
            )
        return {line["row"]: line for line in map(json.loads, lines[1:])}

    def add(self, row: int, answer: dict[str, Any]) -> None:
        """Stores a finished row; where it cannot be written, raises an OSError that says how to continue."""
        line = {"row": row} | answer
        with self._writing():
            self._write(line)
        self.finished[row] = line

    def publish(self) -> None:
        """Writes all rows to the file, in order; raises the same errors as `add`."""
        unfinished = self.target.with_name(f".{self.target.name}.writing")
        with self._writing():
            if self._file is not None:
                self._file.close()
            with unfinished.open("w", encoding="utf-8") as file:
                for row in sorted(self.finished):
                    line = {name: value for name, value in self.finished[row].items() if name != "row"}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self.target)
        self.part.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = (
                f"{error.strerror}; {len(self.finished)} finished rows stay: make room, and the same command goes on"
            )
            raise OSError(error.errno, reason, str(self.part)) from error

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            self._file = self.part.open("a", encoding="utf-8")
            if self._file.tell() == 0:
                self._write(self._identity)
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()


def read_lines(source: DataSource) -> Iterator[PromptRow]:
    """The terminal's lines as they are written, wrapped as the options say; empty lines are skipped."""
    for number, line in enumerate(sys.stdin, 1):
        if line.strip():
            yield wrap_row(source, PromptRow(prompt=line.rstrip("\n"), place=f"line {number}"))


@contextmanager
def opened(out: str) -> Iterator[IO[str]]:
    """The terminal, or a new file; ValueError if the file exists already or cannot be written."""
    if out == TERMINAL:
        yield sys.stdout
        return
    try:
        file = Path(out).open("x", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"--out={out!r} cannot be written: {error.strerror}; name another file") from error
    with file:
        yield file


def write_answer(batch: LiveBatch, sequence: Sequence, tokenizer: PreTrainedTokenizerBase, out: IO[str]) -> None:
    """Runs one sequence and writes its text as it is decoded, without its end token, then a line break."""
    detokenizer, ends = IncrementalDetokenizer(tokenizer), sequence.options.eos_token_ids
    batch.add([sequence])
    while batch.has_work:
        for told in batch.turn():
            if told.finish_reason == "error":
                raise RuntimeError("the model's logits are not finite; check the weights for NaN or inf")
            out.write("".join(detokenizer.add(token) for token in told.tokens if token not in ends))
            out.flush()
    out.write(detokenizer.finish() + "\n")
    out.flush()
