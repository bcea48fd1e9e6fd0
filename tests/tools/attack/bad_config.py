"""Configs that must be refused: every key with values of the wrong kind or out of range, and files that are none."""

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from hybrid_engine.config import SIMPLE_BLOCKS, EngineConfig, ZeroConfig, load_config
from hybrid_engine.config.blocks import OffloadParamConfig
from hybrid_engine.config.optimizer import OPTIMIZER_PARAMS, SCHEDULER_PARAMS

from .bad_inputs import Call

NOT_A_NUMBER, INFINITE = math.nan, math.inf
OF_TYPE: dict[str, tuple[Any, ...]] = {
    "bool": ("yes", 2, [], 0.5),
    "int": ("three", -5, 1.5, NOT_A_NUMBER, [], True),
    "float": ("much", -1.5, NOT_A_NUMBER, INFINITE, [], True),
    "str": (3, [], True),
}
"""Values that no option of that type takes."""
BLOCKS = {
    **SIMPLE_BLOCKS,
    "zero_optimization": ZeroConfig,
    "zero_optimization.offload_param": OffloadParamConfig,
}
MAY_BE = {
    "steps_per_print": (INFINITE,),  # accelerate's way to say never
    "flops_profiler.output_file": (),
}
"""Values of the wrong-looking kind that mean something."""
BASE = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def as_written(value: Any) -> str:
    """How an error writes a value: at least its type where it is long."""
    return str(value) if isinstance(value, str) else repr(value)


def type_name(entry: Field[Any]) -> str:
    """The first type of a field's annotation."""
    return getattr(entry.type, "__name__", str(entry.type)).split(" | ")[0]


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for "a.b"."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def merge(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in more.items():
        is_block = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if is_block else value
    return result


def config_call(path: str, value: Any, base: dict[str, Any] = BASE, word: str | None = None) -> Call:
    config = merge(base, nested(path, value))
    words = (path.split(".")[-1], as_written(value) if word is None else word)
    return Call("config", f"{path} = {value!r}", lambda: load_config(config, world_size=1), words)


def build_config_calls() -> list[Call]:
    """The table."""
    return [
        *_of_keys(),
        *_of_blocks(),
        *_of_unknown_keys(),
        *_of_optimizers(),
        *_of_schedulers(),
        *_contradictions(),
        *_files(),
    ]


def _of_keys() -> Iterator[Call]:
    for block, cls in {"": EngineConfig, **BLOCKS}.items():
        for entry in fields(cls):
            kind = type_name(entry)
            path = f"{block}.{entry.name}" if block else entry.name
            if kind not in OF_TYPE or not entry.repr:
                continue
            for value in OF_TYPE[kind]:
                if value in MAY_BE.get(path, ()) or (
                    value == -5 and entry.default is not MISSING and entry.default == -1
                ):
                    continue
                yield config_call(path, value)


def _of_blocks() -> Iterator[Call]:
    for block in (*BLOCKS, "optimizer", "scheduler", "optimizer.params", "zero_optimization.offload_optimizer"):
        for value in (3, "on", [1]):
            yield config_call(block, value)


def _of_unknown_keys() -> Iterator[Call]:
    for block, cls in {"": EngineConfig, **BLOCKS}.items():
        for entry in fields(cls):
            if len(entry.name) < 6 or not entry.repr:
                continue
            misspelt = entry.name[:-2] + entry.name[-1] + entry.name[-2]
            if misspelt == entry.name:
                misspelt = entry.name + "x"
            path = f"{block}.{misspelt}" if block else misspelt
            yield config_call(path, 1, word=entry.name)


def _of_optimizers() -> Iterator[Call]:
    for kind in ("Adm", "adamx", "", 3, None, "LBFGS", "SparseAdam", "MuAdam"):
        yield config_call("optimizer.type", kind)
    for kind, names in OPTIMIZER_PARAMS.items():
        for name in names:
            flags = ("bias_correction", "adam_w_mode", "eps_inside_sqrt")
            values = ("x", 2, []) if name in flags else ("x", NOT_A_NUMBER, -1.0, INFINITE, [], True, None)
            if name == "betas":
                values = ("x", [0.9], [0.9, 1.0], [0.9, -0.1], [0.9, NOT_A_NUMBER], 0.9, [0.9, "x"], [1, 2, 3])
            for value in values:
                base = {"train_batch_size": 1, "optimizer": {"type": kind}}
                word = "betas" if name == "betas" else None
                yield config_call(f"optimizer.params.{name}", value, base, word)
        yield config_call("optimizer.params.learning_rate", 0.1, {**BASE, "optimizer": {"type": kind}}, "not a known")
    for kind in ("SGD", "Adagrad", "RMSprop", "NAdam"):
        for name, value in (
            ("lr", NOT_A_NUMBER),
            ("lr", -1.0),
            ("lr", "x"),
            ("weight_decay", -1.0),
            ("nonsense", 1),
            ("maximize", "x"),
        ):
            word = "not a known" if name == "nonsense" else None
            yield config_call(f"optimizer.params.{name}", value, {**BASE, "optimizer": {"type": kind}}, word)


