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

SURFACE = "hybrid_engine.extensions.deepspeed.surface"
WITHOUT_TORCH = frozenset(
    {
        "hybrid_engine.cli",
        "hybrid_engine.cli.cli",
        "hybrid_engine.cli.config_file",
        "hybrid_engine.cli.doctor",
        "hybrid_engine.cli.field_meanings",
        "hybrid_engine.cli.freed_memory",
        "hybrid_engine.cli.launcher",
        "hybrid_engine.cli.measure_links",
        "hybrid_engine.cli.option_names",
        "hybrid_engine.cli.plan",
        "hybrid_engine.cli.real_model",
        "hybrid_engine.cli.recipe_options",
        "hybrid_engine.cli.source_tree",
        "hybrid_engine.extensions",
        "hybrid_engine.extensions.deepspeed",
        "hybrid_engine.extensions.deepspeed.deepspeed_names",
        "hybrid_engine.extensions.deepspeed.first_use",
        "hybrid_engine.recipes",
        "hybrid_engine.rlhf",
        "hybrid_engine.rlhf.reports",
        "hybrid_engine.rlhf.reports.difference",
        "hybrid_engine.rlhf.reports.page",
        "hybrid_engine.rlhf.runs",
        "hybrid_engine.rlhf.runs.run_folder",
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
