"""Layer streaming: the losses without it, the bytes that it has to move, and what is there at most."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]  typed in part
from transformers import LlamaConfig, LlamaForCausalLM

from bench._memory.counter import FlowCounter
from tangram.errors import UserError
from tangram.planner.cost.history import key_of
from tangram.schema.plan import Plan
from tangram.training.data import open_corpus, step_batches, tokens_of
from tangram.training.mesh import mapped_tensors
from tangram.training.mesh.local_parts import local
from tangram.training.mesh.mapped_tensors import mapped, mapped_like
from tangram.training.parallel.layer_stream import LayerStream
from tangram.training.run.launch import Rank, run_ranks
from tangram.training.run.rank import RankJob, begin
from tangram.training.step import loop
from tangram.training.trials.dry_run import dry_run
from tests.training import test_in_backward, test_optimisers
from tests.training.test_in_backward import EARLY, agree, made
from tests.training.test_optimisers import HALF, planned, run_all

WITHOUT = {**EARLY, "run.recompute": '"full"', "checkpoint.asynchronous": "false"}
STREAMED = {**WITHOUT, "run.stream_layers": "true"}
PART = {"run.recompute": '["model.layers.0"]'}
ON_RANKS = {"fsdp": ("muon", "8-bit", "lora", "tied", "dropout"), "fsdp x tp": ("tied",)}
NAMES = ("low", "muon", "8-bit", "lora", "tied", "dropout")
folder, tied = test_optimisers.folder, test_in_backward.tied


def test_losses_are_the_same_to_the_last_digit(tied: Path) -> None:
    agree(tied, NAMES, {"without": WITHOUT, "streamed": STREAMED}, "streamed")


def test_ranks_have_the_losses_without_it(tied: Path) -> None:
    """FSDP gathers layers from the files; beside TP what ranks hold whole waits for the end of the backward."""
    keys = [(way, name, key) for way, of in ON_RANKS.items() for name in of for key in ("without", "streamed")]
    asked = {"without": WITHOUT, "streamed": STREAMED}
    plans = {(f"{name} {key}", way): made(tied, name, way, **asked[key]) for way, name, key in keys}
    found = run_all(tied, plans, "ranks", {})
    for way, of in ON_RANKS.items():
        for name in of:
            one, other = (found[f"{name} {key}", way] for key in asked)
            assert one.losses == other.losses, name
            assert one.losses[-1] < one.losses[0], name


def test_it_goes_on_with_and_without(folder: Path) -> None:
    plans: dict[tuple[str, str], Plan] = {
        ("rates half", "one"): planned(folder, "rates half", "one", **STREAMED),
        ("rates resumed", "one"): planned(folder, "rates", "one", **STREAMED),
        ("rates without", "one"): planned(folder, "rates", "one", **WITHOUT),
        ("rates", "one"): planned(folder, "rates", "one", **WITHOUT),
    }
    before = ("rates half", "one")
    found = run_all(folder, plans, "gone on", {("rates resumed", "one"): before, ("rates without", "one"): before})
    for name in ("rates resumed", "rates without"):
        assert found[name, "one"].losses == found["rates", "one"].losses[HALF:], name


# ---------------------------------------------------------------- what is moved, what is there


class Model(nn.Module):
    """Layers that are alike, recomputed, after one that is not."""

    def __init__(self, count: int, size: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(4, size)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(size, size), nn.Tanh()) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = cast(Tensor, checkpoint(layer, x, use_reentrant=False))
        return x.sum()


def forget(parameter: Tensor) -> None:
    parameter.grad = None


def model_of(count: int) -> tuple[Model, LayerStream]:
    torch.manual_seed(0)
    model = Model(count)
    return model, LayerStream(model, [*model.layers], torch.device("cpu"))


def test_each_layer_is_moved_twice_and_two_are_there_at_most() -> None:
    model, stream = model_of(6)
    x = torch.randn(1, 4)
    of_layer = sum(p.nbytes for p in model.layers[0].parameters())
    outside = sum(p.nbytes for p in model.first.parameters())
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(forget)
    with FlowCounter([*model.parameters(), x]) as counter:
        model(x).backward()
        assert stream.moved_bytes == 12 * of_layer + outside
        assert counter.flow.now == 0
    assert counter.flow.peaks["forward"] < 2.1 * of_layer
    assert 2 * of_layer < counter.flow.peaks["backward"] < 3.1 * of_layer  # with the gradient of one
    model.eval()
    stream.moved_bytes = 0
    with torch.no_grad(), FlowCounter([*model.parameters(), x]) as counter:
        model(x)
    assert stream.moved_bytes == 6 * of_layer + outside
    assert max(counter.flow.peaks.values()) < 2.1 * of_layer


def test_what_is_written_is_the_same_by_two_layers_at_a_time() -> None:
    """Token by token, with a cache: each moves the layers, the head and the rows of embeddings once."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, initializer_range=0.3, eos_token_id=None, pad_token_id=0, **sizes)  # pyright: ignore
    model: Any = LlamaForCausalLM(config).eval()
    prompt, layers = torch.arange(1, 7).view(1, -1), [*model.model.layers]
    how: dict[str, Any] = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_logits": True}
    before = model.generate(prompt, do_sample=False, **how)
    of_layer, of_all = (sum(p.nbytes for p in one.parameters()) for one in (layers[0], model))
    stream = LayerStream(model, layers, torch.device("cpu"))
    with FlowCounter([*model.parameters(), *model.buffers(), prompt]) as counter:
        after = model.generate(prompt, do_sample=False, **how)
    assert torch.equal(before.sequences, after.sequences)
    assert len({*before.sequences[0].tolist()}) > 3
    assert all(torch.equal(x, y) for x, y in zip(before.logits, after.logits, strict=True))
    assert stream.moved_bytes == 8 * of_all
    assert 2 * of_layer < max(counter.flow.peaks.values()) < 2.3 * of_layer


