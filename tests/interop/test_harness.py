"""`tangram evaluate`: what lm-evaluation-harness says of a model, beside likelihoods summed by hand."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tangram
from tangram.cli import main
from tangram.errors import UserError
from tangram.training.run.harness import HarnessRequest, Score, scores_of

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of the harness, peft and transformers about each other
ROWS: list[dict[str, Any]] = [
    {"question": f"{a} + {b}?", "choices": ["yes", "no way", "never mind", f"{b} or so"], "answer": (a + 2 * b) % 4}
    for a in range(8)
    for b in range(3)
]
TASK = """task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: SUMS}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of bytes, adapters of it, and a task."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel

    folder = tmp_path_factory.mktemp("harness")
    vocabulary = {letter: at for at, letter in enumerate([*sorted(ByteLevel.alphabet()), "<end>"])}
    bytes_ = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_.pre_tokenizer, bytes_.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()  # pyright: ignore
    PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<end>", pad_token="<end>").save_pretrained(
        folder / "hf"
    )
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), initializer_range=0.3, **sizes))  # pyright: ignore
    model.save_pretrained(folder / "hf")
    lora = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    again = AutoModelForCausalLM.from_pretrained(folder / "hf")
    get_peft_model(again, lora).save_pretrained(str(folder / "adapter"))
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "sums.yaml").write_text(TASK.replace("SUMS", str(folder / "sums.jsonl")))
    return folder


def by_hand(folder: Path, adapter: Path | None = None) -> dict[str, float]:
    """How often the right answer is the likelier one: by its sum, and by its sum over its letters."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)  # pyright: ignore
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    right, normed = 0, 0
    for row in ROWS:
        sums: list[float] = []
        for choice in row["choices"]:
            before: list[int] = tokenizer(str(row["question"])).input_ids
            ids = torch.tensor([before + tokenizer(f" {choice}").input_ids])
            with torch.no_grad():
                chances = model(ids).logits[0, :-1].float().log_softmax(-1)
            sums.append(float(chances.gather(1, ids[0, 1:, None])[len(before) - 1 :].sum()))
        right += max(range(4), key=lambda at: sums[at]) == row["answer"]
        normed += max(range(4), key=lambda at: sums[at] / len(row["choices"][at])) == row["answer"]
    return {"acc": right / len(ROWS), "acc_norm": normed / len(ROWS)}


def values(scores: list[Score]) -> dict[str, float]:
    return {one.metric: one.value for one in scores}


def test_scores_are_those_of_likelihoods_summed_by_hand(
    made: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)  # where git has no repository, of which it would complain
    task = (str(made / "sums.yaml"),)
    plain = scores_of(HarnessRequest(made / "hf", task, batch=4))
    assert values(plain) == pytest.approx(by_hand(made / "hf"))
    assert {(one.task, one.samples, one.shots) for one in plain} == {("sums", len(ROWS), 0)}
    adapted = values(scores_of(HarnessRequest(made / "adapter", task, base=made / "hf")))
    assert adapted == pytest.approx(by_hand(made / "hf", made / "adapter"))
    assert adapted != values(plain), "the adapters were not put on"
    tangram.convert(made / "hf", made / "step-1", to="tangram")
    assert main(["evaluate", str(made / "step-1"), "-t", task[0], "--samples", "5", "--json"]) == 0
    out, err = capfd.readouterr()
    assert "fatal" not in err
    few = json.loads(out)["scores"]
    assert {one["samples"] for one in few} == {5}
    assert [one.value for one in scores_of(HarnessRequest(made / "hf", task, samples=5))] == [
        one["value"] for one in few
    ]


@pytest.mark.parametrize("own", [None, 0, 3])
@pytest.mark.parametrize("shots", [None, 0, 2])
def test_examples_are_those_of_the_harness(made: Path, tmp_path: Path, own: int | None, shots: int | None) -> None:
    """As its own command draws and counts them, for a task that asks for none, for some, or says nothing."""
    lm_eval: Any = pytest.importorskip("lm_eval")
    more = "" if own is None else f"num_fewshot: {own}\n"
    (tmp_path / "some.yaml").write_text((made / "sums.yaml").read_text().replace("task: sums\n", f"task: some\n{more}"))
    found = scores_of(HarnessRequest(made / "hf", (str(tmp_path / "some.yaml"),), samples=6, shots=shots))
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(made / "hf"), device="cpu", dtype="auto"), tasks=["some"], limit=6,
        task_manager=TaskManager(include_path=str(tmp_path)), num_fewshot=shots, bootstrap_iters=100,
    )  # fmt: skip
    assert values(found) == {key: theirs["results"]["some"][f"{key},none"] for key in ("acc", "acc_norm")}
    assert {one.shots for one in found} == {theirs["n-shot"]["some"]}


def test_what_is_not_there_is_a_sentence(made: Path, tmp_path: Path) -> None:
    for model, task, said in (
        (made / "hf", "arc_eazy", 'no task "arc_eazy"'),
        (made / "hf", "nowhere.yaml", 'no file "nowhere.yaml"'),
        (made / "hf", "arc_easy", "is not on this machine"),
        (tmp_path / "none", "arc_easy", "there is no folder"),
        (made, str(made / "sums.yaml"), "give (that|one of them)"),
    ):
        with pytest.raises(UserError, match=said):
            scores_of(HarnessRequest(model, (task,)))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is mapped is listed by Linux alone")
def test_weights_are_pages_of_their_files(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a model that memory has no room for is scored on the CPU; a device that has no room for it is a sentence."""
    from lm_eval.models.huggingface import HFLM

    seen: list[Any] = []
    monkeypatch.setattr(HFLM, "loglikelihood", _seeing(HFLM.loglikelihood, seen))
    scores_of(HarnessRequest(made / "adapter", (str(made / "sums.yaml"),), base=made / "hf", samples=1))
    lines = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if ".safetensors" in line]
    ranges = [range(*(int(end, 16) for end in line.split("-"))) for line in lines]
    base = [p for name, p in seen[0].named_parameters() if "lora_" not in name]
    assert len(base) > 20
    assert all(any(p.data_ptr() in one for one in ranges) for p in base)
    monkeypatch.setattr(HFLM, "loglikelihood", _no_room)
    with pytest.raises(UserError, match="this version streams no layers to score a model: take --device cpu"):
        scores_of(HarnessRequest(made / "hf", (str(made / "sums.yaml"),), samples=1))


def _seeing(asked: Any, seen: list[Any]) -> Any:
    def run(self: Any, *args: Any, **keys: Any) -> Any:
        seen.append(self.model)
        return asked(self, *args, **keys)

    return run


def _no_room(*args: Any, **keys: Any) -> Any:
    raise torch.OutOfMemoryError("no room")
