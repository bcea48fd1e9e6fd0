"""Takes out of a config file what Hjson has and JSON has not: comments and trailing commas.

DeepSpeed reads its config files as Hjson. Of that only these two are common in files called `.json`; strings without
quotes and lines without commas stay errors.
"""

import re

STRING = r'"(?:\\.|[^"\\\n])*"'
COMMENT = r"(?://|\#)[^\n]*|/\*.*?\*/"
_strings_and_comments = re.compile(f"({STRING})|{COMMENT}", re.DOTALL)
_strings_and_trailing_commas = re.compile(rf"({STRING})|,(?=\s*[\]}}])", re.DOTALL)


def without_comments(text: str) -> str:
    """`text` with spaces for `// ...`, `# ...`, `/* ... */` and trailing commas, but not inside strings.

    Every other character stays where it is, so errors that a JSON parser finds have the file's line and column.
    """
    return _strings_and_trailing_commas.sub(_blank_comma, _strings_and_comments.sub(_blank_comment, text))


def _blank_comment(found: re.Match[str]) -> str:
    return found[1] or re.sub(r"[^\n]", " ", found[0])


def _blank_comma(found: re.Match[str]) -> str:
    before = found.string[: found.start()].rstrip()[-1:]
    follows_value = before.isalnum() or before in ('"', "]", "}")  # in `[,]` it does not, and is an error
    return found[1] or (" " if follows_value else ",")
