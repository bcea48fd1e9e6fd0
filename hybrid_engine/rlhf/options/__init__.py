"""Options of recipes: dataclasses that need no torch. `shared.py` has what several recipes take.

The command, a recipe's module (as its `Config`) and the record of a run find the options of a recipe through `CONFIGS`.
"""

import importlib

CONFIGS = {
    "sft": "supervised.SFTConfig",
    "reward": "supervised.RewardConfig",
    "ppo": "reinforcement.PPOConfig",
    "grpo": "reinforcement.GRPOConfig",
    "dpo": "preference.DPOConfig",
    "kto": "preference.KTOConfig",
    "online-dpo": "preference.OnlineDPOConfig",
    "distill": "distillation.DistillConfig",
    "evaluate": "answering.EvaluateConfig",
    "generate": "answering.GenerateConfig",
    "serve": "answering.ServeConfig",
    "agent": "reinforcement.AgentConfig",
}
"""The module and the class of each recipe's options."""


def config_class(recipe: str) -> type:
    """The class of a recipe's options."""
    module, name = CONFIGS[recipe].split(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)  # type: ignore[no-any-return]


def recipe_of(config: object) -> str:
    """The recipe whose options `config` is, as the command names it; for another class the name of its module."""
    kind = type(config)
    module = kind.__module__.rpartition(".")[2]
    recipes = (recipe for recipe, known in CONFIGS.items() if known == f"{module}.{kind.__name__}")
    return next(recipes, module)
