"""Plans that fit every shape and are wrong, and right runs that were taken for wrong: what reviews have found."""

# ruff: noqa: N806  a tensor carries its dims in its name

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tangram.cli import main
from tangram.errors import UserError
from tangram.models.twin import module_shapes
from tangram.planner.plan import Plan
from tangram.training.building import build, build_whole, source_of
from tangram.training.data.tokens import BYTES
from tangram.training.launch import Rank, run_ranks
from tangram.training.proofs import SAME_LOSS, loss_difference
from tangram.training.tensor import PROBED, refuse_unlike_gradients, refuse_wrong_flow
from tangram.training.world import make_world
from tests.training.small import SMALL_MODEL, plan_file, small_tables, write_text
from tests.training.strategies import ACTIVATIONS, cut_by_tensor

Plans = dict[str, Plan]
WHOLE_VOCABULARY = {"*embed_tokens.weight": "v h", "lm_head.weight": "v h"}


def cut(
    folder: Path, activations: dict[str, str], parameters: dict[str, str] | None = None, without: str = "", **model: Any
) -> Plan:
    """A plan over two tensor ranks, with some rules first that are usually others, and one left out."""
    rules = {**activations, **{key: text for key, text in ACTIVATIONS.items() if key not in activations}}
    rules.pop(without, None)
    usual = cut_by_tensor("")
    tables = small_tables(
        folder,
        mesh="tp=2",
        axes={"data": [], "tensor": ["tp"]},
        layouts={
            "parameters": {**(parameters or {}), **{k: v for k, v in usual.items() if k not in (parameters or {})}},
            "activations": rules,
            "sizes": {"head_dim": SMALL_MODEL["head_dim"]},
        },
        model={"change": {**SMALL_MODEL, **model}},
    )
    return Plan.model_validate(tables)


def flow_of_each(rank: Rank, plans: Plans) -> dict[str, str]:
    """What is said against each plan before its first step."""
    said: dict[str, str] = {}
    group = dist.group.WORLD
    assert group is not None
    for name, plan in plans.items():
        world = make_world(plan, rank.index, rank.device, group)
        source = source_of(plan, BYTES)
        whole = build_whole(plan, source, rank.device, values=True)
        try:
            model = build(plan, source, world, values=True)
            refuse_wrong_flow(model, plan, world, module_shapes(whole, 1, PROBED))
            said[name] = ""
        except UserError as error:
            said[name] = str(error)
    return said


def gradients_of_norms(rank: Rank, plan: Plan) -> str:
    """What is said after a backward through norms of heads that claim to see all of them."""
    group = dist.group.WORLD
    assert group is not None
    world = make_world(plan, rank.index, rank.device, group)
    model = build(plan, source_of(plan, BYTES), world, values=True)
    ids_BS = torch.arange(PROBED)[None]
    logits_BSV = model(input_ids=ids_BS, position_ids=ids_BS, use_cache=False).logits
    F.cross_entropy(logits_BSV.flatten(0, 1), ids_BS.flatten()).backward()
    try:
        refuse_unlike_gradients(model, world)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rule", ["heads", pytest.param("heads/tp", marks=pytest.mark.slow)])
def test_weights_under_a_rule_that_every_rank_holds_whole_have_one_gradient(tmp_path: Path, rule: str) -> None:
    plan = cut(tmp_path, {"*.[qk]_norm": f"b s {rule} head_dim -> b s {rule} head_dim"})
    one, other = run_ranks(gradients_of_norms, plan, world=2, on_event=print, device="cpu")
    assert one == other
    assert ("_norm.weight" in one) == (rule == "heads"), one


@pytest.mark.slow
def test_rules_that_say_of_what_flows_another_thing_than_is_so_are_refused(tmp_path: Path) -> None:
    heads = "b s heads head_dim -> b s heads head_dim"
    plans = {
        "right": cut(tmp_path, {}),
        "norms of heads that are cut": cut(tmp_path, {"*.[qk]_norm": heads}),
        "a batch that is not cut": cut(tmp_path, {"*.embed_tokens": "b/tp s -> b/tp s h"}),
        "a vocabulary that stays cut": cut(tmp_path, {"lm_head": "b s h -> b s v/tp"}, vocab_size=1024),
        "tied, one rule": cut(tmp_path, {}, WHOLE_VOCABULARY, without="lm_head", tie_word_embeddings=True),
        "tied, the other": cut(tmp_path, {}, WHOLE_VOCABULARY, without="*.embed_tokens", tie_word_embeddings=True),
    }
    one, other = run_ranks(flow_of_each, plans, world=2, on_event=print, device="cpu")
    assert one == other
    assert one["right"] == ""
    assert "layers.0.self_attn.q_norm" in one["norms of heads that are cut"]
    assert "takes (1, 16, 2, 8) over all ranks, but" in one["norms of heads that are cut"]
    assert "model.embed_tokens" in one["a batch that is not cut"]
    assert "have different logits" in one["a vocabulary that stays cut"]
    assert one["tied, one rule"].startswith("lm_head.weight is tied to")
    assert one["tied, the other"].startswith("model.embed_tokens.weight is tied to")


def test_a_small_loss_may_differ_by_as_much_as_rounding_does() -> None:
    """Of a text that says itself the loss is near zero, but rounding is of logits, which are not."""
    limit = SAME_LOSS["float32"]
    assert loss_difference(0.0015363150741904974, 0.0015363225247710943) <= limit  # as tensor-parallel ranks measured
    assert loss_difference(0.001536, 0.001546) > limit
    assert loss_difference(4.75228, 4.75267) > limit
    assert loss_difference(0.0, 0.0) == 0


def test_compiled_blocks_with_tensor_parallel_modules_are_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = cut(tmp_path, {})
    tables = plan.model_dump()
    tables["run"]["compile"] = True
    with pytest.raises(ValueError, match=r"run\.compile = false"):
        Plan.model_validate(tables)
    tables["layouts"]["activations"] = {}
    tables["layouts"]["marks"] = {"*.up_proj.weight": "out/tp in"}
    assert Plan.model_validate(tables).run.compile


def test_a_run_that_ended_in_its_proofs_is_finished_by_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that a signal has stopped after the last step; only a run with a summary has nothing left to do."""
    (tmp_path / "text").mkdir()
    plan = plan_file(tmp_path / "plan.toml", write_text(tmp_path / "text"), run={"steps": 2})
    out = tmp_path / "out"
    assert main(["train", str(plan), "--out", str(out)]) == 0
    assert main(["train", "--resume", "--out", str(out)]) == 2
    assert "nothing is left to do" in capsys.readouterr().err
    (out / "summary.json").rename(tmp_path / "before.json")
    shutil.rmtree(out / "export")
    assert main(["train", "--resume", "--out", str(out)]) == 0
    before, after = (json.loads(path.read_text()) for path in (tmp_path / "before.json", out / "summary.json"))
    assert (after["steps"], after["eval_loss"]) == (2, before["eval_loss"])
    assert (out / "export" / "model.safetensors").is_file()
