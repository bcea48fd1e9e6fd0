"""Arguments that must be refused by `initialize`, the engine's methods, `init_inference` and their kin."""

import copy
import functools
import math
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import hybrid_engine
from hybrid_engine.optim.lr_schedules import SCHEDULES
from tests.support.training_reference import VOCABULARY, tiny_llama

from .bad_config import as_written
from .bad_inputs import Call

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
CONFIG: dict[str, Any] = {"train_batch_size": 2, "optimizer": ADAM}
PLAIN = {"train_batch_size": 2}
HYBRID = {**CONFIG, "hybrid_engine": {"enabled": True}}


def build_argument_calls() -> list[Call]:
    """The table."""
    return [*_of_initialize(), *_of_methods(), *_of_generate(), *_of_init_inference(), *_of_schedules()]


@functools.cache
def small_model() -> nn.Module:
    return tiny_llama()


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What a refused `initialize` must leave alone."""
    names = tuple((name, id(p), p.dtype, type(p), p._version) for name, p in model.named_parameters())
    return names, type(model), tuple(sorted(vars(model)))


def initialize_call(name: str, words: tuple[str, ...], **arguments: Any) -> Call:
    """`arguments` may be functions of the model, under a name that ends in `_of`."""
    model = small_model()

    def run() -> None:
        given = {key: value for key, value in arguments.items() if not key.endswith("_of")}
        built = {key.removesuffix("_of"): value(model) for key, value in arguments.items() if key.endswith("_of")}
        hybrid_engine.initialize(**{"model": model, "config": CONFIG, **given, **built})

    return Call("initialize", name, run, words, lambda: fingerprint(model))


def _of_initialize() -> Iterator[Call]:
    rows: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
        (f"model = {value!r}", ("model", type(value).__name__), {"model": value})
        for value in (None, 3, "gpt2", [1], nn.Linear, {"a": 1}, torch.zeros(2))
    ]
    rows += [
        ("model on meta", ("model", "meta"), {"model_of": lambda _: meta_model()}),
        ("model with one parameter on meta", ("model", "meta"), {"model_of": lambda _: partly_meta()}),
        ("an engine as model", ("model", "DeepSpeedEngine"), {"model_of": lambda _: engine()}),
        ("a hybrid engine as model", ("model", "HybridEngine"), {"model_of": lambda _: hybrid()}),
        ("an engine inside the model", ("model", "DeepSpeedEngine"), {"model_of": lambda _: nn.Sequential(engine())}),
        ("an inference engine as model", ("model", "InferenceEngine"), {"model_of": lambda _: inference()}),
        ("DataParallel", ("model", "DataParallel"), {"model_of": nn.DataParallel}),
        ("a model without parameters", ("model", "parameters"), {"model": nn.ReLU()}),
        ("a model without trainable parameters", ("requires_grad",), {"model_of": lambda _: frozen()}),
        (
            "optimizer over another model",
            ("optimizer",),
            {"optimizer_of": lambda _: sgd(tiny_llama()), "config": PLAIN},
        ),
        (
            "LBFGS",
            ("optimizer", "LBFGS"),
            {"optimizer_of": lambda m: torch.optim.LBFGS(m.parameters()), "config": PLAIN},
        ),
        ("LBFGS by a function", ("optimizer", "LBFGS"), {"optimizer": torch.optim.LBFGS, "config": PLAIN}),
        (
            "a closure optimizer",
            ("optimizer", "Closure"),
            {"optimizer_of": lambda m: Closure(m.parameters(), lr=0.1), "config": PLAIN},
        ),
        (
            "SparseAdam",
            ("optimizer", "SparseAdam"),
            {"optimizer_of": lambda m: torch.optim.SparseAdam(m.parameters()), "config": PLAIN},
        ),
        (
            "an engine's optimizer",
            ("optimizer", "ZeroOptimizer"),
            {"optimizer_of": lambda _: engine().optimizer, "config": PLAIN},
        ),
        ("model_parameters without a tensor", ("model_parameters",), {"model_parameters": [1, 2]}),
        (
            "model_parameters of another model",
            ("model_parameters",),
            {"model_parameters_of": lambda _: tiny_llama().parameters()},
        ),
        ("no model_parameters", ("model_parameters",), {"model_parameters": []}),
        ("model_parameters = 3", ("model_parameters", "3"), {"model_parameters": 3}),
        ("lr_scheduler without optimizer", ("scheduler",), {"lr_scheduler": lambda o: None, "config": PLAIN}),
        ("config twice", ("config", "config_params"), {"config_params": CONFIG}),
        ("no config", ("config",), {"config": None}),
        ("training_data = 3", ("training_data", "int"), {"training_data": 3}),
        ("training_data without length", ("training_data", "generator"), {"training_data": (i for i in range(3))}),
        ("training_data empty", ("training_data", "0"), {"training_data": []}),
        (
            "training_data smaller than a batch",
            ("training_data",),
            {"training_data": [1], "config": {**CONFIG, "train_batch_size": 8}},
        ),
        ("collate_fn = 3", ("collate_fn", "3"), {"training_data": list(range(8)), "collate_fn": 3}),
        ("mesh_param = 3", ("mesh_param", "3"), {"mesh_param": 3}),
        ("mesh_param = (1, 2)", ("mesh_param", "2"), {"mesh_param": (1, 2)}),
        ("mpu = 3", ("mpu",), {"mpu": 3}),
        ("mpu of two", ("mpu", "2"), {"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 2)}),
        ("dist_init_required = 'x'", ("dist_init_required", "x"), {"dist_init_required": "x"}),
        ("hybrid engine of an encoder", ("hybrid_engine",), {"model_of": lambda _: nn.Linear(2, 2), "config": HYBRID}),
        (
            "tensor parallelism of two on one",
            ("inference_tp_size", "2"),
            {"config": {**CONFIG, "hybrid_engine": {"enabled": True, "inference_tp_size": 2}}},
        ),
        (
            "shards of three on one process",
            ("mics_shard_size", "3"),
            {"config": {**CONFIG, "zero_optimization": {"stage": 3, "mics_shard_size": 3}}},
        ),
    ]
    for value in (3, "Adam", [1], {"type": "Adam"}):
        rows.append(
            (f"optimizer = {value!r}", ("optimizer", type(value).__name__), {"optimizer": value, "config": PLAIN})
        )
        rows.append((f"lr_scheduler = {value!r}", ("lr_scheduler", type(value).__name__), {"lr_scheduler": value}))
    for option, value in bad_numbers():
        set_it = functools.partial(broken_optimizer, option=option, value=value)
        rows.append(
            (
                f"an optimizer with {option} = {value!r}",
                ("optimizer", option, repr(value)),
                {"optimizer_of": set_it, "config": PLAIN},
            )
        )
    for port in (-1, 70000, "x", 1.5):
        rows.append(
            (f"distributed_port = {port!r}", ("distributed_port", as_written(port)), {"distributed_port": port})
        )
    for name, words, arguments in rows:
        yield initialize_call(name, words, **arguments)


def bad_numbers() -> list[tuple[str, Any]]:
    return [
        *[("lr", value) for value in (math.nan, math.inf, -1.0, "x")],
        *[("weight_decay", value) for value in (math.nan, math.inf)],
        *[("eps", value) for value in (math.nan, -1.0)],
        *[("betas", value) for value in ((0.9, math.nan), (0.9, 1.5))],
    ]


def broken_optimizer(model: nn.Module, option: str, value: Any) -> torch.optim.Optimizer:
    """As a script that sets an option later makes it: torch checks only what its constructor is given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.param_groups[0][option] = value
    return optimizer