def test_gradients_are_those_without() -> None:
    model, _ = model_of(3)
    torch.manual_seed(0)
    other, x = Model(3), torch.randn(2, 4)
    for one in (model, other):
        one(x).backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad), name


def test_a_copy_that_is_out_of_date_is_not_used() -> None:
    """A pass that ended early has copied the next layer ahead; what is loaded or updated meanwhile counts."""
    model, _ = model_of(3)
    x = torch.randn(2, 256)
    model.layers[0](x)  # copies those of the second ahead
    time.sleep(0.3)  # the thread has done so
    with torch.no_grad():
        for p in model.layers[1].parameters():
            p.mul_(2.0)
        weight, bias = model.layers[1].parameters()
        assert torch.equal(model.layers[1](x), torch.tanh(nn.functional.linear(x, weight, bias)))


def test_parameters_stand_in_their_places_again_after_a_failure() -> None:
    model, _ = model_of(2)
    before = [*model.parameters()]
    with pytest.raises(RuntimeError):
        model.layers[0](torch.randn(2, 3))
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


# ---------------------------------------------------------------- files


def test_mapped_tensors_hold_numbers_and_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_tensors.tempfile, "tempdir", str(tmp_path))
    x = torch.randn(3, 5, dtype=torch.bfloat16)
    assert torch.equal(mapped(x), x)
    assert not mapped_like(x).any()
    assert mapped_like(torch.empty(0, 4)).shape == (0, 4)
    assert mapped_like(torch.tensor(1.0)).shape == ()
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match="set TMPDIR to a folder of a disk that has room"):
        mapped_like(torch.empty(1 << 55, dtype=torch.uint8, device="meta"))


def _not_in_files(rank: Rank, work: tuple[Plan, Path]) -> list[str]:
    """After a step: what of parameters and states lies in memory, by the process's list of what is mapped."""
    plan, folder = work
    corpus = open_corpus(plan.data, tokens_of(plan))
    begun = begin(rank, RankJob(plan, folder, corpus.digest, loop.StepCosts()))
    optimiser = begun.state.optimiser
    assert optimiser is not None
    batches = step_batches(
        corpus, plan.data, seed=0, first_sample=0, index=rank.index, size=2, micro_steps=1, device=rank.device
    )
    loop.train_step(begun.model, optimiser, batches, lr=1e-3)
    lines = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "/tangram-" in line]
    ranges = [range(*(int(end, 16) for end in line.split("-"))) for line in lines]

    def outside(x: Tensor) -> bool:
        part = local(x)
        return part.ndim > 0 and not any(part.untyped_storage().data_ptr() in one for one in ranges)

    named = {name: [p, *optimiser.state[p].values()] for name, p in begun.model.module.named_parameters()}
    return [name for name, some in named.items() if any(outside(x) for x in some)]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is mapped is listed by Linux alone")
def test_parts_and_states_of_ranks_lie_in_files(folder: Path, tmp_path: Path) -> None:
    plan = planned(folder, "rates", "fsdp", **STREAMED, **{"optimiser.lr_of": "{}"})
    assert run_ranks(_not_in_files, (plan, tmp_path), world=2, on_event=print, device="cpu") == [[], []]


# ---------------------------------------------------------------- what it is not for


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    for asked, why in (
        ({"optimiser.in_backward": "false"}, r"run\.stream_layers: .* set optimiser\.in_backward = true"),
        ({"run.recompute": '"none"'}, r'run\.stream_layers: .* set run\.recompute = "full"'),
        ({"run.compile": "true"}, r"run\.compile: "),
        ({"lora.rank": "4", "lora.base": '"int8"'}, r"lora\.base: "),
        ({"precision.compute": '"bfloat16"'}, r"precision: .*accumulate alike"),
        ({"checkpoint.asynchronous": "true"}, r"checkpoint\.asynchronous: .*set it to false"),
    ):
        with pytest.raises(UserError, match=why):
            planned(folder, "sgd", "one", **{**STREAMED, **asked})
    with pytest.raises(UserError, match=r"only those that FSDP cuts parameters over stream layers: use FSDP"):
        planned(folder, "sgd", "tp", **STREAMED)
    with pytest.raises(UserError, match=r'run\.reshard: .* set "after forward"'):
        planned(folder, "sgd", "fsdp", **STREAMED, **{"run.reshard": '"after step"'})
    with pytest.raises(UserError, match=r'run\.recompute leaves out model\.layers\.1: set "full"'):
        run_all(folder, {("sgd", "one"): planned(folder, "sgd", "one", **{**STREAMED, **PART})}, "refused", {})
    with pytest.raises(UserError, match="a dry run counts"):
        dry_run(planned(folder, "sgd", "one", **STREAMED))
    assert key_of(planned(folder, "sgd", "one", **STREAMED)) != key_of(planned(folder, "sgd", "one", **WITHOUT))
