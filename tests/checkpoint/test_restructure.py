"""Any format in, any structure out: the same bits, in bounded memory, there whole or not at all."""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

from tangram.checkpoint.conversion.convert import IDENTITY, LEAST, ConvertOptions, restructure
from tangram.checkpoint.formats import torch_dist
from tangram.checkpoint.formats.archives.archive import Opaque, TensorPlace, read_archive
from tangram.checkpoint.formats.archives.mapped_files import Maps
from tangram.checkpoint.formats.common.outgoing import boxes
from tangram.checkpoint.formats.detect import open_any
from tangram.checkpoint.formats.hf_export import bytes_of
from tangram.checkpoint.loading.page_memory import fetched
from tangram.checkpoint.saving.file_writer import FileStream, Ring
from tangram.checkpoint.store.manifest import BLOCK
from tangram.cli import main
from tangram.errors import UserError
from tangram.relayout import TensorSpec, bind
from tests.checkpoint.making import make
from tests.checkpoint.peers.models import save

TENSORS = {
    "wide": torch.randn(300, 1000),
    "half": torch.randn(33, 7).to(torch.bfloat16),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "scale": torch.tensor(2.0),
    "none": torch.empty(0, 4),
}


def folder_of(path: Path, found: Mapping[str, Tensor] = TENSORS, config: Mapping[str, Any] | None = None) -> Path:
    path.mkdir()
    save_file(dict(found), path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    assert set(a) == set(b)
    return all(a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n], b[n]) for n in a)


# ------------------------------------------------------------ formats


def test_each_format_is_known_by_what_lies_there(tmp_path: Path) -> None:
    hf = folder_of(tmp_path / "hf")
    for to in ("dcp", "torch_dist", "hf"):
        restructure(open_any(hf), bind(IDENTITY, open_any(hf).specs), tmp_path / to / "out", to)
        found = open_any(tmp_path / to / "out")
        assert found.format == to
        restructure(found, bind(IDENTITY, found.specs), tmp_path / to / "back", "hf")
        assert same(load_file(tmp_path / to / "back" / "model.safetensors"), TENSORS)
    make(tmp_path / "step-1", {f"model.{name}": t for name, t in TENSORS.items()}, {})
    own = open_any(tmp_path / "step-1")
    assert own.format == "tangram"
    restructure(own, bind(IDENTITY, own.specs), tmp_path / "own", "hf")
    assert same(load_file(tmp_path / "own" / "model.safetensors"), TENSORS)


def test_torch_itself_loads_what_is_written(tmp_path: Path) -> None:
    hf = open_any(folder_of(tmp_path / "hf"))
    restructure(hf, bind(IDENTITY, hf.specs), tmp_path / "dcp", "dcp", ConvertOptions(memory=LEAST))
    into = {name: torch.zeros_like(t) for name, t in TENSORS.items()}
    with warnings.catch_warnings():  # torch says that there is one process only
        warnings.simplefilter("ignore")
        torch_checkpoint.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(into, TENSORS)


def test_files_of_a_size_and_their_index(tmp_path: Path) -> None:
    many = {f"model.layers.{i}.w": torch.randn(100, 100) for i in range(11)}
    hf = open_any(folder_of(tmp_path / "hf", many))
    made = restructure(hf, bind(IDENTITY, hf.specs), tmp_path / "out", "hf", ConvertOptions(shard=100000))
    assert len([name for name in made.files if name.endswith(".safetensors")]) == 6
    again = open_any(tmp_path / "out")
    assert list(again.specs) == sorted(many, key=lambda name: int(name.split(".")[2]))
    assert all(torch.equal(again.read(p.place, p.tensor), many[p.tensor]) for p in again.pieces)


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 40))
def test_boxes_tile_a_tensor(shape: list[int], most: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int32)
    for box in boxes(tuple(shape), most):
        part = seen[tuple(slice(a, b) for a, b in box)]
        assert part.numel() <= most
        part += 1
    assert bool((seen == 1).all())


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(0, 3))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_stream_of_small_writes_is_a_file(
    tmp_path_factory: pytest.TempPathFactory, some: list[bytes], n: int
) -> None:
    data = [*some, bytes(n * BLOCK), *some]
    file = tmp_path_factory.mktemp("stream") / "x"
    with FileStream(file, Ring()) as stream:
        for one in data:
            assert stream.write(one) == len(one)
        assert stream.tell() == sum(map(len, data))
        stream.finish()
    assert file.read_bytes() == b"".join(data)


