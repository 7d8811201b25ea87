"""Hugging Face's Trainer with Tangram's checkpoints: a callback saves, and a run goes on where the newest one was.

python examples/checkpoint_trainer.py runs/trainer      (start it again: it goes on)
"""

# ruff: noqa: N806  a tensor carries its dims in its name

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tangram.checkpoint import About, load, newest, save


class SaveWithTangram(TrainerCallback):
    """Saves the state every so many steps."""

    def __init__(self, folder: Path, every: int, state: dict[str, Any]) -> None:
        self.folder, self.every, self.state = folder, every, state

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every == 0:
            self.state["progress"]["step"] = self.state["begun"] + state.global_step
            step = self.state["progress"]["step"]
            saved = {key: self.state[key] for key in ("model", "optim", "progress")}
            save(saved, self.folder / f"step-{step:08d}", about=About(step))


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers that go up by one."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row_S = (torch.arange(16) + index) % 64
        return {"input_ids": row_S, "labels": row_S}


def main(folder: Path, steps: int = 20) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state: dict[str, Any] = {"model": model, "optim": optim, "progress": {"step": 0}}
    if last := newest(folder):
        load(state, last)
    state["begun"] = state["progress"]["step"]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=8, save_strategy="no",
        report_to=[], logging_steps=10, use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    callback = SaveWithTangram(folder, 10, state)
    trainer = Trainer(model, arguments, train_dataset=Counting(), optimizers=(optim, None), callbacks=[callback])
    print(f"step {state['begun'] + steps}: loss {trainer.train().training_loss:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
