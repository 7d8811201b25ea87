"""Files of torch.save: whatever a training program keeps, the same bits by the names of the module; nothing is run."""

import contextlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from tangram.checkpoint.formats.common.opened import OpenCheckpoint
from tangram.checkpoint.formats.detect import open_any
from tangram.cli import main
from tangram.errors import UserError
from tests.checkpoint.zero import same, values

BASE = torch.arange(24.0).reshape(4, 6)
TENSORS: dict[str, Tensor] = {
    "view": BASE[1:3, ::2],
    "turned": BASE.T,
    "same": BASE,
    "row": BASE[2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "half": torch.randn(33, 7).to(torch.bfloat16),
    "eighth": torch.randn(5).to(torch.float8_e4m3fn),
    "other": torch.randn(5).to(torch.float8_e5m2),
    "complex": torch.randn(3, dtype=torch.complex64),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "short": torch.tensor([1, 2, 65535], dtype=torch.uint16),
    "flags": torch.tensor([True, False]),
    "scale": torch.tensor(2.0),
    "none": torch.empty(0, 4),
    "param": nn.Parameter(torch.randn(2, 2)),
}


def opened_of(file: Path, tree: object) -> OpenCheckpoint:
    torch.save(tree, file)
    return open_any(file)


def holds(opened: OpenCheckpoint, expected: dict[str, Tensor]) -> None:
    found = values(opened)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert same(found[name], value.detach()), name


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt"])
def test_a_state_dict_of_every_kind_of_tensor(name: str, tmp_path: Path) -> None:
    opened = opened_of(tmp_path / name, TENSORS)
    assert opened.format == "torch"
    holds(opened, TENSORS)


WRAPPED: dict[str, tuple[Any, str]] = {
    "model": (lambda model: {"model": model, "epoch": 3}, "epoch"),
    "state_dict": (lambda model: {"state_dict": model, "args": {"lr": 1}}, "args"),
    "model_state_dict": (lambda model: {"model_state_dict": model, "rng": torch.ones(3)}, "rng"),
    "module": (lambda model: {"module": model}, ""),
    "DDP": (lambda model: {"model": {f"module.{name}": t for name, t in model.items()}}, ""),
    "compiled": (lambda model: {f"_orig_mod.{name}": t for name, t in model.items()}, ""),
    "FSDP": (lambda model: {f"_fsdp_wrapped_module.{name}": t for name, t in model.items()}, ""),
    "Lightning": (
        lambda model: {"pytorch-lightning_version": "2.5", "state_dict": {f"net.{n}": t for n, t in model.items()}},
        "pytorch-lightning_version",
    ),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_where_programs_keep_a_model(kind: str, tmp_path: Path) -> None:
    wrap, skipped = WRAPPED[kind]
    model = {"layers.0.w": torch.randn(3), "layers.1.w": torch.randn(2, 2), "head.w": torch.randn(1)}
    opened = opened_of(tmp_path / "x.pt", wrap(OrderedDict(model)))
    holds(opened, model)
    assert opened.skipped == ((skipped,) if skipped else ())


def test_tied_tensors_come_out_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    opened = opened_of(tmp_path / "x.pt", {"embed.weight": weight, "head.weight": weight})
    assert (tmp_path / "x.pt").stat().st_size < 2000
    holds(opened, {"embed.weight": weight, "head.weight": weight})


# ---------------------------------------------------------------- optimisers


def trained(named: bool, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    params = list(model.named_parameters())
    groups = [params[:1], params[1:]] if named else [[p for _, p in params[:1]], [p for _, p in params[1:]]]
    tables: Any = [{"params": some, "weight_decay": 0.1 * i} for i, some in enumerate(groups)]
    optimiser = kind(tables, lr=0.01, **options)
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
        optimiser.step()
    return model, optimiser


def test_states_come_with_the_names_that_the_optimiser_has(tmp_path: Path) -> None:
    model, optimiser = trained(named=True, amsgrad=True)
    tree = {"model": model.state_dict(), "optimizer": optimiser.state_dict(), "step": 3}
    opened = opened_of(tmp_path / "x.pt", tree)
    names = {p: name for name, p in model.named_parameters()}
    states = {f"{names[p]}.{word}": value for p, some in optimiser.state.items() for word, value in some.items()}
    holds(opened, {**model.state_dict(), **states})
    assert set(opened.states) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert [group["params"] for group in opened.objects["param_groups"]] == [["0.weight"], ["0.bias", "1.weight"]]
    assert opened.objects["settings"] == {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}
    assert opened.objects["step"] == 3
    assert not opened.skipped


def test_states_by_name_as_fsdp_gives_them(tmp_path: Path) -> None:
    moment = torch.randn(3)
    state = {"w": {"momentum_buffer": moment, "step": torch.tensor(4)}}
    optimiser = {"state": state, "param_groups": [{"lr": 0.5, "params": ["w"]}]}
    opened = opened_of(tmp_path / "x.pt", {"model": {"w": torch.ones(3)}, "optim": optimiser})
    holds(opened, {"w": torch.ones(3), "w.momentum_buffer": moment, "w.step": torch.tensor(4.0)})
    assert opened.objects["param_groups"] == [{"lr": 0.5, "params": ["w"]}]


def test_states_by_number_are_left_out_and_the_command_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimiser = trained(named=False)
    torch.save({"model": model.state_dict(), "optimizer": optimiser.state_dict()}, tmp_path / "x.pt")
    assert main(["checkpoint", "convert", str(tmp_path / "x.pt"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    told = capsys.readouterr().out
    assert "not taken: optimizer (its states are by number, and nothing says the parameters' names)" in told
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(written) == {"0.weight", "0.bias", "1.weight"}
    assert all(same(written[name], value) for name, value in model.state_dict().items())


def test_states_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = {"w": {"exp_avg": torch.ones(4), "strange": torch.ones(3)}, "gone": {"exp_avg": torch.ones(3)}}
    optimiser = {"state": state, "param_groups": [{"params": ["w", "gone"]}]}
    opened = opened_of(tmp_path / "x.pt", {"model": {"w": torch.ones(3)}, "optimizer": optimiser})
    assert set(opened.specs) == {"w"}
    assert opened.skipped == (
        "optimizer.state.w.exp_avg (of w)",
        "optimizer.state.w.strange (of w)",
        "optimizer.state.gone (gone is no parameter of the model)",
    )


# ---------------------------------------------------------------- a directory


def test_a_directory_of_pickled_weights_converts_with_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    torch.save(OrderedDict(TENSORS), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_text("{}")
    opened = open_any(tmp_path / "bin")
    assert (opened.format, opened.small) == ("torch", {"config.json": b"{}"})
    assert main(["checkpoint", "convert", str(tmp_path / "bin"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert (tmp_path / "hf" / "config.json").read_text() == "{}"
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(written) == set(TENSORS)
    assert all(same(value, TENSORS[name].detach()) for name, value in written.items())


def sharded(folder: Path) -> dict[str, Tensor]:
    folder.mkdir()
    files = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    tensors = {"a": torch.randn(3), "b": torch.randn(2)}
    for name, file in files.items():
        torch.save({name: tensors[name]}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return tensors


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors = sharded(tmp_path / "hf")
    holds(open_any(tmp_path / "hf"), tensors)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"a": "pytorch_model-00001-of-00002.bin", "c": "pytorch_model-00002-of-00002.bin"}, "says that c is in"),
        ({"a": "pytorch_model-00003-of-00002.bin"}, "its file pytorch_model-00003-of-00002.bin is not there"),
        ({"a": "../x.bin"}, "is no name of a file beside it"),
        ({}, "has no table weight_map"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index: dict[str, str], words: str, tmp_path: Path) -> None:
    sharded(tmp_path / "hf")
    (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(UserError, match=words):
        open_any(tmp_path / "hf")


# ---------------------------------------------------------------- what is refused


class Twice(torch.Tensor):
    """A class of tensors that somebody made."""


class Evil:
    """Would run when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def loop() -> dict[str, Any]:
    found: dict[str, Any] = {"w": torch.ones(2)}
    found["again"] = found
    return found


def bomb() -> dict[str, Any]:
    found: Any = [1]
    for _ in range(40):
        found = [found, found]
    return {"w": torch.ones(2), "more": found}


def quantised() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


BAD: dict[str, tuple[Any, str]] = {
    "quantised": (lambda: {"w": quantised()}, "w in x.pt is a qtensor, which is not read"),
    "sparse": (lambda: {"w": torch.eye(3).to_sparse()}, "w in x.pt is a sparse tensor, which is not read"),
    "a subclass": (lambda: {"a": {"w": torch.ones(2).as_subclass(Twice)}}, "a.w in x.pt is a tests.checkpoint"),
    "conjugated": (lambda: {"w": torch.ones(2, dtype=torch.complex64).conj()}, "conjugated or negated"),
    "a meta tensor": (lambda: {"w": torch.empty(2, device="meta")}, "w in x.pt is a meta tensor no storage"),
    "a module": (lambda: nn.Linear(2, 2), "is a pickled torch.nn.modules.linear.Linear, no state dict"),
    "a module inside": (lambda: {"model": nn.Linear(2, 2)}, "has a pickled torch.nn.modules.linear.Linear"),
    "one tensor": (lambda: torch.ones(3), "is a tensor, no state dict"),
    "no tensor": (lambda: {"epoch": 3}, "has no tensors by name, and none under model"),
    "two models": (lambda: {"model": TENSORS, "state_dict": TENSORS}, "several state dicts, model and state_dict"),
    "a name twice": (lambda: {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "a.b is there twice"),
    "two that become one": (
        lambda: {"w": torch.ones(1), "_orig_mod.w": torch.ones(1)}, "w and _orig_mod.w are both w without",
    ),
    "a loop": (loop, "is nested deeper, or has more in it"),
    "a bomb": (bomb, "is nested deeper, or has more in it"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantised tensors, and sparse ones are in beta
@pytest.mark.parametrize("name", BAD)
def test_what_is_not_read_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = BAD[name]
    torch.save(make(), tmp_path / "x.pt")
    assert main(["checkpoint", "convert", str(tmp_path / "x.pt"), str(tmp_path / "out"), "--to", "dcp"]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]


def test_a_strangers_object_beside_the_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened = opened_of(tmp_path / "x.pt", {"model": {"w": torch.ones(2)}, "evil": Evil(), "optimizer": Evil()})
    holds(opened, {"w": torch.ones(2)})
    assert opened.skipped == ("evil", "optimizer (it is no state dict of one torch optimiser)")
    assert not (tmp_path / "ran").exists()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(UserError, match="is no checkpoint in a format"):
        open_any(tmp_path / "x.txt")
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"what torch before 1.6 wrote is not read: save it again"):
        open_any(tmp_path / "old.pt")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=6), st.integers(0, 10_000), st.booleans())
def test_a_damaged_file_is_refused_or_read(tmp_path: Path, noise: bytes, at: int, short: bool) -> None:
    good = tmp_path / "good.pt"
    if not good.exists():
        state = {"w": {"exp_avg": torch.ones(5), "step": torch.tensor(1.0)}}
        optimiser = {"state": state, "param_groups": [{"lr": torch.tensor(0.1), "params": ["w"]}]}
        torch.save({"model": {"w": nn.Parameter(torch.ones(5))}, "optimizer": optimiser}, good)
    data = bytearray(good.read_bytes())
    at %= len(data)
    data[at : len(data) if short else at + len(noise)] = noise
    (tmp_path / "bad.pt").write_bytes(data)
    with contextlib.suppress(UserError):  # and nothing else is raised
        values(open_any(tmp_path / "bad.pt"))
