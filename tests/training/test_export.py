"""An export loads in transformers as the same model, with a tokenizer that gives back every byte; and this can fail."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tangram.training import data, job
from tangram.training.export import export
from tests.training.conftest import Warm

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tied"])
def exported(request: pytest.FixtureRequest, warm: Warm, tmp_path_factory: pytest.TempPathFactory):
    plan, path = (warm.tied, warm.tied_checkpoint) if request.param else (warm.plan, warm.checkpoint)
    model = job.load_in_one_process(plan, job.model_config(plan), path, CPU)
    folder = tmp_path_factory.mktemp("export")
    export(model, folder)
    return plan, model, folder


def test_the_same_logits(exported) -> None:
    plan, model, folder = exported
    _, held_out = data.read_corpus(plan.data)
    assert job.prove_same_logits(model, plan, held_out, folder) == 0.0


def test_a_changed_weight_is_found(exported) -> None:
    plan, model, folder = exported
    file = folder / "model.safetensors"
    whole = load_file(file)
    wrong = {name: tensor.clone() for name, tensor in whole.items()}
    wrong["model.layers.1.mlp.up_proj.weight"][3, 5] += 1.0
    _, held_out = data.read_corpus(plan.data)
    try:
        save_file(wrong, file, metadata={"format": "pt"})
        with pytest.raises(job.ProofError, match="the logits differ"):
            job.prove_same_logits(model, plan, held_out, folder)
    finally:
        save_file(whole, file, metadata={"format": "pt"})


@pytest.mark.parametrize("written", ["def f(x):\n\treturn  x\r\n", "naïve ☃ 日本 𝛑", " lead, trail ", ""])
def test_the_tokenizer_is_bytes_there_and_back(exported, written: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported[2])
    tokens = tokenizer(written, add_special_tokens=False).input_ids
    assert tokens == list(written.encode())
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == written
    assert tokenizer.eos_token_id == data.END


def test_the_export_generates_text(exported) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported[2])
    start = torch.tensor([list(b"value_1 = ")])
    made = exported[1].generate(start, attention_mask=torch.ones_like(start), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(made[0]).startswith("value_1 = ")
