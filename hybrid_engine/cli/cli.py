"""The `hybrid-engine` command: a subcommand per recipe, with an option per field of its `Config`, and other commands.

    hybrid-engine ppo --steps 20 --kl-coef 0.1
    hybrid-engine launch --num_gpus 2 train.py
    hybrid-engine diff runs/a runs/b
    hybrid-engine report runs/a runs/b
    hybrid-engine plan ppo --steps 20 --kl-coef 0.1

The command is a layer below the recipes that it starts. It imports a recipe by name and only to run or plan it;
`--help` and the checks of option names read the dataclasses of `rlhf/options/`, which need no torch.
"""

import argparse
import ctypes
import difflib
import errno
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from hybrid_engine.cli import launcher
from hybrid_engine.cli.commands import (
    DOCTOR_DESCRIPTION,
    LINKS_DESCRIPTION,
    MODEL_DESCRIPTION,
    PLAN_DESCRIPTION,
    PLANNED,
    PlanWishes,
    doctor,
    measure_links,
    read_wishes,
    real_model,
    show_plan,
)
from hybrid_engine.cli.recipe_options import InOptions, Option, in_options, read_config_file, read_recipe_help
from hybrid_engine.rlhf import reports
from hybrid_engine.rlhf.options import CONFIGS
from hybrid_engine.rlhf.runs.run_folder import has_checkpoint, left_behind, results_of

RECIPES = tuple(CONFIGS)


class Command(NamedTuple):
    """A command that is not a recipe."""

    description: str
    main: Callable[[Sequence[str]], int]
    """Takes the arguments after the command's name; returns the exit status."""


OTHERS = {
    "launch": Command(launcher.DESCRIPTION, launcher.main),
    "diff": Command(reports.DIFF_DESCRIPTION, reports.print_difference),
    "report": Command(reports.REPORT_DESCRIPTION, reports.write_page),
    "measure-links": Command(LINKS_DESCRIPTION, measure_links),
    "doctor": Command(DOCTOR_DESCRIPTION, doctor),
    "real-model": Command(MODEL_DESCRIPTION, real_model),
}
PLAN = "plan"
FAILED, REFUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses for a disk that is full, for input that is refused, and for Ctrl-C."""
NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
KEPT_BYTES = 2**30
LARGEST_BLOCK = 32 * 2**20  # glibc raises this threshold by itself up to this value; larger blocks are returned at once
SETTINGS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")
SPINS, MOST_SPINS = "GOMP_SPINCOUNT", 2000  # 20 to 70 us; the default of GNU OpenMP is 300,000
WAIT_SETTINGS = (SPINS, "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the recipe that `arguments` (default: the command line) name; returns the exit status.

    A ValueError raised by a module of this package means bad input: it becomes one line on stderr and status 2. A full
    disk gives one line and status 1, Ctrl-C one line and status 130. Any other error leaves with its traceback, because
    it may come from the user's own reward or data.
    """
    status = _run_command(sys.argv[1:] if arguments is None else list(arguments))
    if arguments is None and status == INTERRUPTED:  # only Python's shutdown is left, which may wait for threads
        sys.stdout.flush()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    return status


