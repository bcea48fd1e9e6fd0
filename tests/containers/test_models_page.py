"""docs/models.md speaks of the families that are tested, and of no difference."""

from tests.support.model_families import BUILDERS, FALLBACKS, FEATURES, MORE_BUILDERS
from tests.support.paths import DOCS

PAGE = (DOCS / "models.md").read_text()


def test_the_page_has_a_row_for_every_family_and_none_differs():
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    families = [*BUILDERS, *MORE_BUILDERS]  # the page may be of a release with more
    assert [row[:2] for row in rows if row[0] in families] == [[name, FEATURES[name]] for name in families]
    assert set(FALLBACKS) <= {row[0] for row in rows if row[1].startswith("no policy for")}
    assert "differs" not in PAGE
