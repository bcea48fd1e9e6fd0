"""docs/models.md speaks of the families that are tested, and of no difference."""

from tests.support.model_families import BUILDERS, FEATURES, MORE_BUILDERS
from tests.support.paths import DOCS

PAGE = (DOCS / "models.md").read_text()


def test_the_page_has_a_row_for_every_family_and_none_differs():
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][2:]
    families = [*BUILDERS, *MORE_BUILDERS]
    listed = [(row[0].strip("| "), row[1]) for row in rows]
    assert [row for row in listed if row[0] in families] == [(name, FEATURES[name]) for name in families]
    assert {name for name, _ in listed} <= set(FEATURES)  # the page may be of a release with more families
    assert "differs" not in PAGE
