"""Hugging Face to Megatron-core's torch_dist or to Paddle, and back, under a limit of memory, beside a raw copy.

A model of Qwen3's shape with random bfloat16 weights, written by safetensors. Each direction runs in a process whose
data segment may grow by `--memory`'s default and no more (RLIMIT_DATA: what it allocates; maps of files are the page
cache's). Contenders take turns, files are put out of the page cache before each, figures are medians, and at the end
every tensor that came back is compared with what went. The raw copy reads all bytes and writes them, around the page
cache, in one process: what a conversion at least has to do. Beside the way to torch_dist takes turns the script by hand
(`_checkpoint/by_hand.py`) that loads all, fuses and saves by torch, without a limit: Megatron-Bridge,
which has these ways, needs Transformer Engine on CUDA.

`--only`: torch_dist (which it is unless said), paddle, or tensors: 20,000 and 300,000 of one element through all
formats, which says what a tensor costs. `--size`: gigabytes of the model (4). `--repeats`: turns.
`--folder`: on the disk that is meant, with room for six times the size.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from bench._checkpoint import by_hand, disk, many
from tangram.checkpoint.conversion.convert import MEMORY, ConvertOptions, config_of, restructure
from tangram.checkpoint.conversion.find_mapping import choose
from tangram.checkpoint.formats.detect import open_any
from tangram.errors import UserError
from tangram.hardware.measuring.measure import Row
from tangram.training.run.launch import Rank, run_ranks

SIZE = 4.0
TURNS = 3
SHARD = 1_000_000_000
HIDDEN, FFN, HEADS, GROUPS, DIM, WORDS = 2048, 6144, 16, 8, 128, 65_536


@dataclass(frozen=True)
class Task:
    """One conversion in a process of its own."""

    source: str
    target: str
    to: str
    memory: int
    config: str


@dataclass(frozen=True)
class Done:
    """What it took."""

    seconds: float
    peak: int
    """Bytes of resident memory beyond what the process had, pages of mapped files included."""
    nbytes: int


def rows(
    quick: bool,
    *,
    only: tuple[str, ...] = ("torch_dist",),
    size: float | None = None,
    repeats: int | None = None,
    folder: Path | None = None,
) -> Iterable[Row]:
    """The figures; `quick` takes a small model and one turn."""
    if only == ("tensors",):
        with tempfile.TemporaryDirectory(dir=folder or Path.cwd(), prefix=".bench-convert-") as made:
            yield from many.rows(Path(made), (2_000,) if quick else tuple(many.TARGETS))
        return
    gigabytes = size or (0.2 if quick else SIZE)
    if len(only) != 1 or only[0] not in ("torch_dist", "paddle"):
        raise UserError("--only: give torch_dist, paddle or tensors")
    (other,) = only
    free = shutil.disk_usage(folder or Path.cwd()).free
    if free < 6 * gigabytes * 1e9:
        raise UserError(f"there is room for {free / 1e9:.1f} GB, and six times {gigabytes} GB are needed")
    with tempfile.TemporaryDirectory(dir=folder or Path.cwd(), prefix=".bench-convert-") as made:
        root = Path(made)
        nbytes = _model(root / "hf", gigabytes * 1e9)
        out: dict[str, list[Done]] = {"there": [], "back": []}
        hand: dict[str, list[Done]] = {"there": [], "back": []}
        raw: list[float] = []
        for turn in range(repeats or (1 if quick else TURNS)):
            if turn % 2:
                raw.append(_raw(root))
            for name, source, target, kind in (("there", "hf", "other", other), ("back", "other", "again", "hf")):
                shutil.rmtree(root / target, ignore_errors=True)
                disk.evict(root / source)
                task = Task(str(root / source), str(root / target), kind, MEMORY, str(root / "hf"))
                out[name] += run_ranks(_run, task, world=1, on_event=lambda _: None, device="cpu")
            for name, source, target in (("there", "hf", "hand"), ("back", "hand", "hand-again")):
                if other == "torch_dist":
                    shutil.rmtree(root / target, ignore_errors=True)
                    disk.evict(root / source)
                    task = Task(str(root / source), str(root / target), name, MEMORY, str(root / "hf"))
                    hand[name] += run_ranks(_by_hand, task, world=1, on_event=lambda _: None, device="cpu")
            for target in ("hand", "hand-again"):
                shutil.rmtree(root / target, ignore_errors=True)
            if not turn % 2:
                raw.append(_raw(root))
        _compare(root / "hf", root / "again")
    limit = statistics.median(raw)
    for name, what in (("there", f"Hugging Face to {other}"), ("back", f"{other} to Hugging Face")):
        seconds = statistics.median(done.seconds for done in out[name])
        peak = max(done.peak for done in out[name])
        theirs = {"torch by hand": statistics.median(done.seconds for done in hand[name])} if hand[name] else {}
        peaks = {"torch by hand": max(done.peak for done in hand[name]) / 2**20} if hand[name] else {}
        yield Row(f"convert {nbytes / 1e9:.1f} GB, {what}, of {len(raw)} turns", "s", seconds, theirs, limit=limit,
                  target_ratio=1.3)  # fmt: skip
        yield Row(f"memory of it at its peak, mapped pages included, allocations limited to {MEMORY >> 20} MiB", "MiB",
                  peak / 2**20, peaks, target=MEMORY / 2**20)  # fmt: skip


def _run(_: Rank, task: Task) -> Done:
    """In a process that may allocate so much more than it has."""
    source = open_any(Path(task.source))
    small = open_any(Path(task.config)).small
    with Path("/proc/self/status").open(encoding="ascii") as stream:
        data = next(int(line.split()[1]) << 10 for line in stream if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + task.memory, data + task.memory))
    peak = disk.Peak()
    begin = time.monotonic()
    chosen = choose(source, task.to, config_of(small))
    made = restructure(
        source, chosen.bound, Path(task.target), task.to, ConvertOptions(memory=task.memory), small=small
    )
    return Done(time.monotonic() - begin, peak.extra(), made.nbytes)


def _by_hand(_: Rank, task: Task) -> Done:
    peak = disk.Peak()
    begin = time.monotonic()
    source, target = Path(task.source), Path(task.target)
    if task.to == "there":
        by_hand.there(source, target, GROUPS, DIM)
    else:
        by_hand.back(source, target, GROUPS, DIM, SHARD)
    disk.settle(target)
    return Done(time.monotonic() - begin, peak.extra(), 0)


def _raw(root: Path) -> float:
    """Seconds of a cold read of the model and a write of as many bytes."""
    disk.evict(root / "hf")
    files = [file for file in disk.files_of(root / "hf") if file.suffix == ".safetensors"]
    largest = disk.pages(max(file.stat().st_size for file in files))
    begin = time.monotonic()
    for i, file in enumerate(files):
        part = largest[: file.stat().st_size // disk.mmap.PAGESIZE * disk.mmap.PAGESIZE]
        disk.read_raw(file, 0, part)
        disk.write_raw(root / f"raw-{i}", part)
    seconds = time.monotonic() - begin
    for i, _ in enumerate(files):
        (root / f"raw-{i}").unlink()
    return seconds


def _model(folder: Path, nbytes: float) -> int:
    """A directory as transformers writes it; its bytes of tensors."""
    folder.mkdir()
    layer = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_norm": (DIM,),
        "self_attn.k_norm": (DIM,), "self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (GROUPS * DIM, HIDDEN),
        "self_attn.v_proj": (GROUPS * DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
    }  # fmt: skip
    words = {
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "lm_head.weight": (WORDS, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    fixed, each = (2 * sum(map(math.prod, some.values())) for some in (words, layer))
    layers = max(1, round((nbytes - fixed) / each))
    shapes = words | {f"model.layers.{i}.{k}.weight": s for i in range(layers) for k, s in layer.items()}
    torch.manual_seed(0)
    home: dict[str, str] = {}
    files: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD

    def write() -> None:
        name = f"model-{len(set(home.values())) + 1:05d}.safetensors"
        save_file(files[-1], folder / name)
        home.update(dict.fromkeys(files[-1], name))
        files[-1].clear()

    for name, shape in shapes.items():
        files[-1][name] = torch.empty(shape, dtype=torch.bfloat16).normal_()
        room -= files[-1][name].nbytes
        if room < 0:
            write()
            room = SHARD
    if files[-1]:
        write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    config = {
        "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers, "hidden_size": HIDDEN, "head_dim": DIM,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": WORDS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return fixed + each * layers


def _compare(one: Path, other: Path) -> None:
    """Every tensor of both. Raises RuntimeError where one differs."""
    a, b = open_any(one), open_any(other)
    if a.specs != b.specs:
        raise RuntimeError("other tensors came back than went")
    theirs = {piece.tensor: piece.place for piece in b.pieces}
    for piece in a.pieces:
        if not torch.equal(a.read(piece.place, piece.tensor), b.read(theirs[piece.tensor], piece.tensor)):
            raise RuntimeError(f"{piece.tensor} is another after the way there and back")
