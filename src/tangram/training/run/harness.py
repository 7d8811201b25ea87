"""Scores of a model by the tasks of lm-evaluation-harness: of an export, of any checkpoint, of adapters.

The harness (the extra `eval`) asks and counts, transformers computes, in one process and so for models that fit it.
What is no Hugging Face directory is made one for the while, as by `tangram checkpoint convert`.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tangram.checkpoint.conversion.converting import convert
from tangram.checkpoint.store.commits import newest
from tangram.errors import UserError
from tangram.training.run.run_folder import CHECKPOINTS, PLAN_FILE

SEED = 1234
"""By which the harness's own command draws examples."""
EXPORT = "export"
ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class HarnessRequest:
    """What is to be scored, and by what."""

    model: Path
    """A Hugging Face directory, one of peft's adapters, a checkpoint, or the folder of a run."""
    tasks: tuple[str, ...]
    """Names that the harness knows, its own or of `include`, or its YAML files."""
    include: Path | None = None
    """A folder of tasks of one's own."""
    base: Path | None = None
    """The model that adapters are for; None: the one that they name."""
    samples: int = 0
    """Of each task, the first so many; 0: all."""
    shots: int | None = None
    """Examples before each question; None: as the task has it."""
    batch: int = 1
    chat: bool = False
    """Whether questions are put as turns of the tokenizer's chat template."""
    device: str = "cpu"


@dataclass(frozen=True)
class Score:
    """A metric of a task."""

    task: str
    metric: str
    value: float
    error: float
    """Its standard error; nan where the harness has none."""
    shots: int
    samples: int


def scores_of(request: HarnessRequest) -> list[Score]:
    """Every metric of every task. Raises UserError where the harness, a model or a task is not there."""
    if find_spec("lm_eval") is None:
        raise UserError('scores need lm-evaluation-harness: install with pip install "tangram-train[eval]"')
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when its libraries are imported: nothing is downloaded unasked
    with _hugging_face(request.model, request.base) as (folder, adapter):
        try:
            found = _evaluated(request, folder, adapter)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f'the device "{request.device}" has no room for "{request.model}", and this version streams no layers '
                "to score a model: take --device cpu, which reads weights from their files as it needs them, or a "
                "smaller --batch"
            ) from error
    rows: list[Score] = []
    for task, metrics in found["results"].items():
        for name, value in metrics.items():
            metric, comma, kind = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}", math.nan)
            error = float(error) if isinstance(error, int | float) else math.nan
            counted = found["n-samples"].get(task, {}).get("effective", 0)
            shots = found["n-shot"].get(task) or 0
            label = metric if kind == "none" else f"{metric} ({kind})"
            rows.append(Score(task, label, float(value), error, shots, counted))
    return rows


def _evaluated(request: HarnessRequest, folder: Path, adapter: Path | None) -> Mapping[str, Any]:
    harness: Any = import_module("lm_eval")
    files = [Path(task) for task in request.tasks if task.endswith((".yaml", ".yml"))]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f'there is no file "{missing[0]}"')
    folders = {str(file.parent.resolve()) for file in files} | {str(one) for one in (request.include,) if one}
    tasks = import_module("lm_eval.tasks").TaskManager(include_path=sorted(folders) or None)
    names = [_name_of(Path(task)) if task.endswith((".yaml", ".yml")) else task for task in request.tasks]
    if unknown := [name for name in names if not tasks.match_tasks([name])]:
        raise UserError(f'lm-evaluation-harness has no task "{unknown[0]}": give one of its names, or a YAML file')
    peft = str(adapter) if adapter is not None else None
    model = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=str(folder), peft=peft, device=request.device, dtype="auto", batch_size=request.batch,
    )  # fmt: skip
    # Not by `simple_evaluate`, which asks git and compilers about the machine, and lets them complain.
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    try:
        loaded = tasks.load(names)
        for task in loaded["tasks"].values():
            shots = task.get_config("num_fewshot")
            if shots is None or (shots and request.shots is not None):  # a task that asks for none has none
                task.set_config(key="num_fewshot", value=request.shots or 0)
            task.set_fewshot_seed(seed=SEED)
        found = harness.evaluate(
            lm=model, task_dict=loaded, limit=request.samples or None, apply_chat_template=request.chat,
            fewshot_as_multiturn=True, bootstrap_iters=100, log_samples=False,
        )  # fmt: skip
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(
            f"the data of {', '.join(request.tasks)} is not on this machine ({error}): download it, or let it be "
            "downloaded with HF_HUB_OFFLINE=0"
        ) from error
    return found


def _name_of(file: Path) -> str:
    """The name of the task in a file of the harness."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("task:"):
            return line.removeprefix("task:").strip().strip("\"'")
    raise UserError(f'"{file}" names no task: it needs a line "task: NAME"')


@contextmanager
def _hugging_face(model: Path, base: Path | None) -> Generator[tuple[Path, Path | None]]:
    """A directory that transformers loads, and peft's adapters to put on it."""
    if (model / ADAPTER).exists():
        said = json.loads((model / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
        under = base or Path(said)
        if not (under / "config.json").exists():
            raise UserError(f'"{model}" has adapters of the model "{said}", which is not here: --base DIR says where')
        yield under, model
    elif (model / "config.json").exists() and any(_weights(model)):
        yield model, None
    elif (model / EXPORT / "config.json").exists():
        yield model / EXPORT, None
    elif not model.is_dir():
        raise UserError(f'there is no folder "{model}"')
    else:
        source = newest(model / CHECKPOINTS) if (model / PLAN_FILE).exists() else model
        if source is None:
            raise UserError(f'the run "{model}" has neither an export nor a checkpoint yet')
        with tempfile.TemporaryDirectory(prefix="tangram-evaluate-") as made:
            convert(source, Path(made) / "model", to="hf")
            yield Path(made) / "model", None


def _weights(folder: Path) -> Iterable[Path]:
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        yield from folder.glob(pattern)


def rows_of(scores: Sequence[Score]) -> list[tuple[str, ...]]:
    """As a table has them: task, metric, value, standard error, examples before each, samples."""
    return [
        (
            one.task, one.metric, f"{one.value:.4f}", "" if math.isnan(one.error) else f"{one.error:.4f}",
            str(one.shots), str(one.samples or ""),
        )
        for one in scores
    ]  # fmt: skip