def _of_schedulers() -> Iterator[Call]:
    for kind in ("Warmup", "", 3, None, "LambdaLR"):
        yield config_call("scheduler.type", kind)
    for kind, names in SCHEDULER_PARAMS.items():
        needed = {"total_num_steps": 10} if "total_num_steps" in names else {}
        needed |= {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2} if kind == "OneCycle" else {}
        for name in names:
            flags = ("lr_range_test_staircase", "cycle_momentum")
            values = ("x", 2, []) if name in flags else ("x", NOT_A_NUMBER, -1, [], True)
            for value in values:
                yield config_call(
                    f"scheduler.params.{name}", value, {**BASE, "scheduler": {"type": kind, "params": needed}}
                )
    for kind, name, value in (
        ("StepLR", "gamma", NOT_A_NUMBER),
        ("StepLR", "step_size", "x"),
        ("CosineAnnealingLR", "T", 1),
    ):
        word = "not a known" if name == "T" else None
        yield config_call(f"scheduler.params.{name}", value, {**BASE, "scheduler": {"type": kind}}, word)


def _contradictions() -> Iterator[Call]:
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    for config, words in (
        ({}, ("train_batch_size",)),
        ({"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2}, ("train_batch_size", "5", "2")),
        ({"train_batch_size": 0}, ("train_batch_size", "0")),
        ({"train_batch_size": 4, "gradient_accumulation_steps": 3}, ("train_batch_size", "4", "3")),
        ({**BASE, **both}, ("fp16", "bf16")),
        ({**BASE, "zero_optimization": {"stage": 1, "mics_shard_size": 2}}, ("mics_shard_size", "2", "stage")),
        ({**BASE, "zero_optimization": {"stage": 4}}, ("stage", "4")),
        ({**BASE, "gradient_accumulation_dtype": "fp16"}, ("gradient_accumulation_dtype", "fp16")),
        ({**BASE, "gradient_predivide_factor": 0}, ("gradient_predivide_factor", "0")),
        ({**BASE, "zero_optimization": {"offload_param": {"device": "nvme"}}}, ("device", "nvme")),
        (
            {**BASE, "hybrid_engine": {"enabled": True, "inference_tp_size": 2, "pin_parameters": False}},
            ("pin_parameters",),
        ),
        ({**BASE, "optimizer": {"params": {"lr": 1}}}, ("optimizer.type",)),
        ({**BASE, "scheduler": {"type": "WarmupDecayLR"}}, ("total_num_steps",)),
    ):
        yield Call("config", str(config), lambda config=config: load_config(config, world_size=1), words)


def _files() -> Iterator[Call]:
    folder = Path(tempfile.mkdtemp())
    texts = {
        "empty": b"",
        "cut off": b'{"train_batch_size": 4',
        "no JSON": b"train_batch_size: 4",
        "a list": b"[1]",
        "a number": b"3",
        "null": b"null",
        "not UTF-8": b'{"train_batch_size": "\xff"}',
        "twice": b'{"train_batch_size": 4, "train_batch_size": 5}',
        "UTF-16": json.dumps({"train_batch_size": 4}).encode("utf-16"),
        "zeros": bytes(100),
        "deep": b"[" * 100_000,
    }
    for name, text in texts.items():
        path = folder / f"{name}.json"
        path.write_bytes(text)
        yield Call("config", f"file: {name}", lambda path=path: load_config(path, world_size=1), (name,))
    (folder / "folder.json").mkdir()
    for value in (str(folder / "missing.json"), str(folder / "folder.json"), "", 3, [1], 1.5, b"x"):
        word = str(value) if isinstance(value, str) else repr(value)
        yield Call("config", f"config = {value!r}", lambda value=value: load_config(value, world_size=1), (word,))
