"""Maps the folders at the top of the repository onto the `hybrid_engine` package.

`ops/`, `containers/` and `recipes/` are imported as `hybrid_engine.ops`, `hybrid_engine.containers`
and `hybrid_engine.recipes`: a top-level `ops` would shadow a real package of that name.
"""

from setuptools import find_packages, setup

MAPPED_FOLDERS = ("ops", "containers", "recipes")


def mapped_packages(folder: str) -> list[str]:
    """The import names of `folder` and of every package below it."""
    return [f"hybrid_engine.{folder}"] + [f"hybrid_engine.{folder}.{name}" for name in find_packages(folder)]


setup(
    packages=["hybrid_engine"]
    + [f"hybrid_engine.{name}" for name in find_packages("hybrid_engine")]
    + [name for folder in MAPPED_FOLDERS for name in mapped_packages(folder)],
    package_dir={"hybrid_engine": "hybrid_engine"} | {f"hybrid_engine.{folder}": folder for folder in MAPPED_FOLDERS},
    # The folder `paths` is no package of ours: it is on `hybrid_engine.__path__`, with DeepSpeed's modules. Its
    # `deepspeed_path` is for Python's path, where `import deepspeed` finds its package.
    package_data={
        "hybrid_engine": [
            "*.pyi",
            "py.typed",
            "extensions/deepspeed/paths/deepspeed_path/*.dist-info/METADATA",
            "extensions/deepspeed/paths/**/*.py",
        ],
        "hybrid_engine.ops": ["*.c", "*.h"],
        "hybrid_engine.rlhf.reports": ["*.html", "*.css", "*.js"],
    },
)
