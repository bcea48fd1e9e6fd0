"""Recipes: one readable file per training job, with its loop visible."""

from pkgutil import extend_path

# For one version, modules that were below this path: thin files of an extension, which warn.
__path__ = extend_path(__path__, "hybrid_engine.below_recipes")
