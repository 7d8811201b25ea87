"""Loading in one process: what fits is filled bit for bit, what does not is refused before anything changes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from tangram.checkpoint.loading.block_source import DamagedError
from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.rank_parts import About
from tangram.checkpoint.saving.save import save, save_described
from tangram.checkpoint.state.describe import describe
from tangram.checkpoint.state.entries import LocalPart
from tangram.checkpoint.store import commits
from tangram.errors import UserError
from tests.checkpoint.saving import Net, trained
from tests.checkpoint.stored import random_tensor, same
from tests.checkpoint.strategies import ThreadPeers, Threads

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "Adam of tensors": lambda p: Adam(p, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "AdamW": lambda p: AdamW(p, lr=0.1, betas=(0.8, 0.9)),
    "Adagrad": lambda p: Adagrad(p, lr=0.1),
    "Adadelta": lambda p: Adadelta(p),
    "Adamax": lambda p: Adamax(p),
    "Adafactor": lambda p: Adafactor(p),
    "ASGD": lambda p: ASGD(p, lr=0.1),
    "NAdam": lambda p: NAdam(p),
    "RAdam": lambda p: RAdam(p),
    "RMSprop": lambda p: RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: Rprop(p),
}


def step(net: Net, optimiser: Optimizer) -> None:
    optimiser.zero_grad()
    net(torch.arange(8).reshape(2, 4)).sum().backward()
    optimiser.step()


@pytest.mark.parametrize("kind", KINDS)
def test_any_optimiser_goes_on_bit_for_bit(tmp_path: Path, kind: str):
    def made(seed: int) -> tuple[Net, Optimizer]:
        torch.manual_seed(seed)
        net = Net()
        return net, KINDS[kind]([p for p in net.parameters() if p.requires_grad])

    net, optimiser = made(0)
    step(net, optimiser)
    step(net, optimiser)
    save({"model": net, "optim": optimiser}, tmp_path / "a")
    other, resumed = made(1)
    for group in resumed.param_groups:
        group["maximize"] = True
        group["lr"] = group["lr"] * 3
    load({"model": other, "optim": resumed}, tmp_path / "a")
    for _ in range(2):
        for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
            assert same(a.detach(), b.detach()), name
            assert set(optimiser.state[a]) == set(resumed.state[b])
            for key, value in optimiser.state[a].items():
                found = resumed.state[b][key]
                assert same(value, found) if isinstance(value, torch.Tensor) else value == found, (name, key)
        step(net, optimiser)
        step(other, resumed)
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimiser.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in resumed.param_groups
    ]


def test_states_are_made_without_touching_parameters_or_gradients(tmp_path: Path):
    net, optimiser = trained()
    save({"model": net, "optim": optimiser}, tmp_path / "a")
    other = Net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(random_tensor(parameter.shape, torch.float32))  # not-a-numbers, -0.0, everything
    some = other.block.weight
    some.grad = torch.full_like(some, 3.0)
    before = {name: p.detach().clone() for name, p in other.named_parameters()}
    resumed = SGD([p for p in other.parameters() if p.requires_grad], lr=0.3, momentum=0.9, weight_decay=1.0)
    adam = AdamW(resumed.param_groups[0]["params"], lr=0.3)
    load({"model": other, "optim": adam}, tmp_path / "a", only=["optim.*"])
    assert all(same(p.detach(), before[name]) for name, p in other.named_parameters())
    assert some.grad is not None
    assert bool((some.grad == 3).all())
    assert other.embed.weight.grad is None
    assert same(adam.state[some]["exp_avg"], optimiser.state[net.block.weight]["exp_avg"])


def test_an_optimiser_that_cannot_step_by_itself(tmp_path: Path):
    net, optimiser = trained()
    save({"model": net, "optim": optimiser}, tmp_path / "a")
    other = Net()
    resumed = LBFGS([p for p in other.parameters() if p.requires_grad])
    with pytest.raises(UserError, match="optim cannot make its states by a step, so take one before"):
        load({"model": other, "optim": resumed}, tmp_path / "a")


def test_weights_alone_and_some_layers_alone(tmp_path: Path):
    net, optimiser = trained()
    save({"model": net, "optim": optimiser, "progress": {"step": 2}}, tmp_path / "a")
    other = Net()
    other.table.fill_(9)
    load({"model": other}, tmp_path / "a")
    assert all(same(a.detach(), b.detach()) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert other.head.weight is other.embed.weight
    assert bool((other.table == 9).all())
    third = Net()
    before = third.embed.weight.detach().clone()
    loaded = load(
        {"model": third, "more": {"x": torch.zeros(2)}}, tmp_path / "a", only=["model.block.*", "model.gain*"]
    )
    assert same(third.block.weight.detach(), net.block.weight.detach())
    assert same(third.gain.bias.detach(), net.gain.bias.detach())
    assert same(third.embed.weight.detach(), before)
    assert loaded.missing == loaded.unused == ()
    with pytest.raises(UserError, match=r"nothing in the state or the checkpoint is named model.blok.\*"):
        load({"model": third}, tmp_path / "a", only=["model.blok.*"])


def test_objects_go_back_into_tables(tmp_path: Path):
    state = {
        "progress": {"step": 5, "name": "x", "list": [1, {"a": None}], "inner": {"t": torch.arange(3), "rate": 0.5}},
        "data": {"position": 7, "deep.er": {"z": 1}, "deep": {"er": 2}, 3: "c", 4: {5: 6}},
        "rng": torch.arange(4, dtype=torch.uint8),
        "scalar": torch.tensor(3.5),
        "word": "w",
        "epoch": 3,
    }
    save(state, tmp_path / "a")
    empty: dict[str, Any] = {
        "progress": {"step": 0, "name": "", "list": [], "inner": {"t": torch.zeros(3, dtype=torch.int64), "rate": 0.0}},
        "data": {"position": 0, "deep.er": None, "deep": None, 3: None, 4: None},
        "rng": torch.zeros(4, dtype=torch.uint8),
        "scalar": torch.tensor(0.0),
        "epoch": 0,
    }
    loaded = load(empty, tmp_path / "a")
    assert empty["progress"].pop("inner")["t"].tolist() == [0, 1, 2]
    expected = dict(state["progress"])
    del expected["inner"]
    assert empty["progress"] == expected
    assert empty["data"] == state["data"]
    assert empty["epoch"] == 3
    assert empty["rng"].tolist() == [0, 1, 2, 3]
    assert float(empty["scalar"]) == 3.5
    assert loaded.objects["word"] == "w"
    assert loaded.objects["progress.inner.rate"] == 0.5
    with pytest.raises(UserError, match=r"of another state: it lacks progress.more"):
        load(
            {"progress": {"more": 1} | empty["progress"] | {"inner": {"t": torch.zeros(3, dtype=torch.int64)}}},
            tmp_path / "a",
        )


def test_arrays_and_strided_memory(tmp_path: Path):
    save({"a": {"x": np.arange(12.0).reshape(3, 4), "y": np.float32([])}}, tmp_path / "a")
    whole = np.zeros((4, 6))
    load({"a": {"x": whole[:, ::2].T, "y": np.zeros(0, np.float32)}}, tmp_path / "a")
    assert (np.arange(12.0).reshape(3, 4) == whole[:, ::2].T).all()
    assert not whole[:, 1::2].any()
    locked = np.zeros((3, 4))
    locked.flags.writeable = False
    with pytest.raises(UserError, match=r"a.x is an array that is read-only"):
        load({"a": {"x": locked, "y": np.zeros(0, np.float32)}}, tmp_path / "a")


def test_a_part_in_strides_that_would_be_copied_is_refused(tmp_path: Path):
    flat = torch.arange(24.0)
    layout, mesh = "(2 a/tp) b", "tp=2"
    save({"m": {"w": flat.reshape(4, 6)}}, tmp_path / "a")
    wide = torch.zeros(6, 4)

    def held(local: torch.Tensor) -> dict[str, Any]:
        return {"m": {"w": LocalPart(local, (4, 6), layout, mesh, 1)}}

    load(held(wide[:, 1:3].T), tmp_path / "a")
    assert wide[:, 1:3].T.tolist() == flat.reshape(4, 6)[1::2].tolist()
    assert not wide[:, ::3].any()
    with pytest.raises(UserError, match=r"m.w lies in strides here: load into a part without gaps, \[2, 6\]"):
        load(held(torch.zeros(4, 7)[:, :3]), tmp_path / "a")


def refused(state: dict[str, Any], path: Path, words: str, **options: Any) -> None:
    tensors = [t for s in state.values() for t in (s.values() if isinstance(s, dict) else []) if torch.is_tensor(t)]
    before = [t.clone() for t in tensors]
    with pytest.raises(UserError, match=words) as caught:
        load(state, path, **options)
    assert "\n" not in str(caught.value)
    assert all(same(a, b) for a, b in zip(tensors, before, strict=True))


def test_what_does_not_fit_is_named(tmp_path: Path):
    save({"m": {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}}, tmp_path / "x")
    a, b = torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16)
    path = tmp_path / "x"
    refused({"m": {"a": a}}, path, r'"?.*x" is of another state: it has m.b, which the state lacks$')
    refused({"m": {"a": a, "b": b, "c": a}}, path, "is of another state: it lacks m.c$")
    refused({"m": {"a": a, "b": b}, "n": {"a": a}}, path, "is of another state: it lacks n.a$")
    refused({"m": {"a": a.T, "b": b}}, path, r"m.a has shape \[2, 3\] there and \[3, 2\] here$")
    refused({"m": {"a": a, "b": b.float()}}, path, "m.b is bfloat16 there and float32 here: say cast=True to convert$")
    refused({"m": {"a": a, "b": b[:3]}}, path, r"m.b has shape \[4\] there and \[3\] here", strict=False)
    refused({"m": {"a": a, "b": b}}, tmp_path / "y", 'there is no checkpoint ".*y"')
    extra = {f"e{i}": a for i in range(9)}
    refused({"m": {"a": a, "b": b} | extra}, path, r"it lacks m.e0; it lacks m.e1; it lacks m.e2, and 6 more$")


def test_a_load_that_is_not_strict_says_what_was_not_loaded(tmp_path: Path):
    save({"m": {"a": torch.ones(2, 3), "b": torch.ones(4)}}, tmp_path / "x")
    a, c = torch.zeros(2, 3), torch.zeros(2)
    loaded = load({"m": {"a": a, "c": c}, "n": {"d": c}}, tmp_path / "x", strict=False)
    assert bool((a == 1).all())
    assert not c.any()
    assert loaded.missing == ("m.c", "n.d")
    assert loaded.unused == ("m.b",)


def test_dtypes_are_converted_where_that_is_asked_for(tmp_path: Path):
    values = torch.randn(5, 3)
    save({"m": {"a": values}}, tmp_path / "x")
    into = torch.zeros(5, 3, dtype=torch.bfloat16)
    load({"m": {"a": into}}, tmp_path / "x", cast=True)
    assert same(into, values.bfloat16())


# ---------------------------------------------------------------- groups of parameters


def grouped(net: Net, *names: list[str], **settings: Any) -> AdamW:
    table = dict(net.named_parameters())
    groups = [{"params": [table[n] for n in some], "lr": 0.1 * (i + 1)} for i, some in enumerate(names)]
    return AdamW(groups, **settings)


def test_settings_go_to_the_group_with_the_same_parameters(tmp_path: Path):
    net, other = Net(), Net()
    optimiser = grouped(net, ["block.weight", "block.bias"], ["gain.weight"], betas=(0.5, 0.6))
    step(net, optimiser)
    optimiser.param_groups[0]["initial_lr"] = 0.25  # as schedulers leave it
    save({"model": net, "optim": optimiser}, tmp_path / "a")
    resumed = grouped(other, ["gain.weight"], ["block.bias", "block.weight"])
    resumed.param_groups[0]["lr"] = torch.tensor(0.0)
    load({"model": other, "optim": resumed}, tmp_path / "a")
    first, second = resumed.param_groups
    assert isinstance(first["lr"], torch.Tensor)
    assert float(first["lr"]) == pytest.approx(0.2)
    assert second["lr"] == 0.1
    assert second["initial_lr"] == 0.25
    assert first["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [["block.weight", "block.bias", "gain.weight"]],
            "optim has gain.weight in another group of parameters",
        ),
        (
            [["block.weight"], ["block.bias", "gain.weight"]],
            "optim has gain.weight in another group of parameters",
        ),
    ],
)
def test_other_groups_are_refused_and_the_optimiser_is_as_it_was(tmp_path: Path, groups: list[list[str]], words: str):
    net, other = Net(), Net()
    optimiser = grouped(net, ["block.weight", "block.bias"], ["gain.weight"])
    step(net, optimiser)
    save({"model": net, "optim": optimiser}, tmp_path / "a")
    resumed = grouped(other, *groups)
    with pytest.raises(UserError, match=words):
        load({"model": other, "optim": resumed}, tmp_path / "a")
    assert not resumed.state
    assert resumed.param_groups[0]["lr"] == 0.1


def stage(number: int) -> tuple[nn.Module, AdamW]:
    """A stage of a pipeline; the second has nothing that decays, so no group for it."""
    torch.manual_seed(number)
    net = nn.ModuleDict({f"layer{number}": nn.Linear(2, 2), f"norm{number}": nn.LayerNorm(2)})
    decayed, others = [net[f"layer{number}"].weight], [net[f"layer{number}"].bias, *net[f"norm{number}"].parameters()]
    if number:
        net[f"layer{number}"].weight.requires_grad = False
    groups = [{"params": others, "weight_decay": 0.0, "lr": 0.25}]
    optimiser = AdamW([{"params": decayed, "weight_decay": 0.5}, *groups] if not number else groups)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimiser.step()
    return net, optimiser


def test_stages_of_a_pipeline_save_each_their_groups_and_objects(tmp_path: Path):
    def rank(peers: ThreadPeers) -> None:
        net, optimiser = stage(peers.index)
        own = {"step": 7 + peers.index, f"of stage {peers.index}": [peers.index]}
        save_described(describe({"model": net, "optim": optimiser, "own": own}, peers), tmp_path / "a", peers, About())

    with pytest.warns(UserWarning, match=r"own\.step: ranks differ, and what the first one has"):
        Threads(2).run(rank)
    objects = commits.read_manifest(tmp_path / "a").objects
    assert objects["own.step"] == 7, "what several have is as the first has it"
    assert (objects["own.of stage 0"], objects["own.of stage 1"]) == ([0], [1])
    decayed, others = objects["optim.param_groups"]
    assert decayed["params"] == ["layer0.weight"]
    names = ["layer0.bias", "norm0.weight", "norm0.bias", "layer1.bias", "norm1.weight", "norm1.bias"]
    assert others["params"] == names

    net, optimiser = stage(1)  # resumed as a stage, which knows one of the two groups
    optimiser.param_groups[0]["lr"] = 0.0
    load({"model": net, "optim": optimiser}, tmp_path / "a", strict=False)
    assert optimiser.param_groups[0]["lr"] == 0.25

    whole = nn.ModuleDict({**dict(stage(0)[0].items()), **dict(stage(1)[0].items())})
    table = dict(whole.named_parameters())
    resumed = AdamW(
        [
            {"params": [table[n] for n in names], "weight_decay": 1.0},
            {"params": [table["layer0.weight"]], "weight_decay": 1.0},
        ]
    )
    load({"model": whole, "optim": resumed}, tmp_path / "a")
    assert [group["weight_decay"] for group in resumed.param_groups] == [0.0, 0.5]
    assert same(resumed.state[table["layer1.bias"]]["exp_avg"], stage(1)[1].state_dict()["state"][0]["exp_avg"])


# ---------------------------------------------------------------- damage


def test_damage_names_tensor_file_and_the_good_checkpoint_before(tmp_path: Path):
    for name in ("one", "two"):
        save({"m": {"a": torch.ones(2, 3)}}, tmp_path / name)
    (file,) = (tmp_path / "two").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        load({"m": {"a": torch.zeros(2, 3)}}, tmp_path / "two")
    assert re.fullmatch(
        r'the checkpoint ".*two" is damaged: its file "m-00001-of-00001.safetensors", with m.a, has other bytes '
        r'from 0 to 4120 than were written; the one before it is ".*one"',
        str(caught.value),
    )
    file.unlink()
    with pytest.raises(UserError, match=r'"m-00001-of-00001\.safetensors" is not there'):
        load({"m": {"a": torch.zeros(2, 3)}}, tmp_path / "two")
    assert commits.newest(tmp_path) == tmp_path / "one"
