"""Saving on four real ranks: every element once, whatever cuts it; read back by safetensors' own library."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from tangram.checkpoint.saving.file_layout import Outgoing, add_piece
from tangram.checkpoint.saving.rank_parts import About, SaveError
from tangram.checkpoint.saving.save import save
from tangram.checkpoint.state.entries import LocalPart
from tangram.checkpoint.store import commits, digest
from tangram.checkpoint.store.manifest import Manifest
from tangram.errors import UserError
from tangram.layout import Region
from tests.checkpoint.saving import RANKS, STATES, meshes, trained, whole_values
from tests.ranks import start


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found, group = meshes(), dist.group.WORLD
    said: list[str] = []
    for name, make in STATES.items():
        save(make(found), f"{folder}/{name}", group=group, about=About(step=2, mesh="dp=2 tp=2"))
    Path(f"{folder}/in the way").write_text("")
    for path in (f"{folder}/copies", f"{folder}/in the way/x"):
        try:
            save({"model": nn.Linear(1, 1)}, path, group=group)
        except SaveError as error:
            said.append(str(error))
    Path(f"{folder}/{rank}.txt").write_text("\n".join(said))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four ranks saved every state."""
    folder = tmp_path_factory.mktemp("saved")
    start(_rank, str(folder), ranks=RANKS)
    return folder


def put_together(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Every tensor, whole, from the files as safetensors reads them and the regions in their names."""
    found = {
        name: torch.zeros(t.spec.shape, dtype=getattr(torch, t.spec.dtype)) for name, t in manifest.tensors.items()
    }
    times = {name: np.zeros(t.numel(), int) for name, t in found.items()}
    for file in sorted(path.glob("*.safetensors")):
        section = file.name.partition("-")[0]
        with safe_open(file, framework="pt") as stream:
            assert stream.metadata()["tangram_save"] == manifest.id
            for key in stream.keys():  # noqa: SIM118
                name, region = _split(f"{section}.{key}", manifest)
                flat = np.concatenate([np.arange(a, b) for a, b in region.runs(found[name].shape)])
                values = (
                    stream.get_tensor(key).reshape(-1).view(found[name].dtype)
                )  # bytes, where it has no name for it
                found[name].view(-1)[torch.from_numpy(flat)] = values
                times[name][flat] += 1
    assert all((count == 1).all() for count in times.values())
    return found


def _split(key: str, manifest: Manifest) -> tuple[str, Region]:
    if key in manifest.tensors:
        return key, Region.full(manifest.tensors[key].spec.shape)
    name, _, rest = key.partition(" [")
    return name, Region.parse(f"[{rest}")


@pytest.mark.parametrize("name", STATES)
def test_every_element_is_there_once(saved: Path, name: str) -> None:
    manifest = commits.read_manifest(saved / name)
    found, wanted = put_together(saved / name, manifest), whole_values(name)
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        assert torch.equal(found[key], values), key
        sums: dict[str, digest.Sums] = {key: digest.NOTHING}
        spec = manifest.tensors[key].spec
        if values.numel():
            whole = Outgoing(key, spec, Region.full(spec.shape))
            add_piece(whole, 0, values.contiguous().reshape(-1).view(torch.uint8).numpy(), sums)
        assert manifest.tensors[key].digest == digest.digest(spec.dtype, spec.shape, sums[key])
    assert (manifest.step, manifest.mesh) == (2, "dp=2 tp=2")


def test_objects_are_kept(saved: Path) -> None:
    objects = commits.read_manifest(saved / "fsdp").objects
    assert (objects["progress.step"], objects["progress.name"]) == (2, "fsdp")
    (group,) = objects["optim.param_groups"]
    assert group["lr"] == 0.01
    assert group["params"] == ["embed.weight", "block.weight", "block.bias", "gain.weight", "gain.bias"]


def test_copies_are_shared_out_by_bytes(saved: Path) -> None:
    manifest = commits.read_manifest(saved / "copies")
    shares = [
        sum(t.nbytes for t in manifest.tensors.values() for p in t.pieces if f"-0000{rank + 1}-" in p.file)
        for rank in range(RANKS)
    ]
    largest = max(tensor.nbytes for tensor in manifest.tensors.values())
    assert sum(shares) == manifest.nbytes
    assert max(shares) - min(shares) <= largest


def test_only_a_model_that_lies_whole_has_an_index(saved: Path) -> None:
    assert (saved / "copies" / "model.safetensors.index.json").exists() is False  # it has a tensor without elements
    assert (saved / "stages" / "model.safetensors.index.json").exists()
    assert not (saved / "fsdp" / "model.safetensors.index.json").exists()


def test_all_ranks_hear_what_went_wrong(saved: Path) -> None:
    words = [(saved / f"{rank}.txt").read_text() for rank in range(RANKS)]
    assert len(set(words)) == 1
    assert 'copies" already' in words[0]
    assert "in the way" in words[0].splitlines()[1]
    assert not list(saved.glob(".*partial"))


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a.b": {}}, "without dots"),
        ({"model": {"x": object()}}, "a object"),
        ({"model": {"x": torch.zeros(2, device="meta")}}, "dense"),
        ({"model": {"x": torch.zeros(2, 2).to_sparse()}}, "dense"),
        ({"optim": trained()[1]}, "no module"),
        ({"model": {"x": LocalPart(torch.zeros(3), (4,), "a/dp", "dp=2", 0)}}, "part of shape"),
        ({"model": {"x": LocalPart(torch.zeros(4), (4,), "a sum:dp", "dp=2", 0)}}, "pending"),
    ],
)
def test_what_no_checkpoint_can_hold(tmp_path: Path, state: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        save(state, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_part_without_the_others_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="lack"):
        save({"model": {"x": LocalPart(torch.zeros(2), (4,), "a/dp", "dp=2", 0)}}, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_views_strides_and_odd_memory(tmp_path: Path) -> None:
    base = torch.arange(3_000_000.0)
    state = {
        "model": {
            "transposed": base.view(1000, 3000).t(),
            "stepped": base[1::7],
            "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 1_200_000),
            "odd": torch.arange(100, dtype=torch.uint8)[3:50],
            "scalar": torch.tensor(3.0),
            "double": torch.rand(5, dtype=torch.complex128),
            "half": base[:7].to(torch.bfloat16),
            "truth": base[:9] > 4,
            "array": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
        }
    }
    manifest = save(state, tmp_path / "x")
    assert manifest is not None
    found = put_together(tmp_path / "x", manifest)
    for name, values in state["model"].items():
        values = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
        assert torch.equal(found[f"model.{name}"], values), name