class Closure(torch.optim.SGD):
    """Needs the loss."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return tiny_llama()


def partly_meta() -> nn.Module:
    model = tiny_llama()
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.to("meta"))
    return model


def frozen() -> nn.Module:
    return tiny_llama().requires_grad_(False)


@functools.cache
def engine() -> Any:
    return hybrid_engine.initialize(model=tiny_llama(), config=CONFIG)[0]


@functools.cache
def hybrid() -> Any:
    return hybrid_engine.initialize(model=tiny_llama(), config=HYBRID)[0].eval()


@functools.cache
def evaluator() -> Any:
    return hybrid_engine.initialize(model=tiny_llama(), config=PLAIN)[0]


@functools.cache
def inference() -> Any:
    return hybrid_engine.init_inference(tiny_llama(), dtype=torch.float32)


def _of_methods() -> Iterator[Call]:
    loss = torch.ones((), requires_grad=True)
    folder = Path(tempfile.mkdtemp())
    (folder / "file").write_text("")
    rows: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
        ("backward(None)", lambda: engine().backward(None), ("backward()", "NoneType")),
        ("backward(1.0)", lambda: engine().backward(1.0), ("backward()", "float")),
        ("backward of three losses", lambda: engine().backward(torch.ones(3, requires_grad=True)), ("backward()", "3")),
        ("backward of a constant", lambda: engine().backward(torch.ones(())), ("backward()", "requires_grad")),
        ("backward without an optimizer", lambda: evaluator().backward(loss), ("backward()", "optimizer")),
        ("step without backward", lambda: engine().step(), ("step()", "backward")),
        ("step without an optimizer", lambda: evaluator().step(), ("step()", "optimizer")),
        ("optimizer.step(closure)", lambda: engine().optimizer.step(lambda: 1.0), ("closure",)),
        (
            "set_gradient_accumulation_boundary('x')",
            lambda: engine().set_gradient_accumulation_boundary("x"),
            ("is_boundary", "x"),
        ),
        ("half()", lambda: engine().half(), ("half()", "fp16")),
        ("bfloat16()", lambda: engine().bfloat16(), ("bfloat16()", "bf16")),
        ("double()", lambda: engine().double(), ("double()",)),
        ("to(float64)", lambda: engine().to(torch.float64), ("float64",)),
        ("to(bfloat16) of a hybrid engine", lambda: hybrid().to(torch.bfloat16), ("bfloat16",)),
        ("deepcopy", lambda: copy.deepcopy(engine()), ("deepcopy",)),
        ("deepcopy of a hybrid engine", lambda: copy.deepcopy(hybrid()), ("deepcopy",)),
        ("pickle", lambda: pickle.dumps(engine()), ("pickle", "save_checkpoint")),
        ("torch.save(engine)", lambda: torch.save(engine(), folder / "engine.pt"), ("pickle", "save_checkpoint")),
        ("generate in training mode", lambda: generate_in_training(), ("generate()", "eval()")),
        ("train('x')", lambda: engine().train("x"), ("mode", "x")),
        ("GatheredParameters(3)", lambda: hybrid_engine.zero.GatheredParameters(3), ("params", "3")),
        ("GatheredParameters(['x'])", lambda: hybrid_engine.zero.GatheredParameters(["x"]), ("params", "x")),
        ("GatheredParameters(modifier_rank='x')", lambda: gather(modifier_rank="x"), ("modifier_rank", "x")),
        ("GatheredParameters(modifier_rank=9)", lambda: gather(modifier_rank=9), ("modifier_rank", "9")),
    ]
    for tag in ("", ".", "..", "a/b", ".hidden", "latest", "../x", "/etc"):
        rows.append(
            (f"save_checkpoint(tag={tag!r})", functools.partial(engine().save_checkpoint, folder, tag), ("tag", tag))
        )
        rows.append((f"load_checkpoint(tag={tag!r})", functools.partial(engine().load_checkpoint, folder, tag), (tag,)))
    for value in (3, 1.5, ["x"], folder / "file"):
        word = str(value) if isinstance(value, Path) else repr(value)
        for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model"):
            which = "load_dir" if name == "load_checkpoint" else "save_dir"
            rows.append((f"{name}({word})", functools.partial(getattr(engine(), name), value), (which, word)))
    for value in (folder / "missing", "", None):
        rows.append(
            (
                f"load_checkpoint({value!r})",
                functools.partial(engine().load_checkpoint, value),
                ("load_dir", str(value or "")),
            )
        )
    for name in ("../x", "/tmp/x", "", ".", "a/../../b"):
        save = functools.partial(engine().save_16bit_model, folder / "model", name)
        rows.append((f"save_16bit_model(save_filename={name!r})", save, ("save_filename", name)))
    for state in (lambda: 0, open, object(), {1: {2: SimpleNamespace()}}):
        save = functools.partial(engine().save_checkpoint, folder, "t", {"mine": state})
        rows.append((f"client_state of {type(state).__name__}", save, ("client_state", "mine")))
    for name, run, words in rows:
        yield Call("engine", name, run, words)


def gather(**options: Any) -> None:
    with hybrid_engine.zero.GatheredParameters(list(engine().module.parameters()), **options):
        pass


def generate_in_training() -> None:
    hybrid().train()
    try:
        hybrid().generate(torch.ones(1, 3, dtype=torch.int64))
    finally:
        hybrid().eval()


NUMBERS = ("x", math.nan, [], -1.0, True)
GENERATE: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (0, -1, 1.5, "x", math.nan, [], True, 10**6, 10**12),
    "min_new_tokens": (-1, 1.5, "x", [], True, 10**6),
    "max_length": (0, -1, 2.5, "x", [], True),
    "min_length": (-1, 2.5, "x", []),
    "num_return_sequences": (0, -1, 1.5, "x", [], True, 10**13),
    "temperature": (0.0, math.inf, *NUMBERS),
    "top_k": (-1, 1.5, "x", [], math.nan, True),
    "top_p": (0.0, 1.5, *NUMBERS),
    "min_p": (1.5, *NUMBERS),
    "repetition_penalty": (0.0, math.inf, *NUMBERS),
    "num_beams": (0, -1, 1.5, "x"),
    "do_sample": ("yes", 2, []),
    "return_dict_in_generate": ("yes", 2, []),
    "eos_token_id": (-1, 1.5, "x", [-1], ["x"], True),
    "pad_token_id": (-1, VOCABULARY, 1.5, "x", [1], True),
    "seed": (1.5, "x", [], 2**63, True),
    "generation_config": (3, "x", {"top_k": 1}),
    "max_new_token": (5,),
    "topk": (5,),
    "nonsense": (5,),
}
PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "None": (None, ("input_ids",)),
    "a string": ("hello", ("input_ids", "str")),
    "a list": ([[1, 2]], ("input_ids", "list")),
    "one row": (torch.ones(3, dtype=torch.int64), ("input_ids", "3")),
    "three dimensions": (torch.ones(1, 1, 3, dtype=torch.int64), ("input_ids", "1, 1, 3")),
    "floats": (torch.ones(1, 3), ("input_ids", "float32")),
    "no rows": (torch.ones(0, 3, dtype=torch.int64), ("input_ids", "0")),
    "no columns": (torch.ones(2, 0, dtype=torch.int64), ("input_ids", "0")),
    "beyond the vocabulary": (torch.full((1, 3), VOCABULARY), ("input_ids", str(VOCABULARY))),
    "negative": (torch.full((1, 3), -1), ("input_ids", "-1")),
    "bools": (torch.ones(1, 3, dtype=torch.bool), ("input_ids", "bool")),
}
MASKS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "another shape": (torch.ones(2, 4), ("attention_mask", "4")),
    "zero": (torch.zeros(2, 3), ("attention_mask",)),
    "a hole": (torch.tensor([[1, 0, 1], [1, 1, 1]]), ("attention_mask",)),
    "padding on the right": (torch.tensor([[1, 1, 0], [1, 1, 1]]), ("attention_mask",)),
    "halves": (torch.full((2, 3), 0.5), ("attention_mask", "0.5")),
    "a list": ([[1, 1, 1]] * 2, ("attention_mask", "list")),
    "twos": (torch.full((2, 3), 2), ("attention_mask", "2")),
}


def _of_generate() -> Iterator[Call]:
    prompts = torch.ones(2, 3, dtype=torch.int64)
    for who, build in (("hybrid", hybrid), ("inference", inference)):
        for name, values in GENERATE.items():
            for value in values:
                options = {"do_sample": True, "max_new_tokens": 2, name: value}
                if name in ("max_length", "min_length"):
                    del options["max_new_tokens"]
                word = as_written(value[0] if isinstance(value, list) and value else value)
                word = type(value).__name__ if name == "generation_config" else word
                yield generate_call(who, f"{name} = {value!r}", build, prompts, options, (name, word))
        for name, (ids, words) in PROMPTS.items():
            if ids is None and who == "inference":
                continue  # transformers begins with the first token then
            yield generate_call(who, f"input_ids: {name}", build, ids, {}, words)
        for name, (mask, words) in MASKS.items():
            yield generate_call(who, f"attention_mask: {name}", build, prompts, {"attention_mask": mask}, words)


def generate_call(
    who: str, name: str, build: Callable[[], Any], ids: Any, options: dict[str, Any], words: tuple[str, ...]
) -> Call:
    def state() -> Any:
        return build().generator.workspace.allocated_bytes, torch.is_grad_enabled(), build().training

    return Call("generate", f"{who}, {name}", lambda: build().generate(ids, **options), words, state)


INFERENCE: dict[str, tuple[Any, ...]] = {
    "dtype": ("float3", 3, [], torch.int32),
    "tensor_parallel": ("x", {"tp_size": 0}, {"tp_size": 2}, {"tp_size": "x"}, {"nonsense": 1}, -1),
    "max_out_tokens": (0, -1, "x", 1.5, []),
    "replace_with_kernel_inject": ("yes", 3),
    "injection_policy": (3, "x"),
    "checkpoint": ("missing.json", 3),
    "enable_cuda_graph": ("yes", 3),
    "nonsense": (1,),
    "quant": ({"enabled": True},),
    "config": (3, "missing.json", {"nonsense": 1}, []),
}


def _of_init_inference() -> Iterator[Call]:
    for value in (3, "x", None, nn.Linear, [1]):
        yield Call(
            "init_inference",
            f"model = {value!r}",
            lambda value=value: hybrid_engine.init_inference(value),
            ("model", type(value).__name__),
        )
    for name, values in INFERENCE.items():
        for value in values:
            word = next(iter(value)) if isinstance(value, dict) and value else as_written(value)
            word = word if isinstance(word, str) else word.__name__
            word = "" if name in ("nonsense", "checkpoint") else word
            yield Call(
                "init_inference",
                f"{name} = {value!r}",
                lambda name=name, value=value: hybrid_engine.init_inference(small_model(), **{name: value}),
                (name, word),
            )


def _of_schedules() -> Iterator[Call]:
    for name, cls in SCHEDULES.items():
        needed: dict[str, Any] = {"total_num_steps": 5} if "Decay" in name or "Cosine" in name else {}
        needed |= {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2} if name == "OneCycle" else {}
        rates = {
            "WarmupCosineLR": "warmup_min_ratio",
            "LRRangeTest": "lr_range_test_min_lr",
            "OneCycle": "cycle_max_lr",
        }
        for option in (rates.get(name, "warmup_max_lr"), *(["warmup_num_steps"] if "Warmup" in name else [])):
            for value in (math.nan, math.inf, -1.0, "x"):
                build = functools.partial(build_schedule, cls, {**needed, option: value})
                yield Call("schedules", f"{name}({option}={value!r})", build, (option, as_written(value)))


def build_schedule(cls: Any, options: dict[str, Any]) -> None:
    cls(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), **options)
