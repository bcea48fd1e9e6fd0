"""`deepspeed.add_config_arguments`."""

import argparse
import os


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed`, `--deepspeed_config` and their old names to `parser`, and returns it.

    DeepSpeed's launcher passes `--local_rank` to every process; torchrun sets LOCAL_RANK instead, which becomes the
    default of that argument if the parser has it.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="train with the engine; for the script to read")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the config, a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    has_local_rank = any(action.dest == "local_rank" for action in parser._actions)
    if has_local_rank and "LOCAL_RANK" in os.environ:
        parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    return parser
