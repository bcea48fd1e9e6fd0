"""Writes the pages of the site that come from the code: the API reference and the index of files.

`docs/conf.py` calls `write_pages` when a build begins. Docstrings are plain text with names in single backticks and
indented formulas; `restructured` turns them into what Sphinx reads.
"""

import ast
import importlib
import re
from pathlib import Path

PRODUCT = ("hybrid_engine", "containers", "ops", "recipes")
EXCLUDED = ("hybrid_engine/extensions/deepspeed/paths/", "hybrid_engine/extensions/deepspeed/deepspeed_path/")
"""Thin files with DeepSpeed's names, which hold nothing of their own."""
API = {
    "engine": ("The package", "hybrid_engine"),
    "config": ("The config", "hybrid_engine.config", "hybrid_engine.config.blocks"),
    "zero": ("ZeRO", "hybrid_engine.zero"),
    "generation": ("Generation in three levels", "hybrid_engine.generation"),
    "serving": ("The server", "hybrid_engine.serving.web.server", "hybrid_engine.serving.sessions"),
    "rl": ("Advantages, losses, KL", "hybrid_engine.rl.*"),
    "rewards": ("Rewards", "hybrid_engine.rlhf.rewards.*"),
    "containers": ("Containers", "hybrid_engine.containers"),
    "ops": ("Ops", "hybrid_engine.ops", "hybrid_engine.ops.linear_log_prob"),
}
"""Each page of the reference: its title and its modules; `.*` stands for every module of a package."""
SECTION = re.compile(r"(Args|Returns|Raises|Yields):$")
CODE = re.compile(r"(`[^`]+`)")


def write_pages(root: Path, folder: Path) -> None:
    """Writes the Markdown files of the API reference and of the index of files into `folder`."""
    folder.mkdir(exist_ok=True)
    pages = {name: _api_page(root, title, modules) for name, (title, *modules) in API.items()}
    contents = "\n".join(f"- [{title}]({name}.md): {_names(modules)}" for name, (title, *modules) in API.items())
    pages["index"] = f"# API reference\n\nPublic names with their docstrings.\n\n{contents}\n"
    pages["files"] = files_page(root)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # a file that is left alone is not read again
            path.write_text(text)


def _names(modules: list[str]) -> str:
    return ", ".join(f"`{module.removesuffix('.*')}`" for module in modules)


def _api_page(root: Path, title: str, modules: list[str]) -> str:
    listed = [name for module in modules for name in _modules_of(root, module)]
    parts = [f"## `{name}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n```\n" for name in listed]
    return "\n".join([f"# {title}\n", *parts])


def _modules_of(root: Path, module: str) -> list[str]:
    package, is_all, _ = module.partition(".*")
    if not is_all:
        return [module]
    paths = sorted((root / package.replace(".", "/")).glob("[!_]*.py"))
    return [f"{package}.{path.stem}" for path in paths]


def import_lazy_names() -> None:
    """Reads every public name of the packages, which import names on their first use; Sphinx lists what is there."""
    for _, *modules in API.values():
        for package in [importlib.import_module(name) for name in modules if not name.endswith(".*")]:
            for name in getattr(package, "__all__", ()):
                getattr(package, name)


def files_page(root: Path) -> str:
    """The index of files: the path of each file of the product and the first line of its docstring."""
    paths = [path for top in PRODUCT for path in sorted((root / top).rglob("*.py"))]
    lines, folder = ["# Index of files\n", "Each file of the product with the first line of its docstring.\n"], ""
    for path in paths:
        name = path.relative_to(root).as_posix()
        if name.startswith(EXCLUDED) or not (summary := _summary(path)):
            continue
        if path.parent.relative_to(root).as_posix() != folder:
            folder = path.parent.relative_to(root).as_posix()
            lines.append(f"\n## {folder}\n")
        lines.append(f"- `{path.name}`: {CODE.sub(_same, _escaped(summary, '*_<['))}")
    return "\n".join(lines) + "\n"


def _summary(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _same(match: re.Match[str]) -> str:
    return match[0]


def _escaped(text: str, characters: str) -> str:
    """`text` with a backslash before each of `characters` outside of backticks."""
    pattern = re.compile(f"([{re.escape(characters)}])")
    return "".join(part if part.startswith("`") else pattern.sub(r"\\\1", part) for part in CODE.split(text))


def restructured(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText: indented blocks are literal, `*`, `|` and `_` are text."""
    out: list[str] = []
    is_section = is_literal = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if line.strip() and not indented:
            is_section, is_literal = bool(SECTION.match(line)), False
        starts = indented and not is_section and not is_literal and (number == 0 or not lines[number - 1].strip())
        if starts:
            out += ["::", ""]
            is_literal = True
        out.append(line if is_literal else _escaped(line, "*|_"))
    return out
