"""A model as people have it when they save: wrapped for recompute, compiled, in DDP, with what is no parameter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # pyright: ignore
from torch.nn.parallel import DistributedDataParallel

from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.save import save
from tangram.errors import UserError

NAMES = ["0.bias", "0.weight", "1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var", "1.weight"]


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def with_recompute(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(model[0]), model[1])


def compiled_inside(model: nn.Sequential) -> nn.Module:
    return nn.Sequential(torch.compile(model[0], backend="eager"), model[1])


def in_ddp(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(with_recompute(model))


WRAPPED: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "layers wrapped for recompute": with_recompute,
    "compiled": lambda model: torch.compile(model, backend="eager"),  # pyright: ignore
    "a compiled layer": compiled_inside,
    "DDP": in_ddp,
}


@pytest.fixture
def alone_in_a_group(tmp_path: Path):  # pyright: ignore
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapped_model_is_saved_as_the_model(how: str, tmp_path: Path, alone_in_a_group: None) -> None:
    model = WRAPPED[how](plain())
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).square().sum().backward()
    optim.step()
    manifest = save({"model": model, "optim": optim}, tmp_path / "a")
    assert manifest is not None
    assert sorted(name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")) == NAMES
    for other in (plain(1), WRAPPED[how](plain(1))):  # in a plain model, and wrapped again
        again = torch.optim.AdamW(other.parameters())
        load({"model": other, "optim": again}, tmp_path / "a")
        for one, its in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(one, its)
        assert len(again.state) == 4


class Keeps(nn.Linear):
    """A module with a state of its own that is no tensor, as layers of low precision have."""

    def get_extra_state(self) -> Any:
        return {"scale": 3.0}

    def set_extra_state(self, state: Any) -> None: ...


def without_bias(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    del state[f"{prefix}bias"]


def test_what_could_not_be_loaded_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the state_dict of Sequential has '0\._extra_state', which is no parameter"):
        save({"model": nn.Sequential(Keeps(2, 2))}, tmp_path / "a")
    left_out = nn.Linear(2, 2)
    left_out.register_state_dict_post_hook(without_bias)
    manifest = save({"model": left_out}, tmp_path / "b")
    assert manifest is not None
    assert list(manifest.tensors) == ["model.weight"]
