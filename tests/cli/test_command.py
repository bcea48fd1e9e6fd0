"""The `hybrid-engine` command itself: what it says quickly, and how it ends."""

import gc
import logging
import subprocess
import sys
import traceback
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_origin, get_type_hints

import pytest

from hybrid_engine.cli import cli
from hybrid_engine.cli.recipe_options import in_options, read_recipe_help
from hybrid_engine.recipes import (
    agent,
    distill,
    dpo,
    evaluate,
    generate,
    grpo,
    kto,
    online_dpo,
    ppo,
    reward,
    serve,
    sft,
)
from hybrid_engine.rlhf.tasks import stdlib_docs
from tests.support import fresh_python

RECIPES = {
    "sft": sft,
    "reward": reward,
    "ppo": ppo,
    "grpo": grpo,
    "dpo": dpo,
    "kto": kto,
    "online-dpo": online_dpo,
    "distill": distill,
    "evaluate": evaluate,
    "generate": generate,
    "serve": serve,
    "agent": agent,
}


def run_python(source, *arguments):
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_the_command_says_without_training_needs_neither_torch_nor_transformers():
    result = run_python("""
import contextlib, sys
from hybrid_engine.cli.cli import main
for line in ["--version", "--help", "ppo --help", "launch --help", "sft --epoch 2", "reward --seed x", "report"]:
    with contextlib.suppress(SystemExit):
        main(line.split())
assert main(["launch", "--include", "a", "--exclude", "b", "train.py"]) == 2
assert main(["diff", "nothing", "nothing"]) == 2
assert main(["report", "nothing"]) == 2
print("imported:", {"torch", "transformers", "datasets", "numpy"} & sys.modules.keys())
""")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("hybrid-engine 0.1.0\n") and result.stdout.endswith("imported: set()\n")


def test_whatever_is_imported_first_of_the_package_brings_all_of_it():
    """Each statement in a process of its own, which has imported nothing of ours."""
    result = fresh_python.run_python(
        "-c",
        """
import os, sys
check = "; import sys; assert d.zero.Init and d.comm.get_rank and d.runtime.zero.partition_parameters"
check += " and d.initialize and d.__version__ and d.ops.adam.__spec__.name == 'hybrid_engine.ops.adam'"
failed = 0
for statement in [
    "import hybrid_engine as d",
    "import hybrid_engine.comm as dist; import hybrid_engine as d; assert dist is d.comm",
    "from hybrid_engine.ops.adam.cpu_adam import *; import hybrid_engine as d",
    "from hybrid_engine.ops.adam import FusedAdam; import hybrid_engine as d; assert d.ops.adam.FusedAdam is FusedAdam",
    "from hybrid_engine import *; initialize; import hybrid_engine as d",
    "import hybrid_engine as d; d.enable_compat(); import deepspeed.comm as c; assert c.get_rank is d.comm.get_rank",
]:
    child = os.fork()
    if child == 0:
        exec(statement + check)
        os._exit(0)
    failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
sys.exit(failed)
""",
    )
    assert result.returncode == 0, result.stderr


def test_a_name_that_the_package_has_not_is_an_attribute_error():
    import hybrid_engine

    with pytest.raises(AttributeError, match="module 'hybrid_engine' has no attribute 'initialise'"):
        _ = hybrid_engine.initialise