def test_what_is_fetched_ahead_comes_in_order_with_its_error() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i
        raise ValueError("at the end")

    seen: list[int] = []
    with pytest.raises(ValueError, match="at the end"), fetched(items()) as some:
        seen.extend(one for one in some)
    assert seen == list(range(100))
    made.clear()
    with fetched(items()) as some:
        assert next(some) == 0
    assert len(made) < 5  # nobody wanted more


def test_layers_are_stacked_only_where_all_are_alike() -> None:
    alike = {f"decoder.layers.{i}.w": TensorSpec((2, 3)) for i in range(3)}
    assert set(torch_dist.stacked(alike, alike)) == set(alike)
    for other in ({"decoder.layers.1.w": TensorSpec((2, 4))}, {"decoder.layers.1.b": TensorSpec((2,))}):
        assert not torch_dist.stacked({**alike, **other}, {**alike, **other})
    gap = {name: spec for name, spec in alike.items() if ".1." not in name}
    assert not torch_dist.stacked(gap, gap)


# ------------------------------------------------------------ what torch.save wrote


class Strange:
    """Something of another framework."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3)


class Several(list[Tensor]):
    """A list of another framework's, which a pickle makes without calling it."""


class Evil:
    """Would run when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, TensorPlace]]:
    """All tensors of a tree of dicts and lists with their names, as `state.0.exp_avg`."""
    pairs: Any = (
        tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    )
    if isinstance(tree, TensorPlace):
        yield prefix, tree
    for key, value in pairs:
        yield from tensors(value, f"{prefix}.{key}" if prefix else str(key))


def test_an_archive_is_read_and_nothing_of_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = torch.arange(24.0).reshape(4, 6)
    tree = {
        "state": {0: {"exp_avg": base[1:3, ::2], "step": torch.tensor(7)}},
        "flags": torch.tensor([True, False]),
        "low": [torch.ones(2, dtype=torch.bfloat16), torch.nn.Parameter(base.T)],
        "evil": Evil(), "strange": Strange(), "several": Several([base]), "text": "hello",
    }  # fmt: skip
    torch.save(tree, tmp_path / "x.pt")
    maps = Maps(tmp_path)
    found = read_archive(maps, "x.pt")
    assert not (tmp_path / "ran").exists()
    assert isinstance(found["evil"], Opaque)
    assert found["evil"].kind == "posix.system"
    assert found["text"] == "hello"
    views = {n: maps.view(p.file, p.offset, p.dtype, p.shape, p.stride) for n, p in tensors(found)}
    expected = {
        "state.0.exp_avg": base[1:3, ::2], "state.0.step": torch.tensor(7), "flags": tree["flags"],
        "low.0": tree["low"][0], "low.1": base.T,
    }  # fmt: skip
    assert same(views, {name: t.detach() for name, t in expected.items()})
    assert isinstance(found["strange"].state["tensor"], TensorPlace)
    assert isinstance(found["several"].items[0], TensorPlace)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=6), st.integers(0, 10_000))
def test_a_damaged_archive_is_refused_or_read(tmp_path: Path, noise: bytes, at: int) -> None:
    torch.save({"a": torch.ones(5), "b": [1, "x"]}, tmp_path / "good.pt")
    data = bytearray((tmp_path / "good.pt").read_bytes())
    at %= len(data)
    data[at : at + len(noise)] = noise
    (tmp_path / "bad.pt").write_bytes(data)
    with contextlib.suppress(UserError):  # and nothing else is raised
        list(tensors(read_archive(Maps(tmp_path), "bad.pt")))


# ------------------------------------------------------------ the command, and what it refuses


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["checkpoint", "convert", *map(str, arguments)]) == code
    out = capsys.readouterr()
    return out.out if code == 0 else out.err


def test_the_dry_run_says_every_tensors_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("qwen3", tmp_path / "hf")
    capsys.readouterr()
    plan = json.loads(said(capsys, tmp_path / "hf", tmp_path / "x", "--to", "torch_dist", "--dry-run", "--json"))
    ways = {way["name"]: way for way in plan["ways"]}
    qkv = ways["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv["shape"] == [128, 32]
    assert [name.split(".")[4] for name in qkv["of"]] == ["q_proj", "k_proj", "v_proj"]
    assert plan["bytes"] == sum(t.nbytes for t in load_file(tmp_path / "hf/model.safetensors").values())
    assert plan["files"] == 1
    assert not (tmp_path / "x").exists()


def test_a_mapping_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path / "hf", {"gate": torch.randn(4, 3), "up": torch.randn(4, 3), "old": torch.ones(2)})
    (tmp_path / "mine").write_text("# both\ngate: f h, up: f h -> both: (f (gate + up)) h\n\nold -> _\n")
    said(capsys, tmp_path / "hf", tmp_path / "out", "--to", "hf", "--mapping", tmp_path / "mine", "--dtype", "float64")
    before, after = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    expected = torch.stack([before["gate"], before["up"]], 1).reshape(8, 3).double()
    assert same(after, {"both": expected})


CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["NOWHERE", "OUT", "--to", "dcp"], "is not there"),
        (["EMPTY", "OUT", "--to", "dcp"], "it is empty"),
        (["HF", "OUT", "--to", "onnx"], "give one of hf, torch_dist, dcp, tangram"),
        (["HF", "HF", "--to", "dcp"], "is there already"),
        (["HF", "OUT", "--to", "dcp", "--memory", "1MiB"], "are too few"),
        (["HF", "OUT", "--to", "dcp", "--dtype", "int8"], "--dtype int8: give one of"),
        (["HF", "OUT", "--to", "dcp", "--transformer-impl", "te"], "give transformer_engine or local"),
        (["HF", "OUT", "--to", "torch_dist"], "no config.json"),
        (["CONFIGURED", "OUT", "--to", "torch_dist"], "does not say the size v of the family llama"),
        (["HF", "OUT", "--to", "torch_dist", "--config", "OTHER"], "no family has the architecture Strange"),
        (["LLAMA", "OUT", "--to", "torch_dist"], "does not say where these tensors go: model.extra"),
        (["FEW", "OUT", "--to", "torch_dist"], "is not what the family llama says"),
        (["CUT", "OUT", "--to", "dcp"], "is damaged or cut off"),
        (["LOST", "OUT", "--to", "dcp"], "its file model-00002-of-00002.safetensors is not there"),
        (["HF", "OUT", "--to", "hf", "--mapping", "a -> b"], "--mapping takes a file: write a -> b into one"),
        (["HF", "OUT", "--to", "hf", "--mapping", "BAD"], "no statement names the source tensor"),
        (["HF", "OUT", "--to", "hf", "--mapping", "BAD", "--size", "g"], "--size g: give a name and a number"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BAD").write_text("wide -> other")
    folder_of(tmp_path / "HF")
    folder_of(tmp_path / "CONFIGURED", TENSORS, CONFIG)
    folder_of(tmp_path / "OTHER", TENSORS, {"architectures": ["Strange"]})
    model = save("llama", tmp_path / "LLAMA").state_dict()
    (tmp_path / "LLAMA" / "model.safetensors").unlink()
    save_file({**model, "model.extra": torch.ones(1)}, tmp_path / "LLAMA" / "model.safetensors")
    save("llama", tmp_path / "FEW")
    save_file({k: t for k, t in model.items() if "up_proj" not in k}, tmp_path / "FEW" / "model.safetensors")
    folder_of(tmp_path / "CUT")
    whole = (tmp_path / "CUT" / "model.safetensors").read_bytes()
    (tmp_path / "CUT" / "model.safetensors").write_bytes(whole[:-100])
    (tmp_path / "LOST").mkdir()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    save_file({"a": torch.ones(1)}, tmp_path / "LOST" / names["a"])
    (tmp_path / "LOST" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    capsys.readouterr()
    before = sorted(tmp_path.iterdir())
    arguments = [str(tmp_path / one) if (tmp_path / one).exists() or one.isupper() else one for one in options]
    told = said(capsys, *arguments, code=2)
    assert words in told
    assert told.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_torch_dist_that_is_cut_off_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("qwen3", tmp_path / "hf")
    said(capsys, tmp_path / "hf", tmp_path / "core", "--to", "torch_dist")
    file = tmp_path / "core" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-5000])
    assert "is cut off" in said(capsys, tmp_path / "core", tmp_path / "back", "--to", "hf", code=2)
    assert not [path for path in tmp_path.iterdir() if "back" in path.name]


def test_least_memory_is_below_the_default() -> None:
    assert bytes_of("512MiB") > LEAST
