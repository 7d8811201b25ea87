"""Plain tensors are taken to be the same on all ranks: what is not is refused, or the first rank's, with a warning."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.save import save
from tangram.errors import UserError
from tests.ranks import start

STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 2))


def refused(state: dict[str, Any], path: str) -> str:
    try:
        save(state, path)
    except UserError as error:
        return str(error)
    return "saved"


def on_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found: dict[str, Any] = {}

    # what a loop in DDP has: statistics of batches of one's own, a generator of one's own
    model = network()
    wrapped = DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(3):
        wrapped(torch.randn(8, 4)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    state: dict[str, Any] = {"model": wrapped, "optim": optim, "rng": {"cpu": torch.get_rng_state()}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["ddp"] = refused(state, f"{folder}/ddp")
    found["warned"] = [str(one.message) for one in caught if "ranks differ" in str(one.message)]
    found["statistics"] = {name: model.state_dict()[name].tolist() for name in STATISTICS}
    found["rng"] = torch.get_rng_state().tolist()

    # layers that are cut by hand, and ranks that have come apart by a bit
    half = nn.Linear(4, 6)
    found["parts"] = refused({"model": half}, f"{folder}/a")
    found["shapes"] = refused({"model": nn.Linear(4, 6 + rank)}, f"{folder}/b")
    torch.manual_seed(0)
    same = nn.Linear(4, 6)
    optim = torch.optim.SGD(same.parameters(), lr=0.1, momentum=0.9)
    same(torch.ones(4)).sum().backward()
    optim.step()
    with torch.no_grad():
        optim.state[same.weight]["momentum_buffer"][2, 3] += 1e-7 * rank
    found["states"] = refused({"model": same, "optim": optim}, f"{folder}/c")
    found["alike"] = refused({"model": same}, f"{folder}/d")
    found["large"] = refused({"ema": {"w": torch.full((300_000,), float(rank))}}, f"{folder}/e")
    found["kinds"] = refused(
        {"x": {str(t): torch.zeros(3, 2, dtype=t).t() for t in (torch.float8_e4m3fn, torch.bool, torch.complex64)}},
        f"{folder}/f",
    )
    torch.manual_seed(rank)
    other = nn.Linear(4, 6)
    load({"model": other}, f"{folder}/d")  # what is to be filled may differ
    found["filled"] = torch.equal(other.weight, same.weight)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # torch may hang as it frees DDP's reducer: that ends gloo's threads, of which one waits for the GIL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicated")
    start(on_ranks, str(folder), ranks=2)
    return folder


@pytest.fixture
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_statistics_and_generators_are_all_of_the_first_rank(folder: Path, found: list[dict[str, Any]]) -> None:
    assert found[0]["statistics"] != found[1]["statistics"], "or nothing is shown"
    assert [one["ddp"] for one in found] == ["saved"] * 2
    words = "model.1.running_mean, model.1.running_var, rng.cpu: ranks differ, and what the first one has is kept"
    assert found[0]["warned"][0].startswith(words)
    assert found[1]["warned"] == [], "once is enough"
    model, rng = network(), {"cpu": torch.get_rng_state()}
    load({"model": model, "rng": rng}, folder / "ddp")
    assert {name: model.state_dict()[name].tolist() for name in STATISTICS} == found[0]["statistics"]
    assert rng["cpu"].tolist() == found[0]["rng"]


def test_parts_and_ranks_that_have_come_apart_are_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["parts"].startswith("model.weight (and 1 more) differs between ranks 0 and 1: a tensor without")
        assert one["shapes"].startswith("model.weight (and 1 more) differs between ranks 0 and 1")
        assert one["states"].startswith("optim.weight.momentum_buffer differs between ranks 0 and 1: a tensor without")
        assert one["large"].startswith("ema.w differs between ranks 0 and 1")


def test_what_is_alike_is_saved_and_loaded(found: list[dict[str, Any]]) -> None:
    assert [(one["alike"], one["kinds"], one["filled"]) for one in found] == [("saved", "saved", True)] * 2
