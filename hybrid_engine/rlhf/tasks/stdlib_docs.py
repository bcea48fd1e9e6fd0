"""Signatures and docstring summaries of Python's standard library, a dataset that every machine has.

The source files of the running interpreter are parsed with `ast`; no module is imported and nothing is downloaded. One
example is one public function or method: its qualified name and parameters are the prompt, the first paragraph of its
docstring on one line is the summary. Summaries have their authors' habits: about half of them break PEP 257, which the
reward model learns to detect and PPO to fix.
"""

import ast
import functools
import gc
import hashlib
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid_engine.rlhf.data.parts import is_held_out
from hybrid_engine.rlhf.data.rows import CompletionRow, LearnedRow, PreferenceRow

PROMPT_CHARS = (8, 120)
"""Shortest and longest prompt that is kept, in characters."""
SUMMARY_CHARS = (12, 140)
"""Shortest and longest summary that is kept, in characters."""
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
MAX_SUMMARY_CHARS = 72
_IMPERATIVE_VERBS = """
    abort accept acquire activate add adjust advance allow alter announce append apply arrange ask assert assign
    associate assume attach attempt authenticate become begin bind bisect block bootstrap break bring build
    byte-compile calculate call cancel capture cast catch change check choose clean clear clone close coerce
    collapse collect combine compare compile complete compress compute concatenate configure connect construct
    consume contain control convert copy count create customize cut deactivate debug decide declare decode
    decompress decrement dedent deepcopy define deiconify delegate delete deliver dequeue derive deserialize
    destroy detach detect determine disable disassemble disconnect discard dismiss dispatch display distribute
    divide do download drain draw drop dump duplicate edit emit emulate enable encode end enqueue ensure enter
    enumerate erase escape establish estimate evaluate examine exchange exclude execute exit expand expect
    expose express extend extract fail feed fetch figure fill filter find finish flash flatten flush fold follow
    force format forward free freeze gather generate get give go grab group guess guide handle hash help hide
    highlight identify ignore implement import include increment indent indicate inform inherit inhibit
    initialise initialize initiate insert inspect install instantiate instruct interact interpret intersect
    invalidate invert invoke isolate issue iterate join jump keep kill launch lay leave let link list listen
    load locate lock log login lookup lower make map mark match maximize merge minimize mirror modify monitor
    move multiply name negate negotiate normalize note notify obtain offer omit open optimize order overwrite
    override pack parse pass patch pause peek perform permit pick place play point poll pop populate position
    post pprint prepare prepend preprocess present preserve pretty-print prevent print process produce prompt
    propagate protect provide prune publish pull purge push put query queue quit quote raise re-raise reach read
    rearrange rebuild recalculate receive recognize recompute reconfigure record recreate recurse redirect redo
    reduce refactor refer refill refresh refuse register reject relax release reload remember remove rename
    render reopen repeat replace reply report reposition represent request require reschedule reserve reset
    resize resolve respond restart restore restrict resume retrieve return reveal reverse rewind rewrite rotate
    round run sample save scale scan schedule scroll search see seed seek select send separate serialize serve
    set setup shift show shuffle shut shutdown signal simplify simulate skip sleep slice sort spawn specify
    split squeeze start stop store stream strip submit subscribe substitute subtract suggest sum summarize
    supply suppress suspend swap switch synchronize tag take tell terminate test throw tidy toggle tokenize
    trace track transfer transform translate transmit traverse trigger trim truncate try turn unbind uncomment
    undefine undo unescape uninstall unlink unload unlock unmap unmark unpack unpatch unquote unregister unset
    unsubscribe unwrap update upgrade upload use uuencode validate verify view visit wait wake walk warn watch
    withdraw wrap write yield zip
"""
_IMPERATIVES = frozenset(_IMPERATIVE_VERBS.split())
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|no)\.(?=\s)", re.IGNORECASE)
_SENTENCE_BREAK = re.compile(r"[.!?]['\")]*\s")
_SIBILANTS = ("s", "sh", "ch", "x", "z", "o")


@dataclass(frozen=True, kw_only=True)
class DocExample:
    """One public function of the standard library."""

    prompt: str
    """`module.Class.method(parameters)` and a newline, where the summary begins."""
    summary: str
    """The docstring's first paragraph on one line."""


