"""Weight decay is for what multiplies as a matrix: what each type's own forward does with its parameters says which.

The oracle runs a tiny model and follows every parameter through views and casts to the first operator that computes
with it. It knows no names and no classes of modules.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from tangram.cli import main
from tangram.models.building.build import build_on_meta, read_source
from tangram.schema.optimiser import OptimiserPlan
from tangram.schema.plan import matches
from tangram.training.step.optimiser_step import make_adamw
from tangram.training.step.weight_decay import groups, why_not
from tests.training.causal_models import CAUSAL, write_config
from tests.training.small import plan_file, small_tables, write_text

QUICK = ("gpt2", "gpt_oss", "jamba", "mamba", "qwen3_moe", "recurrent_gemma", "rwkv")
PLAN = OptimiserPlan(lr=1e-3, weight_decay=0.1)
_VIEWS = """
view reshape _unsafe_view t transpose permute unsqueeze squeeze expand slice select _to_copy clone contiguous split
split_with_sizes unbind alias detach index_select index repeat cat as_strided narrow
"""
VIEWS = frozenset(_VIEWS.split())
"""Operators after which a value is still the parameter's."""
MATRIX: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("mm", "bmm", "_grouped_mm", "mv"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm"), (1, 2)),
    "convolution": (1,),
    "embedding": (0,),
}
"""Operators that multiply by a matrix, or look up in one, and which of their tensors it is."""


class Uses(TorchDispatchMode):
    """What parameters are used in: the names of operators, with the place among their tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.of = {id(parameter): name for name, parameter in model.named_parameters()}
        self.alive: list[Any] = []  # so that no number of an object is another's
        self.uses: dict[str, set[tuple[str, int]]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = func.overloadpacket.__name__
        leaves = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.alive.extend(made)
        for place, leaf in enumerate(leaves):
            name = self.of.get(id(leaf))
            if name is not None and kind in VIEWS:
                self.of.update(dict.fromkeys(map(id, made), name))
            elif name is not None:
                self.uses[name].add((kind, place))
        return out


def by_use(family: str, folder: Path) -> tuple[nn.Module, dict[str, bool]]:
    """A tiny model, and of each of its parameters that its forward uses whether it multiplies as a matrix."""
    config = read_source(None, str(write_config(folder / family, family)), {}).config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    uses = Uses(model)
    with torch.no_grad(), uses:
        model(input_ids=torch.arange(3, 19)[None], use_cache=False)
    return model, {
        name: any(place in MATRIX.get(kind, ()) for kind, place in found) for name, found in uses.uses.items()
    }


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(CAUSAL)]
)
@pytest.mark.filterwarnings("default")
def test_what_multiplies_decays_and_nothing_else(family: str, tmp_path: Path) -> None:
    model, used = by_use(family, tmp_path)
    whys = why_not(model, PLAN)
    assert len(used) > 0.6 * len(whys)
    wrong = {name: whys[name] for name, matrix in used.items() if name in whys and matrix != (not whys[name])}
    assert wrong == {}


def test_the_oracle_sees_the_rule_by_dims_and_names(tmp_path: Path) -> None:
    """The rule as it was: everything of two dims but for names of norms and biases."""
    wrong: set[str] = set()
    for family in ("gpt_oss", "mamba", "recurrent_gemma"):
        model, used = by_use(family, tmp_path)
        for name, parameter in model.named_parameters():
            if name in used and (parameter.ndim >= 2 and not matches(PLAN.no_decay, name)) != used[name]:
                wrong.add(name.rpartition(".")[2])
    assert wrong == {"gate_up_proj_bias", "down_proj_bias", "A_log", "input_gate_bias", "recurrent_gate_bias"}


class Own(nn.Module):
    """Of nobody's classes: names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.more = nn.Parameter(torch.ones(4, 8, 16)), nn.Parameter(torch.ones(4, 16))
        self.matrix, self.shift = nn.Parameter(torch.ones(8, 6)), nn.Parameter(torch.ones(1, 1, 8))
        self.heads = nn.LayerNorm((4, 8))
        self.mix = nn.MultiheadAttention(8, 2)
        self.pos_bias_u = nn.Parameter(torch.ones(4, 3))  # of Transformer-XL's kin: one for each head


def test_a_model_of_ones_own_is_told_by_types_and_shapes() -> None:
    whys = why_not(Own(), PLAN.model_copy(update={"no_decay": ("*out_proj.weight",)}))
    assert {name: why for name, why in whys.items() if not name.startswith("mix.")} == {
        "up": "", "more": "bias", "matrix": "", "shift": "vector", "heads.weight": "norm", "heads.bias": "norm",
        "pos_bias_u": "bias",
    }  # fmt: skip
    assert whys["mix.in_proj_weight"] == ""
    assert whys["mix.in_proj_bias"] == whys["mix.out_proj.bias"] == "bias"
    assert whys["mix.out_proj.weight"] == "optimiser.no_decay"


def decaying(model: nn.Module) -> Iterator[str]:
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in make_adamw(model, PLAN).param_groups:
        if group["weight_decay"]:
            yield from (own[id(parameter)] for parameter in group["params"])


def test_the_optimiser_has_these_groups(tmp_path: Path) -> None:
    config = read_source(None, str(write_config(tmp_path, "gpt_oss")), {}).config
    model = build_on_meta(config)
    found = groups(model, PLAN)
    assert found[0].why == ""
    assert sum(group.tensors for group in found) == len(list(model.parameters()))
    assert sum(group.values for group in found) == sum(one.numel() for one in model.parameters())
    assert set(decaying(model)) == {name for name, why in why_not(model, PLAN).items() if not why}
    biases = next(group for group in found if group.why == "bias")
    assert "model.layers.*.mlp.experts.gate_up_proj_bias" in biases.names


def test_a_plan_shows_them_with_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path / "m", "gpt_oss")
    model = {"preset": None, "path": str(config), "change": {}}
    text = write_text(tmp_path / "text")
    tables = {"model": model, "data": {"tokenizer": "bytes"}}
    file = tmp_path / "plan.toml"
    known = small_tables(text, **tables)
    del known["model"]["preset"]
    file.write_text(tomli_w.dumps(known))
    assert main(["plan", str(file), "--show"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "weight decay 0.1" in shown
    assert "no weight decay: sink" in shown
    assert "model.layers.*.mlp.experts.gate_up_proj_bias" in shown
    missing = plan_file(tmp_path / "gone.toml", text, data={"tokenizer": str(tmp_path)})
    assert main(["plan", str(missing), "--show"]) == 0
    assert "is not known here: there is no tokenizer" in " ".join(capsys.readouterr().out.split())
