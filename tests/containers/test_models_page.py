"""docs/models.md speaks of the families that are tested, and of no difference."""

from tests.support.model_families import BUILDERS, DISAGREEING, FALLBACKS, FEATURES, MORE_BUILDERS
from tests.support.paths import DOCS

PAGE = (DOCS / "models.md").read_text()


def rows_of(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_the_page_has_a_row_for_every_family_and_none_differs():
    table, _, others = PAGE.partition("\n## ")
    families = [*BUILDERS, *MORE_BUILDERS]  # the page may be of a release with more
    rows = [row[:2] for row in rows_of(table) if row[0] in families]
    assert rows == [[name, FEATURES[name]] for name in families]
    assert set(FALLBACKS) <= {row[0] for row in rows_of(others) if row[1].startswith("no policy for")}
    assert {(name, reason) for name, (reason, _) in DISAGREEING.items()} <= {tuple(row[:2]) for row in rows_of(others)}
    assert "differs" not in PAGE