@functools.cache
def stdlib_examples(root: Path | None = None) -> tuple[DocExample, ...]:
    """Reads every public, documented function below `root` (default: the running interpreter's standard library).

    The order is that of the sorted file names and of the functions in each file; prompts and summaries are unique. The
    files are read at the first call of a process (about two seconds).

    Raises:
        ValueError: `root` holds no usable function, for example if the library is a zip file.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    prompts: set[str] = set()
    summaries: set[str] = set()
    examples = []
    for example in _all_examples(folder):
        if example.prompt not in prompts and example.summary not in summaries and _has_usable_lengths(example):
            examples.append(example)
            prompts.add(example.prompt)
            summaries.add(example.summary)
    if not examples:
        raise ValueError(
            f"the standard library's folder {str(folder)!r} must hold .py files with docstrings and holds none; "
            "use a Python that is installed with its sources"
        )
    return tuple(examples)


def split(examples: Sequence[DocExample]) -> tuple[list[DocExample], list[DocExample]]:
    """Training and held-out examples, each in hash order, so that a prefix is a fair sample of all modules."""
    ordered = sorted(examples, key=lambda example: hashlib.sha256(example.prompt.encode()).digest())
    train = [example for example in ordered if not is_held_out(example.prompt)]
    held_out = [example for example in ordered if is_held_out(example.prompt)]
    return train, held_out


def place_of(example: DocExample) -> str:
    """The place of an example, for errors."""
    return f"the standard library's {example.prompt.strip()}"


def stdlib_row(example: DocExample) -> LearnedRow:
    """The example as a row to learn from."""
    return CompletionRow(prompt=example.prompt, completion=example.summary, place=place_of(example))


def stdlib_rows() -> tuple[list[LearnedRow], list[LearnedRow]]:
    """Training and held-out examples as rows to learn from."""
    train, held_out = split(stdlib_examples())
    return [stdlib_row(example) for example in train], [stdlib_row(example) for example in held_out]


def _all_examples(root: Path) -> Iterator[DocExample]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.isdisjoint(parts) and not any(part.startswith("test_") for part in parts):
            names = parts[:-1] if parts[-1] == "__init__" else parts
            yield from _examples_in_file(path, ".".join(names))


def _examples_in_file(path: Path, module: str) -> Iterator[DocExample]:
    try:
        tree = parse_source(path.read_bytes())
    except (SyntaxError, ValueError):  # lib2to3 keeps files in Python 2 and in broken encodings on purpose
        return
    yield from _examples_in_body(tree.body, module)


def _examples_in_body(body: list[ast.stmt], scope: str) -> Iterator[DocExample]:
    for node in body:
        if isinstance(node, ast.ClassDef) and _is_public(node.name):
            yield from _examples_in_body(node.body, f"{scope}.{node.name}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_public(node.name):
            paragraph = (ast.get_docstring(node) or "").strip().split("\n\n")[0]
            prompt = f"{scope}.{node.name}({ast.unparse(node.args)})\n"
            yield DocExample(prompt=prompt, summary=" ".join(paragraph.split()))


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _has_usable_lengths(example: DocExample) -> bool:
    return (
        PROMPT_CHARS[0] <= len(example.prompt) <= PROMPT_CHARS[1]
        and SUMMARY_CHARS[0] <= len(example.summary) <= SUMMARY_CHARS[1]
        and example.summary.isascii()
        and ">>>" not in example.summary
    )


def has_imperative_mood(summary: str) -> bool:
    """Whether the first word that is not an adverb in -ly is a known base-form verb."""
    words = [word.strip(",:;.!?").lower() for word in summary.split()]
    while len(words) > 1 and words[0].endswith("ly") and words[0] not in _IMPERATIVES:
        words = words[1:]
    return bool(words) and words[0] in _IMPERATIVES


def pep257_violations(summary: str) -> list[str]:
    """The names of the rules that `summary` breaks, in a fixed order; empty if it conforms.

    The names: `one sentence` (one line, no sentence end before its last character), `capital letter` (the first
    character), `full stop` (the last character, not an ellipsis), `72 characters` (at most), `imperative mood`.
    """
    text = _ABBREVIATION.sub("", summary)
    checks = {
        "one sentence": "\n" not in summary and not _SENTENCE_BREAK.search(text),
        "capital letter": summary[:1].isupper(),
        "full stop": summary.endswith(".") and not summary.endswith(".."),
        "72 characters": len(summary) <= MAX_SUMMARY_CHARS,
        "imperative mood": has_imperative_mood(summary),
    }
    return [rule for rule, holds in checks.items() if not holds]


def conforms(summary: str) -> bool:
    """Whether `summary` breaks none of the rules."""
    return not pep257_violations(summary)


def third_person(summary: str, other: str) -> str:
    """'Return the name.' becomes 'Returns the name.'"""
    verb, space, rest = summary.partition(" ")
    if verb.endswith("y") and verb[-2:-1] not in "aeiou":
        return f"{verb[:-1]}ies{space}{rest}"
    return f"{verb}{'es' if verb.endswith(_SIBILANTS) else 's'}{space}{rest}"


def description(summary: str, other: str) -> str:
    """'Return the name.' becomes 'This returns the name.'"""
    described = third_person(summary, other)
    return f"This {described[:1].lower()}{described[1:]}"


def too_long(summary: str, other: str) -> str:
    """Joins `summary` with the other one by 'and' until it exceeds the limit."""
    joined = summary
    while len(joined) <= MAX_SUMMARY_CHARS:
        joined = f"{joined[:-1]}, and {other[:1].lower()}{other[1:]}"
    return joined


FAULTS: dict[str, Callable[[str, str], str]] = {
    "no capital": lambda summary, other: summary[:1].lower() + summary[1:],
    "no full stop": lambda summary, other: summary[:-1],
    "third person": third_person,
    "description": description,
    "two sentences": lambda summary, other: f"{summary} {other}",
    "too long": too_long,
}
"""Functions that take a conforming summary and another function's conforming summary, and break the first."""


