"""The generated pages of the documentation match the code."""

from pathlib import Path

import pytest

from server.app.settings import ClientSettings, Settings
from server.cli.reference import PAGES

DOCS = Path(__file__).parents[3] / "docs/reference"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_in_docs_is_the_generated_one(page: str) -> None:
    assert (DOCS / page).read_text() == PAGES[page](), "run: make reference"


def test_every_setting_has_a_description() -> None:
    for name, field in (Settings.model_fields | ClientSettings.model_fields).items():
        assert field.description, name
        assert field.description.endswith("."), name