@pytest.mark.parametrize("name", RECIPES)
def test_help_shows_every_option_of_a_recipe_with_its_meaning_and_no_notes_for_developers(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    shown = "".join(text.split())  # argparse breaks lines within words that have a hyphen
    options = read_recipe_help(name).options
    assert len(options) > 20
    for option in options:
        assert f"--{option.name.replace('_', '-')}" in shown
        assert option.meaning and "".join(option.meaning.split()) in shown
    assert ".py`" not in text and "engine." not in text


@pytest.mark.parametrize("name", RECIPES)
def test_every_option_stands_under_one_heading_of_the_help(name):
    recipe = read_recipe_help(name)
    shown = [option.name for options in recipe.grouped().values() for option in options]
    assert sorted(shown) == sorted(option.name for option in recipe.options)
    assert next(iter(recipe.grouped())) == "model"


@pytest.mark.parametrize("name", RECIPES)
def test_help_needs_neither_torch_nor_transformers(name):
    source = f"import sys; from hybrid_engine.cli import cli; cli.read_recipe_help({name!r}); print(*sys.modules)"
    loaded = run_python(source).stdout.split()
    assert "hybrid_engine.cli.recipe_options" in loaded
    assert not {"torch", "transformers", "datasets", "peft"} & set(loaded)


@pytest.mark.parametrize("name", RECIPES)
def test_the_options_are_the_fields_of_the_config(name):
    expected = {}
    for field, kind in typed_fields(RECIPES[name].Config):
        if is_dataclass(kind):
            expected |= {inner.name: (inner_kind, inner.default) for inner, inner_kind in typed_fields(kind)}
        else:
            expected[field.name] = (kind, field.default)
    read = {option.name: option for option in read_recipe_help(name).options}
    assert list(read) == list(expected)
    for option in read.values():
        kind, default = expected[option.name]
        assert default == option.default
        kinds = (kind, *get_args(kind))
        assert option.kind in kinds and option.is_list == any(get_origin(one) is tuple for one in kinds)


def typed_fields(config_class):
    types_of = get_type_hints(config_class)
    return [(field, types_of[field.name]) for field in fields(config_class)]


def test_options_come_from_a_file_and_those_of_the_command_line_win(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(ppo, "run", seen.append)
    (tmp_path / "run.yaml").write_text("steps: 7\nkl-coef: 1e-2\nmodel: 'here'\nreward: null\nexact: true\n")
    assert cli.main(["ppo", "--config", str(tmp_path / "run.yaml"), "--steps", "3"]) == 0
    assert seen == [ppo.Config(steps=3, kl_coef=0.01, model="here", exact=True)]


@pytest.mark.parametrize("command", ["dpo --steps", "report run"])
def test_ctrl_c_before_a_recipe_begins_is_one_line(command, monkeypatch, capsys):
    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupt)
    monkeypatch.setitem(cli.OTHERS, "report", SimpleNamespace(main=interrupt))
    assert cli.main(command.split()) == 130
    assert capsys.readouterr().err == "hybrid-engine: interrupted\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stepz: 3", "the recipe has no option 'stepz'; did you mean steps?"),
        ("steps: many", "steps='many' must be of type int"),
        ("exact: 1", "exact=1 must be of type bool"),
        ("model: 3", "model=3 must be of type str; write it in quotes"),
        ("steps", "must contain `name: value` lines"),
        ("a: [", "is not a readable YAML file"),
        ("kl-coef: 1\nkl_coef: 2", "has kl_coef 2 times; keep one of them"),
    ],
)
def test_a_config_file_with_a_fault_is_refused_with_its_name_and_the_fault(content, message, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(content)
    assert cli.main(["ppo", "--config", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert message in said and "run.yaml" in said


def test_an_option_is_not_guessed_from_its_beginning(capsys):
    for line in (["ppo", "--step", "3"], ["sft", "--epoch", "1"], ["--vers"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(line)
        assert stopped.value.code == 2
    assert "unrecognized arguments: --step 3" in capsys.readouterr().err


def test_an_option_that_is_misspelt_is_told_beside_the_nearest(capsys):
    for given, remedy in (
        ("--temprature=1", "did you mean --temperature?"),
        ("--qqq", "see `hybrid-engine grpo --help`"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["grpo", "--steps", "3", given])
        assert stopped.value.code == 2
        assert f"unrecognized arguments: {given}; {remedy}" in capsys.readouterr().err


def test_a_disk_that_takes_no_more_is_one_line(monkeypatch, capsys):
    names = {"__name__": "hybrid_engine.recipes.full"}  # as if one of our modules had met it
    exec("def run(config): raise OSError(28, 'No space left on device', config.out)", names)
    monkeypatch.setattr(dpo, "run", names["run"])
    assert cli.main(["dpo", "--out", "here"]) == 1
    assert capsys.readouterr().err == "hybrid-engine: [Errno 28] No space left on device: 'here'\n"


def test_source_is_read_while_a_finalizer_prints_a_traceback():
    """Printing one parses source, and Python 3.11's parser fails where it is called in the midst of itself."""

    def print_traceback(phase, info):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            traceback.format_exc()

    threshold = gc.get_threshold()
    gc.callbacks.append(print_traceback)
    gc.set_threshold(50)
    try:
        for _ in range(20):
            assert stdlib_docs.parse_source(Path(stdlib_docs.__file__).read_bytes()).body
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(print_traceback)


def test_an_option_given_twice_is_refused(capsys):
    """The second would take the first one's place, and nobody would hear of it; lists go on."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--model", "m", "--model", "b"])
    assert ended.value.code == 2
    assert "--model: takes one value but was given 'm' and 'b'" in capsys.readouterr().err


NAMES = ("exact", "max_new_tokens", "max_running", "tp", "pp", "dtype", "zero_stage", "seed")


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("hybrid_engine.exact: ALiBi; leave hybrid_engine.exact out", "--exact: ALiBi; leave --exact out"),
        ("max_new_tokens=5 is too many", "--max-new-tokens=5 is too many"),
        ("tensor_parallel.tp_size=3 must divide num_heads=4; use 1", "--tp=3 must divide num_heads=4; use 1"),
        ("goes on with 4: hybrid_engine.max_running=4, or", "goes on with 4: --max-running=4, or"),
        ("set zero_optimization.stage to 3", "set --zero-stage to 3"),
        # What is called so already, and what is somebody else's.
        ("--max-new-tokens=5 and --dtype=x", "--max-new-tokens=5 and --dtype=x"),
        (
            "torch.dtype=3, 'seed=3', length:seed=3, group_size=2",
            "torch.dtype=3, 'seed=3', length:seed=3, group_size=2",
        ),
        ("hybrid_engine.max_kv_blocks=2", "hybrid_engine.max_kv_blocks=2"),
    ],
)
def test_what_the_engine_says_names_options_as_they_were_typed(said, typed):
    assert in_options(said, NAMES) == typed


@pytest.mark.parametrize("is_error", [True, False])
def test_a_command_speaks_of_its_options_in_errors_and_notices(is_error, monkeypatch, capsys, caplog):
    line = "hybrid_engine.exact: ALiBi; leave hybrid_engine.exact out"

    def act(*_):
        if is_error:
            raise ValueError(line)
        logging.getLogger("hybrid_engine").warning("%s", line)
        return 0

    monkeypatch.setattr(cli, "is_ours", lambda error: True)
    assert cli.run(["grpo", "--exact"], act) == (2 if is_error else 0)
    assert "--exact: ALiBi; leave --exact out" in (capsys.readouterr().err if is_error else caplog.text)
    logging.getLogger("hybrid_engine").warning("%s", line)
    assert line in caplog.text, "elsewhere the key is called what it is"


def test_an_import_that_swallows_ctrl_c_does_not_go_on():
    lines = ["import importlib, os, signal, time", "from hybrid_engine.cli import cli", "def swallow(name):"]
    lines += [
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
        "    except BaseException: print('went on')",
    ]
    lines += ["importlib.import_module = swallow", "cli.import_recipe('sft')"]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "hybrid-engine: interrupted\n")


def test_ctrl_c_once_more_while_python_ends_is_no_traceback():
    lines = [
        "import os, signal, sys, threading, time",
        "from hybrid_engine.cli import cli",
        "def interrupted(arguments):",
        "    late = lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGINT), time.sleep(60))",
        "    threading.Thread(target=late).start()",  # Python's end waits for it
        "    raise KeyboardInterrupt",
        "cli.OTHERS['doctor'] = cli.Command('', interrupted)",
        "sys.argv = ['hybrid-engine', 'doctor']",
        "sys.exit(cli.main())",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, timeout=50
    )
    assert (ended.returncode, ended.stderr) == (130, "hybrid-engine: interrupted\n")
