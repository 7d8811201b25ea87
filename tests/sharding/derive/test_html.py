"""The page of a derivation: the tree that it draws, and what a browser without a network makes of it."""

from __future__ import annotations

import html
import re
from collections.abc import Generator
from pathlib import Path

import pytest

from tangram.errors import UserError
from tangram.sharding.derive.derive import Derived
from tangram.sharding.derive.explain.show import amount, total
from tangram.sharding.derive.layouts import moved
from tangram.sharding.derive.page.page import Colours, page, write_page
from tangram.sharding.derive.page.tree import Box, Pill, TreeRun, tree
from tests.sharding.derive.test_derive import MEGATRON, derived, language
from tests.training.browser import Browser, browser

LAYERS = "model.layers.{0..1}"


@pytest.fixture(scope="module")
def window() -> Generator[Browser]:
    with browser() as one:
        yield one


def plan(mesh: str = "dp=2 tp=2") -> Derived:
    _, graph, _ = language("llama")
    return derived(graph, mesh, (*MEGATRON[:2], "model.layers.*: b/dp s/tp h" if "dp" in mesh else MEGATRON[2]))


def boxes(box: Box) -> list[Box]:
    return [box, *(inner for item in box.items if isinstance(item, Box) for inner in boxes(item))]


def test_everything_that_runs_and_moves_is_drawn_once() -> None:
    found = plan()
    root = tree(found)
    assert sorted(step.number for step in root.steps()) == [step.number for step in found.folded.steps]
    assert sum(root.received().values()) == pytest.approx(total(found))
    drawn = sorted(pill.moved.nbytes for pill in root.pills())
    assert drawn == sorted(one.nbytes for one in moved(found) if one.nbytes)
    names = [box.path for box in boxes(root)]
    assert len(names) == len({*names})
    assert "model.layers.0.mlp.up_proj" in names
    assert not any(name.startswith("model.layers.1") for name in names)  # equal layers are one
    assert [box.times for box in boxes(root) if box.path == "model.layers.0"] == [2]


def test_what_moves_stands_between_who_makes_it_and_who_takes_it() -> None:
    root = tree(plan("tp=2"))
    layer = next(box for box in boxes(root) if box.path == "model.layers.0")
    said = [
        item.name
        if isinstance(item, Box)
        else f"{item.moved.forward} / {item.moved.backward}"
        if isinstance(item, Pill)
        else "add"
        for item in layer.items
        if not isinstance(item, TreeRun) or not item.aside
    ]
    gather, scatter = "all-gather / reduce-scatter", "reduce-scatter / all-gather"
    assert said == [
        "input_layernorm", gather, "self_attn", scatter, "add",
        "post_attention_layernorm", gather, "mlp", scatter, "add",
    ]  # fmt: skip


def test_texts_are_escaped_and_axes_coloured() -> None:
    colours = Colours(["tp", "dp"])
    assert colours.text("<b>/tp sum:dp tp/tpx") == ('&lt;b&gt;/<b class="a0">tp</b> sum:<b class="a1">dp</b> tp/tpx')
    text = page(plan(), "<script>alert(1)</script>")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert not re.search(r"(src|href)=\"(?!#)", text)  # nothing from elsewhere


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the page cannot be written to .*: No such file"):
        write_page(tmp_path / "none" / "page.html", plan("tp=2"), "llama")


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (1440, True), (420, False)])
def test_a_browser_shows_it(tmp_path: Path, window: Browser, width: int, dark: bool) -> None:
    file = tmp_path / "page.html"
    found = plan()
    write_page(file, found, "llama")
    window.open(file, width=width, dark=dark)
    assert window.complaints() == []
    assert window.requests() == [file.as_uri()]
    assert window.value("document.documentElement.scrollWidth") <= width
    assert window.value("document.querySelectorAll('.box').length") == len(boxes(tree(found)))
    pills = window.value("[...document.querySelectorAll('.pill .sum')].map(one => one.textContent)")
    assert sorted(pills) == sorted(amount(one.nbytes) for one in moved(found) if one.nbytes)
    cut = "document.querySelector('.chip b')"
    assert window.value(f"getComputedStyle({cut}).color !== getComputedStyle({cut}.parentElement).color")


def test_a_click_shows_operators_with_rules_and_lines(tmp_path: Path, window: Browser) -> None:
    file = tmp_path / "page.html"
    write_page(file, plan(), "llama")
    window.open(file, width=1440)
    assert window.value("[...document.querySelectorAll('#panel article')].every(one => one.hidden)")
    window.value(
        "[...document.querySelectorAll('.head')].find(one => one.innerText.trim() === 'q_proj')"
        ".parentElement.querySelector('.run').click()"
    )
    said = "[...document.querySelectorAll('#panel article')].filter(one => !one.hidden).map(one => one.innerText)"
    shown = window.value(said)
    assert len(shown) == 1
    assert "m/dp k, k n/tp -> m/dp n/tp" in shown[0]
    assert re.search(rf"{re.escape(LAYERS)}\.self_attn\.q_proj · modeling_llama.py:\d+", shown[0])
    key = "new KeyboardEvent('keydown', {key: 'Enter', bubbles: true})"
    window.value(f"document.querySelector('.pill').dispatchEvent({key})")
    assert len(window.value(said)) == 1
    assert window.value(said) != shown
    assert window.value("document.querySelector(location.hash).innerText") == window.value(said)[0]  # as a link


def test_search_and_folding(tmp_path: Path, window: Browser) -> None:
    file = tmp_path / "page.html"
    write_page(file, plan(), "llama")
    window.open(file, width=1440)
    window.value("document.getElementById('close').click()")
    visible = "[...document.querySelectorAll('.head')].filter(one => one.checkVisibility()).length"
    assert window.value(visible) < 5
    window.value("search.value = 'o_proj'; search.dispatchEvent(new Event('input'))")
    names = window.value("[...document.querySelectorAll('.found')].map(one => one.dataset.words)")
    assert names == [f"{LAYERS}.self_attn.o_proj", f"{LAYERS}.self_attn.o_proj.weight"]
    assert window.value("[...document.querySelectorAll('.found')].every(one => one.checkVisibility())")
    assert window.value("document.getElementById('count').textContent") == "2 found"
    window.value("search.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))")
    assert window.value("document.getElementById('count').textContent") == "1 of 2"
    heading = window.value("[...document.querySelectorAll('#panel article')].find(o => !o.hidden).innerText")
    assert heading.startswith(f"{LAYERS}.self_attn.o_proj")
    window.value("search.value = 'reduce-scatter'; search.dispatchEvent(new Event('input'))")
    assert window.value("[...document.querySelectorAll('.found')].every(one => one.classList.contains('pill'))")
    window.value("search.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert window.value("document.querySelectorAll('.found').length") == 0


def test_what_moves_most_leads_to_its_place(tmp_path: Path, window: Browser) -> None:
    file = tmp_path / "page.html"
    found = plan()
    write_page(file, found, "llama")
    window.open(file, width=1440)
    window.value("document.getElementById('close').click()")
    window.value("document.querySelector('.most a').click()")
    window.value("new Promise(done => setTimeout(done, 50))")
    chosen = window.value("document.querySelector('.pill.chosen').querySelector('.sum').textContent")
    assert chosen == amount(max(one.nbytes for one in moved(found)))
    assert window.value("document.querySelector('.pill.chosen').checkVisibility()")
    assert html.escape(chosen) in file.read_text()
