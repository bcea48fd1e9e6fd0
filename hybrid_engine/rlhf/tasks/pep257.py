"""The independent judge: does a docstring's summary line follow PEP 257?

PEP 257 asks for a line that fits on one line, is a phrase ending in a period, and "prescribes the function's effect as
a command ('Do this', 'Return that'), not as a description" (https://peps.python.org/pep-0257/#one-line-docstrings);
PEP 8 limits the lines of docstrings to 72 characters. Five rules, each decidable on the text alone. PPO trains on a
learned reward and uses this judge only to measure, so that what the reward model got wrong shows.

The mood is a heuristic: the first word (after adverbs in -ly) must be in a list of base-form verbs. The list was
collected from the first words of the standard library's own summaries, which leaves out some verbs and therefore errs
on the strict side; words that are more often a noun or an adjective there ("Number of ...", "Empty ...") are left out.
"""

import re

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


def has_imperative_mood(summary: str) -> bool:
    """True if the first word that is not an adverb in -ly is a known base-form verb."""
    words = [word.strip(",:;.!?").lower() for word in summary.split()]
    while len(words) > 1 and words[0].endswith("ly") and words[0] not in _IMPERATIVES:
        words = words[1:]
    return bool(words) and words[0] in _IMPERATIVES


def pep257_violations(summary: str) -> list[str]:
    """The names of the rules that `summary` breaks, in a fixed order; an empty list means that it conforms.

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
    """True if `summary` breaks none of the rules."""
    return not pep257_violations(summary)
