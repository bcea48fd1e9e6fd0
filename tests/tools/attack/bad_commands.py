"""Flags, recipe options and environments that must be refused."""

import contextlib
import functools
import io
import math
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from hybrid_engine.cli import cli, launcher
from hybrid_engine.distributed.processes import describe_process
from hybrid_engine.recipes import dpo, grpo, kto, online_dpo, ppo, reward, sft

from .bad_config import type_name
from .bad_inputs import Call


def build_command_calls() -> list[Call]:
    """The table."""
    return [*_of_recipes(), *_of_the_command(), *of_the_launcher(), *of_environments()]


RECIPES = (sft, reward, ppo, grpo, dpo, kto, online_dpo)
MEASURED = ("evaluate", "--model", "model", "--dataset", "data.jsonl")
TEXTS = ("out", "model", "dataset", "reward")
MAY_BE = {"missing_eos_score": (-1, -1.5), "pass_score": (-1.5,), "seed": (10**12,)}
VALUES: dict[str, tuple[Any, ...]] = {"int": (-1, -(10**12), 10**12), "float": (math.nan, math.inf, -math.inf, -1.5)}
LARGE = {
    "seed": (2**64,),
    "zero_stage": (4,),
    "rollout_size": (33, 0),
    "hidden_size": (65, 0),
    "gamma": (1.5,),
    "lam": (1.5,),
}


def _of_recipes() -> Iterator[Call]:
    for recipe in RECIPES:
        for entry in fields(recipe.Config):
            for value in (*VALUES.get(type_name(entry), ()), *LARGE.get(entry.name, ())):
                if value in MAY_BE.get(entry.name, ()):
                    continue
                name = command_of(recipe)
                run = functools.partial(recipe.Config, **{entry.name: value})
                words = (entry.name.replace("_", "-"), str(value))
                yield Call("recipes", f"{name} {entry.name} = {value!r}", run, words)


def command_of(recipe: Any) -> str:
    """The name under which the command knows a recipe."""
    return recipe.__name__.rpartition(".")[2].replace("_", "-")


def command(*arguments: str) -> None:
    """Runs the command; a status of 2 with one line on stderr becomes a ValueError of that line."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()), elsewhere():
        try:
            status = cli.main(list(arguments))
        except SystemExit as end:
            status = end.code
    lines = [line for line in output.getvalue().splitlines() if not line.startswith(("usage:", "  "))]
    if status == 2 and len(lines) == 1:
        raise ValueError(lines[0])
    if status:
        raise RuntimeError(f"status {status}, {output.getvalue()}")


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """In an empty folder of its own, where a run that goes ahead does no harm."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield


def _of_the_command() -> Iterator[Call]:
    rows: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (("nonsense",), ("nonsense",)),
        (("ppo", "--nonsense", "1"), ("--nonsense",)),
        (("ppo", "--step", "3"), ("--step",)),
        (("ppo", "--model", ""), ("model", "''")),
        (("ppo", "--reward", ""), ("reward", "''")),
        (("ppo", "--dataset", ""), ("dataset", "''")),
        (("ppo", "--out", ""), ("out", "''")),
        (("ppo", "--reward", "nonsense"), ("reward", "nonsense")),
        (("ppo", "--reward", "no.module:f"), ("reward", "no.module")),
        (("ppo", "--dataset", "missing.jsonl"), ("dataset", "missing.jsonl")),
        (("ppo", "--model", "/missing"), ("model", "/missing")),
        (("sft", "--out", "/proc/nowhere"), ("out", "/proc/nowhere")),
        (("ppo", "--reward", "number:tolerance=x"), ("reward", "tolerance", "x")),
        (("ppo", "--reward", "regex:("), ("reward", "regex:(")),
        (("evaluate",), ("--model",)),
        ((*MEASURED, "--reward", "exactt"), ("reward", "exactt", "exact")),
        ((*MEASURED, "--reward", "exact", "number", "--reward-weights", "1"), ("reward-weights", "1", "2")),
        ((*MEASURED, "--reward", "exact", "--reward-weights", "nan"), ("reward-weights", "nan")),
        ((*MEASURED, "--reward", "exact", "-k", "0"), ("--k", "0")),
        (("launch", "--num_gpus", "1", "/missing.py"), ("/missing.py",)),
    ]
    for recipe in RECIPES:
        name = command_of(recipe)
        for entry in fields(recipe.Config):
            if type_name(entry) in ("int", "float"):
                flag = "--" + entry.name.replace("_", "-")
                rows += [((name, flag, "many"), (flag, "many")), ((name, flag, ""), (flag, "''"))]
    for arguments, words in rows:
        yield Call("command", " ".join(arguments), functools.partial(command, *arguments), words)


