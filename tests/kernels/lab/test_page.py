"""The bench's page: tables between marks, pictures that parse, refusals that leave nothing behind."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import attention_numerics
from bench._numerics import page, plots
from bench._numerics.inputs import Shape, drawn
from bench._numerics.rivals import RIVALS
from bench._numerics.study import CRITERIA, OURS, Score, errors, put_to_the_test
from tangram.errors import UserError

MARKS = "".join(
    f"<!-- {name} -->\nold\n<!-- end of {name} -->\n" for name in ("errors", "diagnosis", "mutants", "survivors")
)


@pytest.fixture(scope="module")
def studied() -> tuple[page.Found, Score]:
    case = drawn("gaussian", Shape(tokens=80, width=8, heads=4, groups=2), seed=3)
    names = ("bf16", "fp8 per tensor")
    done: list[str] = []
    score = put_to_the_test({"gaussian": case}, names, 1, done.append)
    assert done == [*names]
    return list(errors({"gaussian": case, "channels": case}, names)), score


def test_the_page_and_its_pictures(studied: tuple[page.Found, Score], tmp_path: Path) -> None:
    file = tmp_path / page.NAME
    file.write_text(f"# Title\n\n{MARKS}kept\n")
    found, score = studied
    page.write(tmp_path, found, score, 1)
    text = file.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("kept\n")
    assert "old" not in text
    assert f"| **mutants accepted** | {score.wrong} |" in text
    first = next(line for line in text.splitlines() if line.startswith("| bf16 |"))
    numbers = [float(x) for x in first.split("|")[2].split()]
    assert numbers == pytest.approx([100 * one.relative for one in found[0][1].against_inputs.values()], rel=0.01)
    page.write(tmp_path, found, score, 1)
    assert file.read_text() == text
    for name in ("attention-errors.svg", "attention-criteria.svg"):
        root = ET.fromstring((tmp_path / "images" / name).read_text())
        assert root.tag.endswith("svg")
        assert len([*root.iter()]) > 50


def test_the_score_counts_right_kernels_and_mutants(studied: tuple[page.Found, Score]) -> None:
    _, score = studied
    assert score.right == 8
    assert score.refused[OURS] == 0
    assert score.refused["allclose"] == 8 - 4, "bf16 is close, fp8 is not"
    assert score.wrong == sum(kind[""] for kind in score.kinds.values()) == len(score.killed) > 80
    assert score.passed[OURS] == len(score.survivors) <= 2 < score.passed["transformer engine"]
    assert set(CRITERIA) == {OURS, *RIVALS}


def test_without_its_marks_a_page_is_left_alone(studied: tuple[page.Found, Score], tmp_path: Path) -> None:
    file = tmp_path / page.NAME
    file.write_text("# Title\n")
    with pytest.raises(UserError, match="lacks the marks <!-- errors -->"):
        page.write(tmp_path, *studied, 1)
    assert file.read_text() == "# Title\n"
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(
    ("quick", "options", "sentence"),
    [
        (False, {"only": ("speed",)}, "there is no group 'speed' of figures here; known are errors, mutants"),
        (True, {"folder": Path("docs")}, "leave --quick and --only out"),
        (False, {"folder": Path("nowhere")}, '"nowhere" holds no attention-numerics.md'),
    ],
)
def test_options_that_cannot_be(quick: bool, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        next(iter(attention_numerics.rows(quick, **options)))  # pyright: ignore[reportArgumentType]


def test_pictures_show_every_name_and_number() -> None:
    text = plots.bars("title", {"a < b": (12.5, 0.0)}, ("one", "two"), "%")
    assert "a &lt; b" in text
    assert "12.5 %" in text
    text = plots.points("title", {"x": {"one": 1.0, "two": 100.0}, "y": {"one": 0.0}}, "%")
    assert all(word in text for word in ("title", ">x<", ">y<", ">one<", ">two<"))
    assert text == plots.points("title", {"x": {"one": 1.0, "two": 100.0}, "y": {"one": 0.0}}, "%")


@pytest.mark.slow
def test_the_bench_at_its_smallest() -> None:
    rows = {row.figure: row for row in attention_numerics.rows(quick=True)}
    assert rows["right kernels accepted, of 16"].ours == 100
    assert rows["gaussian: bf16"].ours < 1 < rows["gaussian: fp8 per tensor"].ours < rows["gaussian: nvfp4"].ours
    refused = next(row for figure, row in rows.items() if figure.startswith("mutants refused, of"))
    assert refused.ours > 95 > 20 > refused.peers["transformer engine"]
    assert any(figure.startswith("model: ") for figure in rows)
