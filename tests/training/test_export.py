"""An export loads in transformers as the same model, with a tokenizer that gives back every byte; and this can fail."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel

from tangram.schema.plan import Plan
from tangram.training.data import BYTES, END, Corpus, held_out_batches, open_corpus, prepare
from tangram.training.objective.packing import logits_in_order
from tangram.training.run.end_proofs import (
    ProofError,
    load_exported,
    logits_difference,
    same_logits,
    same_loss,
    unlike_weights,
)
from tangram.training.run.rank import probe_batch
from tangram.training.state.build_model import build_unsharded, source_of
from tangram.training.state.export_hf import export
from tangram.training.step.evaluate import evaluate_unsharded
from tests.training.small import SMALL_MODEL, small_plan, write_text

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Exported:
    plan: Plan
    corpus: Corpus
    model: PreTrainedModel
    folder: Path


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tied"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("export")
    change = {**SMALL_MODEL, "tie_word_embeddings": request.param}
    plan = small_plan(write_text(folder / "text"), model={"change": change})
    prepare(plan.data, BYTES, lambda event: None)
    model = build_unsharded(plan, source_of(plan, BYTES), CPU, values=True)
    export(model, folder / "export", BYTES)
    return Exported(plan, open_corpus(plan.data, BYTES), model, folder / "export")


def difference(exported: Exported) -> float:
    inputs = probe_batch(exported.corpus, exported.plan, CPU).inputs_BS
    return logits_difference(exported.model, load_exported(exported.model, exported.folder), inputs)


def test_the_same_logits(exported: Exported) -> None:
    assert difference(exported) == 0.0
    assert unlike_weights(exported.model, load_exported(exported.model, exported.folder)) == ""


def test_a_row_that_no_batch_uses_is_compared(exported: Exported) -> None:
    """Logits of a batch do not show it: only tokens of the batch have their rows of embeddings read."""
    loaded = load_exported(exported.model, exported.folder)
    loaded.get_input_embeddings().weight.data[7, 3] += 1
    found = unlike_weights(exported.model, loaded)
    assert found == "1 of 8224 values of model.embed_tokens.weight differ"


@pytest.fixture
def damaged(exported: Exported) -> Iterator[None]:
    """One element of one weight is another in the file."""
    file = exported.folder / "model.safetensors"
    whole = load_file(file)
    wrong = {name: tensor.clone() for name, tensor in whole.items()}
    wrong["model.layers.1.mlp.up_proj.weight"][3, 5] += 1.0
    save_file(wrong, file, metadata={"format": "pt"})
    yield
    save_file(whole, file, metadata={"format": "pt"})


@pytest.mark.usefixtures("damaged")
def test_a_changed_weight_is_found(exported: Exported) -> None:
    assert difference(exported) > 1e-4


def test_a_reloaded_model_with_another_loss_or_other_logits_is_found(exported: Exported) -> None:
    model, plan, corpus = exported.model, exported.plan, exported.corpus
    loss = evaluate_unsharded(model, held_out_batches(corpus, plan.data, index=0, size=1, device=CPU))
    with torch.no_grad():
        logits = logits_in_order(model.eval(), None, probe_batch(corpus, plan, CPU)).float().numpy()
    assert same_loss(model, plan, corpus, loss) == (loss, 0.0)
    assert same_logits(model, plan, corpus, logits) == 0.0
    with pytest.raises(ProofError, match=r"not the .* that was measured"):
        same_loss(model, plan, corpus, loss * (1 + 2e-6))
    logits[0, 3, 5] += 1e-3
    with pytest.raises(ProofError, match="the reloaded checkpoint has other logits"):
        same_logits(model, plan, corpus, logits)


@pytest.mark.parametrize("written", ["def f(x):\n\treturn  x\r\n", "naïve ☃ 日本 𝛑", " lead, trail ", ""])
def test_the_tokenizer_is_bytes_there_and_back(exported: Exported, written: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported.folder)
    tokens = tokenizer(written, add_special_tokens=False).input_ids
    assert tokens == list(written.encode())
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == written
    assert tokenizer.eos_token_id == END


def test_the_export_generates_text(exported: Exported) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported.folder)
    start = torch.tensor([list(b"value_1 = ")])
    made = exported.model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(made[0]).startswith("value_1 = ")
