"""The index of the documentation is complete."""

from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "decisions"}
    assert {page for page in pages - {"README.md"} if f"({page})" not in index} == set()
