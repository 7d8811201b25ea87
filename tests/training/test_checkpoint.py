"""What two ranks wrote, one process reads through relayout: the same bits that torch's own loader gives."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.optim import AdamW
from transformers import PreTrainedModel

from tangram.checkpoint.formats.dcp import read_index
from tangram.errors import UserError
from tangram.models.build import build_on_meta, initial_tensors
from tangram.training import data, job, loop, state
from tangram.training.parallelise import materialise
from tangram.training.plan import Plan
from tests.training.conftest import Warm
from tests.training.small import SMALL_MODEL, small_plan

CPU = torch.device("cpu")


def fresh(plan: Plan) -> tuple[PreTrainedModel, AdamW]:
    """A whole model and optimiser in this process, with other weights than any checkpoint has."""
    config = job.model_config(plan)
    model = build_on_meta(config)
    materialise(model, CPU, initial_tensors(config, plan.seed + 1))
    optimiser = loop.make_adamw(model, plan.optimiser)
    state.empty_adamw_states(optimiser)
    return model, optimiser


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.parametrize("tied", [False, True])
def test_the_same_bits_as_torchs_own_loader(warm: Warm, tied: bool) -> None:
    plan, path = (warm.tied, warm.tied_checkpoint) if tied else (warm.plan, warm.checkpoint)
    model, optimiser = fresh(plan)
    state.load_whole(path, model, optimiser)
    ours = state.state_tensors(model, optimiser)
    theirs = {name: torch.full_like(tensor, -7) for name, tensor in ours.items()}
    dcp.load(theirs, checkpoint_id=path, no_dist=True)
    assert len(ours) == 4 * len(list(model.parameters()))  # each parameter and its three states
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert name.endswith("exp_avg") or tensor.count_nonzero() > 0, name
    assert all(tensor.item() == plan.run.steps for name, tensor in ours.items() if name.endswith(".step"))


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_held_out_loss_in_one_process(warm: Warm, tied: bool) -> None:
    plan, path = (warm.tied, warm.tied_checkpoint) if tied else (warm.plan, warm.checkpoint)
    before = warm.measured[0].tied_held_out if tied else warm.measured[0].held_out
    model = job.load_in_one_process(plan, job.model_config(plan), path, CPU)
    _, held_out = data.read_corpus(plan.data)
    _, relative = job.prove_same_loss(model, plan, held_out, before)
    assert relative <= 1e-6


def test_tied_parameters_stay_one(warm: Warm) -> None:
    model, optimiser = fresh(warm.tied)
    state.load_whole(warm.tied_checkpoint, model, optimiser)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert "model.lm_head.weight" not in read_index(warm.tied_checkpoint).specs


# ---------------------------------------------------------------- checkpoints that are wrong


def rewrite(source: Path, target: Path, change: Any) -> Path:
    """A copy of a checkpoint with its metadata changed."""
    shutil.copytree(source, target)
    metadata: Metadata = dcp.FileSystemReader(str(source)).read_metadata()
    change(metadata)
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    return target


NAME = "model.model.layers.1.mlp.up_proj.weight"


def swap_shards(metadata: Metadata) -> None:
    first, second = (MetadataIndex(NAME, c.offsets) for c in metadata.state_dict_metadata[NAME].chunks)
    stored = metadata.storage_data
    stored[first], stored[second] = stored[second], stored[first]


def test_swapped_shards_are_found_by_the_loss(warm: Warm, tmp_path: Path) -> None:
    path = rewrite(warm.checkpoint, tmp_path / "swapped", swap_shards)
    model = job.load_in_one_process(warm.plan, job.model_config(warm.plan), path, CPU)
    _, held_out = data.read_corpus(warm.plan.data)
    with pytest.raises(job.ProofError, match="held-out loss"):
        job.prove_same_loss(model, warm.plan, held_out, warm.measured[0].held_out)


def test_a_missing_shard_is_named_with_its_region(warm: Warm, tmp_path: Path) -> None:
    path = rewrite(warm.checkpoint, tmp_path / "short", lambda m: m.state_dict_metadata[NAME].chunks.pop())
    with pytest.raises(UserError, match=rf"(?s){NAME}.*24:48"):
        state.load_whole(path, *fresh(warm.plan))


def test_a_missing_tensor_is_named(warm: Warm, tmp_path: Path) -> None:
    path = rewrite(warm.checkpoint, tmp_path / "less", lambda m: m.state_dict_metadata.pop(NAME))
    with pytest.raises(UserError, match=NAME):
        state.load_whole(path, *fresh(warm.plan))


def test_a_cut_off_file_is_named(warm: Warm, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    shutil.copytree(warm.checkpoint, path)
    file = next(path.glob("__1_*.distcp"))
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(UserError, match=rf"{file.name}.*is cut off"):
        state.load_whole(path, *fresh(warm.plan))


def test_another_model_is_refused(warm: Warm, text: Path) -> None:
    wider = small_plan(text, model={"change": {**SMALL_MODEL, "intermediate_size": 64}})
    with pytest.raises(UserError, match="mlp"):
        state.load_whole(warm.checkpoint, *fresh(wider))


@pytest.mark.parametrize(("content", "message"), [(None, "not a complete DCP checkpoint"), (b"junk", "is damaged")])
def test_a_folder_without_sound_metadata(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_index(tmp_path)
