"""The site of the documentation, built by `make docs`, as a reader sees it in a browser."""

import re
from pathlib import Path

import pytest

import tangram
from tests.training.browser import browser

SITE = Path(__file__).parents[2] / "site"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "api.html").exists(), reason="no site/: make docs builds it"),
]


def test_pages_open_without_a_network_and_without_a_complaint() -> None:
    with browser() as page:
        for name in ("index.html", "api.html", "tutorial/4-mark.html", "glossary.html"):
            page.open(SITE / name, width=1200)
            # Search runs in a worker, which browsers refuse to pages that come from files: it needs a server.
            assert [one for one in page.complaints() if "Failed to construct 'Worker'" not in one] == [], name
            assert [one for one in page.requests() if not one.startswith(("file:", "data:"))] == []
            assert page.value("document.querySelector('h1').innerText"), name
            wide = "document.querySelector('.wy-nav-content').scrollWidth <= window.innerWidth"
            assert page.value(wide), f"{name} is wider than the window"


def test_every_public_name_of_the_front_door_has_its_docstring_on_the_page() -> None:
    with browser() as page:
        page.open(SITE / "api.html", width=1200)
        for name in set(tangram.__all__) - {"__version__"}:
            text = page.value(f"document.getElementById('tangram.{name}').parentElement.innerText")
            assert len(re.findall(r"\w+", text)) > 10, name


def test_search_finds_a_word() -> None:
    index = (SITE / "search" / "search_index.json").read_text()
    assert "recompute" in index
