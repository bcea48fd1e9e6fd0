"""The `hybrid-engine` command: one subcommand per recipe, with an option per field of its `Config`, and `launch`.

    hybrid-engine ppo --steps 20 --kl-coef 0.1
    hybrid-engine launch --num_gpus 2 train.py

The command stands below the recipes it starts, so it imports them by name when they are asked for.
"""

import argparse
import importlib
import sys
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

from transformers.utils import logging as transformers_logging

from hybrid_engine import launcher
from hybrid_engine.field_meanings import field_meanings

RECIPES = ("sft", "reward", "ppo")
LAUNCH = "launch"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the recipe that `arguments` (default: the command line) name; returns the exit status.

    A ValueError, which is what bad input raises, becomes one line on stderr and the status 2.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == [LAUNCH]:
        return launcher.main(arguments[1:])
    options = vars(build_parser().parse_args(arguments))
    # A classifier's new head and every saved file would each interrupt the progress bar with lines of their own.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    recipe = load_recipe(options.pop("recipe"))
    try:
        recipe.run(recipe.Config(**options))
    except ValueError as error:
        print(f"hybrid-engine: {error}", file=sys.stderr)
        return 2
    return 0


def load_recipe(name: str) -> Any:
    """The module of a recipe, with `Config` and `run(config)`: the one place where an import goes up."""
    return importlib.import_module(f"hybrid_engine.recipes.{name}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; a recipe's module docstring is its description."""
    parser = argparse.ArgumentParser(prog="hybrid-engine", description="Train and generate with one set of weights.")
    commands = parser.add_subparsers(dest="recipe", required=True, metavar="recipe")
    for name in RECIPES:
        recipe = load_recipe(name)
        command = commands.add_parser(
            name,
            help=recipe.__doc__.splitlines()[0],
            description=recipe.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_options(command, recipe.Config)
    # Only for the overview: its arguments are the launcher's own.
    commands.add_parser(LAUNCH, help=str(launcher.__doc__).splitlines()[0], add_help=False)
    return parser


def _add_options(parser: argparse.ArgumentParser, config_class: type) -> None:
    meanings, types_of = field_meanings(config_class), get_type_hints(config_class)
    for field in fields(config_class):
        assert field.default is not MISSING, f"{config_class}.{field.name} needs a default"
        default = "" if field.default is None else f" (default: {field.default})"
        settings: dict[str, Any] = {
            "help": f"{meanings[field.name]}{default}".replace("%", "%%"),
            "default": field.default,
        }
        if types_of[field.name] is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings |= {"type": _single_type(types_of[field.name]), "metavar": "VALUE"}
        parser.add_argument("--" + field.name.replace("_", "-"), **settings)


def _single_type(hint: Any) -> Any:
    """`str` of `str | None`; any other hint unchanged."""
    if get_origin(hint) is types.UnionType:
        return next(option for option in get_args(hint) if option is not type(None))
    return hint


if __name__ == "__main__":
    sys.exit(main())