def build_preferences(examples: list[DocExample], seed: int) -> list[PreferenceRow]:
    """One or two pairs for every example that conforms or can be fixed; the same for the same arguments.

    The column `kind` names the fault of the rejected summary: a name of `FAULTS`, or "original", "other function",
    "shuffled".
    """
    rng = random.Random(seed)
    conforming = [example.summary for example in examples if conforms(example.summary)]
    if len(conforming) < 2:
        raise ValueError(f"{len(conforming)} of {len(examples)} examples conform to PEP 257, at least 2 must; use more")
    pairs = []
    for example in examples:
        if conforms(example.summary):
            pairs += _pairs_of_conforming(example, conforming, rng)
        elif mended := mend(example.summary):
            pairs.append(_pair(example, mended, example.summary, "original"))
    return pairs


def _pairs_of_conforming(example: DocExample, conforming: list[str], rng: random.Random) -> list[PreferenceRow]:
    other = rng.choice(conforming)
    words = example.summary[:-1].split()
    shuffled = " ".join(rng.sample(words, len(words))).capitalize() + "."
    fault = rng.choice(sorted(FAULTS))
    content = rng.choice([("other function", other), ("shuffled", shuffled)])
    rejected = dict([(fault, FAULTS[fault](example.summary, other)), content])
    return [_pair(example, example.summary, text, kind) for kind, text in rejected.items() if text != example.summary]


def _pair(example: DocExample, chosen: str, rejected: str, kind: str) -> PreferenceRow:
    return PreferenceRow(
        prompt=example.prompt, chosen=chosen, rejected=rejected, columns={"kind": kind}, place=place_of(example)
    )


def mend(summary: str) -> str | None:
    """`summary` with a capital, a full stop and its first verb in the imperative; None if it still does not conform."""
    verb, space, rest = summary.rstrip(".").partition(" ")
    for base in (verb, verb.removesuffix("s"), verb.removesuffix("es"), verb.removesuffix("ies") + "y"):
        mended = f"{base[:1].upper()}{base[1:]}{space}{rest}."
        if conforms(mended):
            return mended
    return None


def parse_source(source: str | bytes) -> ast.Module:
    """`ast.parse` with the garbage collector disabled.

    Python 3.11 and 3.12 fail with `SystemError: AST constructor recursion depth mismatch` if a collection during the
    parse runs code that parses too, such as printing a traceback (CPython's gh-106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if was_enabled:
            gc.enable()
