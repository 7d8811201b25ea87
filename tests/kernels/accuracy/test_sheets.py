"""Sheets are read as they were written, and told apart; the bench's page, figures and refusals."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import op_accuracy
from bench._accuracy import page, shown, sweep
from bench._accuracy.compare import VERDICTS, compared, verdict
from bench._accuracy.judge import CLASSES
from bench._accuracy.sheet import Sheet, read, write
from bench._accuracy.tables import reasons, rows_of
from bench._accuracy.usage import Use, used
from tangram.errors import UserError

MARKS = ("classes", "outside", "sheets", "differences", "places", "moves", "operators", "unmeasured", "shown")
LIMIT_OF_A_FILE = 300_000


@pytest.fixture(scope="module")
def quick() -> Sheet:
    return sweep.sheet(("pointwise", "reductions", "casts", "moves"), quick=True)


def test_a_sheet_is_read_as_it_was_written(quick: Sheet, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write(quick, path)
    again = read(path)
    assert (again.about, again.copies, again.missing) == (quick.about, quick.copies, quick.missing)
    assert again.outcomes.keys() == quick.outcomes.keys()
    for key, one in quick.outcomes.items():
        other = again.outcomes[key]
        assert other == replace(one, worst=other.worst, over=other.over, own=other.own)
        assert other.worst == pytest.approx(one.worst, rel=0.005)
    write(again, tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == path.read_bytes()


def test_a_sheet_against_itself_is_the_same(quick: Sheet) -> None:
    both = compared(quick, quick)
    assert both.counts == {name: len(quick.outcomes) if name == "same" else 0 for name in VERDICTS}
    assert both.missing == 0


def test_names_of_sheets() -> None:
    about = {"torch": "2.13.0+cpu", "device": "cpu avx512", "setting": "2 threads"}
    assert Sheet(about, {}, {}, {}).name == "torch-2.13.0-cpu-avx512-2-threads"
    about = {"torch": "2.13.0+cu130", "device": "An Accelerator (80GB)", "setting": ""}
    assert Sheet(about, {}, {}, {}).name == "torch-2.13.0-cu130-an-accelerator-80gb"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "other"}', '{"format": "tangram operator accuracy 1", "about": {}}', "nothing"]
)
def test_what_is_no_sheet_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if text != "nothing":
        path.write_text(text)
    with pytest.raises(UserError, match="is no file of operators' accuracy, or a broken one"):
        read(path)


def test_verdicts(quick: Sheet) -> None:
    some = next(iter(quick.outcomes.values()))
    of = {name: replace(some, verdict=name, digest="before") for name in CLASSES}
    now = {name: replace(one, digest="after") for name, one in of.items()}
    assert verdict(of["outside"], of["outside"]) == "same"
    assert verdict(of["faithful"], now["faithful"]) == "differs"
    assert verdict(of["faithful"], now["correct"]) == verdict(of["outside"], now["bounded"]) == "better"
    assert verdict(of["correct"], now["bounded"]) == "worse"
    assert verdict(of["bounded"], now["outside"]) == "is wrong"
    assert verdict(of["outside"], now["outside"]) == "both wrong"


def test_cases_of_one_sheet_alone_are_counted(quick: Sheet) -> None:
    key = next(iter(quick.outcomes))
    less = replace(quick, outcomes={k: v for k, v in quick.outcomes.items() if k != key})
    assert compared(quick, less).missing == compared(less, quick).missing == 1
    assert key not in compared(quick, less).verdicts


def test_another_setting_is_a_sheet_of_its_own(quick: Sheet) -> None:
    threads = torch.get_num_threads()
    other = sweep.sheet(("casts",), setting="2 threads", quick=True)
    assert other.about["setting"] == "2 threads"
    assert torch.get_num_threads() == threads
    assert set(compared(quick, other).verdicts.values()) == {"same"}
    with pytest.raises(ValueError, match="no setting 'three'"):
        sweep.sheet(setting="three")


def test_what_torch_cannot_run_is_missing_and_no_fault() -> None:
    one = next(one for one in sweep.OPERATORS if one.name == "exp")

    def cannot(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("not implemented for this type\nmore words")

    found = sweep.sheet(("pointwise",), quick=True, operators=(replace(one, call=cannot),))
    assert found.missing["exp", "bfloat16"] == "not implemented for this type"
    assert found.outcomes == {}


def test_the_page_and_its_picture(quick: Sheet, tmp_path: Path) -> None:
    file = tmp_path / page.NAME
    marks = "".join(f"<!-- {name} -->\nwas here\n<!-- end of {name} -->\n" for name in MARKS)
    file.write_text(f"# Title\n\n{marks}kept\n")
    key = next(key for key, one in quick.outcomes.items() if one.verdict == "correct" and one.count)
    planted = replace(quick.outcomes[key], verdict="outside", worst=9.0, over=7.0, own=0.5, digest="x")
    other = replace(
        quick, outcomes={**quick.outcomes, key: planted}, about={**quick.about, "setting": "planted"}
    )  # fmt: skip
    uses = {"add.Tensor": Use(("llama", "gpt2"), 3, 4), "polar.default": Use(("llama4_text",), 1, 0),
            "arange.default": Use(("llama",), 1, 0)}  # fmt: skip
    page.write(tmp_path, [quick, other], uses)
    text = file.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("kept\n")
    assert "was here" not in text
    assert "| `add` | 2 | 3 + 4 |" in text
    assert "Not measured: `polar.default` (1)." in text
    assert f"| `{other.name}` | {len(quick.outcomes)} | {len(quick.outcomes) - 1} | 0 | 0 | 0 | 1 | 0 |" in text
    assert f"| `{other.name}` | is wrong | `{key[0]}` ({key[1]}) |" in text
    page.write(tmp_path, [quick, other], uses)
    assert file.read_text() == text
    root = ET.fromstring((tmp_path / "images" / page.PICTURE).read_text())
    assert root.tag.endswith("svg")
    file.write_text("# Title\n")
    with pytest.raises(UserError, match="lacks the marks <!-- classes -->"):
        page.write(tmp_path, [quick, other], uses)


def test_what_is_shown_is_what_torch_gives() -> None:
    found = {text: (got, true) for text, got, true in shown.table()}
    assert found["torch.zeros(1, dtype=bf16).index_add(0, zeros, torch.ones(4096, dtype=bf16))"] == ("256", "4096")
    assert found["torch.tensor([-inf]).pow(-0.5)"] == ("nan", "0")
    assert found["torch.tensor(1 + 2**-8 + 2**-40, dtype=torch.float64).to(bf16)"] == ("1", "1.0078125")
    assert len(found) == len(shown.ALL)


def test_reasons_tell_what_kind_of_wrong(quick: Sheet) -> None:
    some = next(one for one in rows_of(quick).values() if one.cases)
    base = replace(some.cases[0][1], verdict="outside", special=0, worst=5.0, over=7.0, own=0.5)
    kinds = [replace(base, special=2), replace(base, worst=0.7), base, replace(base, own=3.0), base]
    assert reasons(replace(some, cases=tuple(("", one) for one in kinds))) == (
        "NaN or infinite where it should not be (1); another value than the nearest (1); "
        "within a bound for its own type (2); beyond that bound, too (1)"
    )


def test_operators_that_a_model_calls() -> None:
    found = used({"llama": {}})
    assert found["silu.default"] == Use(("llama",), 2, 0)
    assert found["silu_backward.default"] == Use(("llama",), 0, 2)
    assert found["mm.default"].forward == 2 * 7 + 1
    with pytest.raises(UserError, match="of the family llama: "):
        used({"llama": {"num_attention_heads": "many"}})


ALIKE: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "use_qk_norm": True},
    "olmo2": {},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
"""Families for conversion that the page of operators does not count."""


def test_every_family_is_named_as_transformers_has_it_and_is_ours() -> None:
    from importlib import resources

    from bench._accuracy.usage import FAMILIES

    ours = {path.name.removesuffix(".toml") for path in resources.files("tangram.models.families").iterdir()}
    ours = {name for name in ours if "." not in name and not name.startswith("_")} - {"shared"}
    named = {"gemma3" if name == "gemma3_text" else name for name in FAMILIES}
    assert ours - named == {*ALIKE, "qwen2_5_vl", "qwen3_vl", "gemma3_vl"}  # the decoders of those are named


def test_families_that_are_not_named_call_what_others_call() -> None:
    from bench._accuracy.usage import FAMILIES, used

    others = used({name: FAMILIES[name] for name in ("llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral")})
    assert used(ALIKE).keys() <= others.keys()


@pytest.mark.parametrize(
    ("short", "options", "sentence"),
    [
        (False, {"only": ("speed",)}, "there is no group 'speed' of figures here; known are pointwise, reductions"),
        (True, {"folder": Path("docs")}, "leave --quick and --only out"),
        (False, {"folder": Path("nowhere")}, '"nowhere" holds no op-accuracy.md'),
        (True, {"device": "toaster"}, "there is no device 'toaster' here; known are cpu"),
    ],
)
def test_options_that_cannot_be(short: bool, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        next(iter(op_accuracy.rows(short, **options)))  # pyright: ignore[reportArgumentType]


def test_figures_beside_stored_sheets(tmp_path: Path) -> None:
    found = sweep.sheet(("casts",), quick=True)
    write(found, tmp_path / "one.json")
    rows = {row.figure: row for row in op_accuracy.rows(True, only=("casts",), stored=tmp_path)}
    same = next(row for figure, row in rows.items() if ": same, of" in figure)
    assert same.ours == len(found.outcomes)
    wrong = next(row for figure, row in rows.items() if figure.startswith("_to_copy, from float64, bfloat16: outside"))
    assert not wrong.met
    assert wrong.peers == {found.name: wrong.ours}


def test_stored_sheets_are_small_and_of_the_operators_there_are() -> None:
    files = sorted(op_accuracy.STORED.glob("*.json"))
    assert len(files) >= 6
    for path in files:
        sheet = read(path)
        assert path.stat().st_size < LIMIT_OF_A_FILE
        assert path.stem == sheet.name
        assert {name for name, *_ in sheet.outcomes} <= {one.name for one in sweep.OPERATORS}
        assert json.loads(path.read_text())["format"].endswith("1")