def _run_command(arguments: list[str]) -> int:
    """Runs `main` on a list of arguments."""
    try:
        if arguments and arguments[0] == PLAN:
            wishes, command = read_wishes(arguments[1:])
            if not command or command[0] not in PLANNED:
                told = f"plan {command[0]}" if command and not command[0].startswith("-") else "plan"
                print(
                    f"hybrid-engine: {told}: the first argument must be one of {', '.join(PLANNED)}",
                    file=sys.stderr,
                )
                return REFUSED
            return run(command, partial(plan_recipe, wishes))
        return run_other(arguments[0], arguments[1:]) if arguments and arguments[0] in OTHERS else run(arguments)
    except KeyboardInterrupt:  # in a command that is not a recipe, or before a recipe began
        print("hybrid-engine: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(arguments: Sequence[str], act: Callable[..., int] | None = None) -> int:
    """Runs the recipe that `arguments` name, or `act` on it and its options; returns the exit status."""
    given = read_arguments(arguments)
    name = given.pop("recipe")
    options = read_recipe_help(name).options
    try:
        if (path := given.pop("config", None)) is not None:
            given = read_config_file(path, options) | given
        with speaking_of(options):
            return (act or run_recipe)(name, options, given)
    except ValueError as error:
        if not is_ours(error):
            raise
        print(f"hybrid-engine: {in_options(str(error), names_of(options))}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        return _failed_writing(error)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            settled = {option.name: option.default for option in options} | given
            print("; ".join(["hybrid-engine: interrupted", *how_to_go_on(name, settled)]), file=sys.stderr)
        return INTERRUPTED


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the recipe and its options; prints a line and raises SystemExit for an argument that it does not take."""
    parser = build_parser()
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        flags = ["--config", *(flag for option in read_recipe_help(found.recipe).options for flag in flags_of(option))]
        nearest = difflib.get_close_matches(name, flags, 1) if name.startswith("-") else []
        remedy = (
            f"did you mean {nearest[0]}?" if nearest else f"see `hybrid-engine {found.recipe} --help` for its options"
        )
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; {remedy}")
    return vars(found)


def _failed_writing(error: OSError) -> int:
    """Prints that the disk is full and returns the exit status; raises any other error again."""
    if error.errno not in NO_PLACE or not is_ours(error):
        raise error
    print(f"hybrid-engine: {error}", file=sys.stderr)
    return FAILED


def names_of(options: Sequence[Option]) -> list[str]:
    return [option.name for option in options]


@contextmanager
def speaking_of(options: Sequence[Option]) -> Iterator[None]:
    """Makes log lines name options as the user typed them, while the context is open."""
    logger, words = logging.getLogger("hybrid_engine"), InOptions(names_of(options))
    logger.addFilter(words)
    try:
        yield
    finally:
        logger.removeFilter(words)


def run_other(name: str, arguments: Sequence[str]) -> int:
    """Runs a command that is not a recipe; returns the exit status."""
    try:
        return int(OTHERS[name].main(arguments))
    except ValueError as error:
        if not is_ours(error):
            raise
        print(f"hybrid-engine: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        return _failed_writing(error)


def run_recipe(name: str, options: Sequence[Option], given: Mapping[str, Any]) -> int:
    """Runs the recipe with the options that the user gave."""
    keep_freed_memory()
    share_processors()
    recipe = import_recipe(name)
    recipe.run(build_config(recipe.Config, options, given))
    return 0


def plan_recipe(wishes: PlanWishes, name: str, options: Sequence[Option], given: Mapping[str, Any]) -> int:
    """Prints the memory that the recipe takes with these options; returns the exit status."""
    recipe = import_recipe(name)
    planning = importlib.import_module("hybrid_engine.rlhf.planning.comparison")
    config = build_config(recipe.Config, options, given)
    return show_plan(planning.plan(name, config, wishes.memory, wishes.processes), wishes)


def import_recipe(name: str) -> Any:
    """Returns the module of a recipe; this function and `plan_recipe` hold the only imports of a higher layer."""
    with _interrupted_at_once():
        recipe = importlib.import_module(f"hybrid_engine.recipes.{name.replace('-', '_')}")
    transformers_logging = importlib.import_module("transformers.utils.logging")
    # A classifier's new head and each saved file would interrupt the progress bar with lines of their own.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return recipe


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """Makes Ctrl-C end the process during an import: the imported module may swallow a KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        print("hybrid-engine: interrupted", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def build_config(config_class: Any, options: Sequence[Option], given: Mapping[str, Any]) -> Any:
    """The `Config` of a recipe; a field whose type has options is built by that type's `from_options`."""
    held: dict[str, dict[str, Any]] = {option.holder: {} for option in options if option.holder}
    own: dict[str, Any] = {}
    for option in options:
        if option.name in given:
            value = given[option.name]
            value = tuple(value) if option.is_list and value is not None else value
            (held[option.holder] if option.holder else own)[option.name] = value
    types_of = get_type_hints(config_class)
    return config_class(**own, **{name: types_of[name].from_options(part) for name, part in held.items()})


def is_ours(error: BaseException) -> bool:
    """Whether a module of this package raised `error`, and not a library or the user's own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).startswith("hybrid_engine.")


def how_to_go_on(recipe: str, options: Mapping[str, Any]) -> list[str]:
    """Advice to print after Ctrl-C, or an empty list; a checkpoint that was being written does not count."""
    if recipe == "generate" and options["out"] not in (None, "-"):
        return ["finished rows are kept; the same command continues with the others"]
    if recipe in ("generate", "serve"):
        return []
    return [_how_to_train_on(recipe, options)]


def _how_to_train_on(recipe: str, options: Mapping[str, Any]) -> str:
    folder = Path(options["out"])
    if "resume" in options and has_checkpoint(folder, recipe):
        place = "instead of --restart" if options["restart"] else "added"
        return f"the same command with --resume {place} continues from the last checkpoint"
    if "resume" in options and left_behind(folder, results_of(recipe)):
        return "no checkpoint has been saved yet; the same command with --restart starts over"
    return "finished stages are kept; the same command restarts the unfinished one"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="hybrid-engine", description="Train and generate with one set of weights.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hybrid-engine {version('hybrid-engine')}")
    commands = parser.add_subparsers(dest="recipe", required=True, metavar="command", title="commands")
    for name in RECIPES:
        recipe = read_recipe_help(name)
        command = commands.add_parser(
            name,
            help=recipe.text.splitlines()[0],
            description=recipe.text,
            usage=f"hybrid-engine {name} [options]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument(
            "--config",
            default=argparse.SUPPRESS,
            metavar="FILE",
            help="YAML file with these options, such as an earlier run's config.yaml; command-line options override it",
        )
        for title, options in recipe.grouped().items():
            heading = command.add_argument_group(title)
            for option in options:
                _add_option(heading, option)
    others = {name: other.description for name, other in OTHERS.items()} | {PLAN: PLAN_DESCRIPTION}
    for name, text in others.items():  # only for the overview: they parse their own arguments
        commands.add_parser(name, help=text.splitlines()[0], add_help=False)
    return parser


class _Once(argparse.Action):
    """Stores a value; a second value is an error and does not replace the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            first = getattr(namespace, self.dest)
            raise argparse.ArgumentError(self, f"takes one value but was given {first!r} and {values!r}; give it once")
        setattr(namespace, self.dest, values)


def flags_of(option: Option) -> list[str]:
    """The flags of an option on the command line."""
    flags = ["--" + option.name.replace("_", "-")]
    return [f"-{option.name}", *flags] if len(option.name) == 1 else flags


def _add_option(parser: argparse._ArgumentGroup, option: Option) -> None:
    text = option.meaning.replace("%", "%%")
    settings: dict[str, Any] = {"default": argparse.SUPPRESS}  # distinguishes options that the user gave from defaults
    if option.kind is bool and option.default is False:
        settings |= {"action": "store_true"}
    elif option.kind is bool:
        settings |= {"action": argparse.BooleanOptionalAction}
    elif option.is_list:
        settings |= {"type": option.kind, "nargs": "+", "action": "extend", "metavar": "VALUE"}
    else:
        settings |= {"type": option.kind, "metavar": "VALUE", "action": _Once}
    if option.kind is not bool and option.default not in (None, ()):
        shown = " ".join(map(str, option.default)) if option.is_list else option.default
        text += f" (default: {shown})".replace("%", "%%")
    parser.add_argument(*flags_of(option), help=text, **settings)


def keep_freed_memory() -> bool:
    """Lets this process keep up to 1 GiB of the memory that it frees; returns whether it does so now.

    Changes nothing where the environment already configures glibc's malloc, or where the allocator is not glibc's.
    """
    return not any(name in os.environ for name in SETTINGS) and set_thresholds(LARGEST_BLOCK, KEPT_BYTES)


def share_processors() -> bool:
    """Lets the threads of a product sleep soon while they wait for each other; returns whether they do now.

    By default they spin for milliseconds. If another process has taken the processor of one of them, the others then
    keep it from coming back: next to seven busy processes on two cores a server took 3 to 26 s for an answer of eight
    tokens, and takes 0.8 to 1.3 s. Alone on the machine, a decode step takes 0.95 to 1.1 of its time (SmolLM2-135M and
    a model of 17M parameters, 1 to 64 rows, two threads, AMD Zen 5, torch 2.13).

    Changes nothing where the environment already says how threads wait, or if torch, which reads it, was imported.
    """
    if "torch" in sys.modules or any(name in os.environ for name in WAIT_SETTINGS):
        return False
    os.environ[SPINS] = str(MOST_SPINS)
    return True


def set_thresholds(block_bytes: int, top_bytes: int) -> bool:
    """Takes blocks below `block_bytes` from the heap, and returns its top when more than `top_bytes` of it are free.

    Returns False where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no such function; on Windows a library needs a name
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, block_bytes)) and bool(mallopt(M_TRIM_THRESHOLD, top_bytes))


if __name__ == "__main__":
    sys.exit(main())
