"""Imports the whole surface of `hybrid_engine` before the first of its modules that may need torch.

So the order of imports is one and the same whatever a script imports first, and DeepSpeed's paths are there as soon as
it asks for one.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SURFACE = "hybrid_engine.compat.surface"
WITHOUT_TORCH = frozenset(
    {
        "hybrid_engine.command",
        "hybrid_engine.command.cli",
        "hybrid_engine.command.config_file",
        "hybrid_engine.command.doctor",
        "hybrid_engine.command.field_meanings",
        "hybrid_engine.command.freed_memory",
        "hybrid_engine.command.launcher",
        "hybrid_engine.command.measure_links",
        "hybrid_engine.command.option_names",
        "hybrid_engine.command.plan",
        "hybrid_engine.command.real_model",
        "hybrid_engine.command.recipe_options",
        "hybrid_engine.command.source_tree",
        "hybrid_engine.compat",
        "hybrid_engine.compat.deepspeed_names",
        "hybrid_engine.compat.first_use",
        "hybrid_engine.recipes",
        "hybrid_engine.recipes.reports",
        "hybrid_engine.recipes.reports.difference",
        "hybrid_engine.recipes.reports.page",
        "hybrid_engine.recipes.reports.run_data",
        "hybrid_engine.recipes.runs",
        "hybrid_engine.recipes.runs.answers_log",
        "hybrid_engine.recipes.runs.config_files",
        "hybrid_engine.recipes.runs.metric_names",
        "hybrid_engine.recipes.runs.metrics_file",
        "hybrid_engine.recipes.runs.run_folder",
        SURFACE,
    }
)
"""What may be imported without the surface."""


def import_surface() -> None:
    """Puts everything that `hybrid_engine` offers into it; nothing when that is done or under way."""
    importlib.import_module(SURFACE)


def watch_imports() -> None:
    """From now on the first import of a module below `hybrid_engine` imports the surface before it."""
    sys.meta_path.insert(0, _FirstUse())


class _FirstUse(MetaPathFinder):
    """Is asked before all other finders, and steps aside once it has done its work."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("hybrid_engine.") or fullname in WITHOUT_TORCH:
            return None
        sys.meta_path.remove(self)
        import_surface()
        return _spec_of_loaded(fullname) if fullname in sys.modules else None


def _spec_of_loaded(fullname: str) -> ModuleSpec:
    """A spec with which the import under way takes the module that the surface has brought meanwhile."""
    module = sys.modules[fullname]
    spec = ModuleSpec(fullname, _AlreadyLoaded(module))
    module.__spec__ = spec  # importlib prefers a module's own spec, and would run the file a second time
    return spec


class _AlreadyLoaded(Loader):
    """Loads nothing, and gives the module its own spec back."""

    def __init__(self, module: ModuleType):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
