"""The page of the configuration is that of the sections, and its how-to uses keys that exist."""

from __future__ import annotations

from tests.docs import config_page


def test_the_page_of_the_configuration_is_of_its_sections() -> None:
    assert config_page.PAGE.read_text() == config_page.page(), "run `python -m tests.docs.config_page`"