def of_the_launcher() -> Iterator[Call]:
    for text, words in (
        ("--num_gpus 0 t.py", ("--num_gpus", "0")),
        ("--num_gpus -3 t.py", ("--num_gpus", "-3")),
        ("--num_nodes 0 t.py", ("--num_nodes", "0")),
        ("--num_nodes -2 t.py", ("--num_nodes", "-2")),
        ("--node_rank 3 t.py", ("--node_rank", "3")),
        ("--node_rank -2 t.py", ("--node_rank", "-2")),
        ("--node_rank 2 --num_nodes 2 --master_addr a t.py", ("--node_rank", "2")),
        ("--num_nodes 2 t.py", ("--num_nodes", "2")),
        ("--num_nodes 2 --node_rank 0 t.py", ("--num_nodes", "2", "--master_addr")),
        ("--master_port 0 t.py", ("--master_port", "0")),
        ("--master_port 70000 t.py", ("--master_port", "70000")),
        ("--master_port x t.py", ("--master_port", "x")),
        ("--num_gpus x t.py", ("--num_gpus", "x")),
        ("--num_gpus 1.5 t.py", ("--num_gpus", "1.5")),
        ("--num_nodes x t.py", ("--num_nodes", "x")),
        ("--node_rank x t.py", ("--node_rank", "x")),
        ("--nonsense t.py", ("--nonsense",)),
        ("--num_gpu 1 t.py", ("--num_gpu",)),
        ("--autotuning run t.py", ("--autotuning",)),
        ("--elastic_training t.py", ("--elastic_training",)),
        ("--max_elastic_nodes 2 t.py", ("--max_elastic_nodes",)),
        ("--module --no_python t.py", ("--module", "--no_python")),
        ("--hostfile /missing t.py", ("--hostfile", "/missing")),
        ("--include localhost --exclude localhost t.py", ("--include", "--exclude")),
        ("--include localhost:0 --num_gpus 1 t.py", ("--include", "--num_gpus")),
        ("--include nowhere t.py", ("nowhere",)),
        ("--include localhost:x t.py", ("localhost:x",)),
        ("--exclude localhost t.py", ("--exclude", "localhost")),
        ("--exclude nowhere t.py", ("nowhere",)),
        ("", ("user_script",)),
    ):
        yield Call("launcher", text, functools.partial(launch, text), words)


def launch(text: str) -> None:
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        try:
            launcher.build_command(launcher.build_parser().parse_args(text.split()))
        except SystemExit:
            raise ValueError(output.getvalue().splitlines()[-1]) from None


def of_environments() -> Iterator[Call]:
    two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    rows: list[tuple[dict[str, str], tuple[str, ...]]] = [
        ({"RANK": "5", "WORLD_SIZE": "1"}, ("RANK=5", "WORLD_SIZE=1")),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("RANK=2", "WORLD_SIZE=2")),
        ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE")),
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "RANK")),
        ({**two, "LOCAL_RANK": "2"}, ("LOCAL_RANK=2", "WORLD_SIZE=2")),
        ({**two, "MASTER_ADDR": ""}, ("MASTER_ADDR",)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "2"}, ("RANK=3", "WORLD_SIZE=2")),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "2"}, ("RANK", "x")),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            ("MASTER_ADDR",),
        ),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "2"}, ("RANK=2", "WORLD_SIZE=2")),
        ({"SLURM_STEP_NUM_TASKS": "x", "SLURM_PROCID": "0"}, ("WORLD_SIZE", "x")),
    ]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        values = (
            "x",
            "",
            "-1",
            "1.5",
            " ",
            *(["0"] if name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT") else []),
        )
        rows += [
            ({**two, name: value}, (name, value)) for value in (*values, *(["70000"] if name == "MASTER_PORT" else []))
        ]
    for environment, words in rows:
        yield Call("environment", str(environment), functools.partial(describe_process, environment), words)
