"""A script that runs Paddle itself on a few processes of the CPU: train a little and save, or load what was written.

    python -m paddle.distributed.launch --nproc_per_node 2 tests/checkpoint/peers/paddle_save.py save DIR
    python -m paddle.distributed.launch --nproc_per_node 2 tests/checkpoint/peers/paddle_save.py load DIR OUT SHAPES

`save` leaves three checkpoints of one state (safetensors; what Paddle pickles; safetensors with the copies of all
ranks) and what each rank held as numpy arrays, in `held-RANK.npz`. `load` has every rank load its half of the
tensors along dim 0, as `dist.load_state_dict` does, and leaves them in OUT/RANK.npz; SHAPES is JSON. What the tests
without Paddle read (`fixtures/paddle`) was made by this script. It imports nothing of Tangram.

A shim: on several ranks Paddle's reader calls `Tensor.cuda`, also where there is no such device. Its AdamW has no
bfloat16 on the CPU, so float32 masters are trained, and the weights that are saved beside them are their rounding.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

STEPS = 3
CUTS = {"q_proj.weight": 1, "o_proj.weight": 0, "norm.weight": None, "odd.weight": 0}
SHAPES = {"q_proj.weight": (6, 8), "o_proj.weight": (8, 6), "norm.weight": (6,), "odd.weight": (5, 3)}
KINDS = {"q_proj.weight": "bfloat16", "o_proj.weight": "bfloat16", "norm.weight": "float32", "odd.weight": "float32"}


def part(shape: tuple[int, ...], cut: int | None, rank: int, ranks: int) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Where a rank's part of a tensor begins, and the part as slices; cut as torch.chunk does."""
    if cut is None:
        return (0,) * len(shape), tuple(slice(0, n) for n in shape)
    step = -(-shape[cut] // ranks)
    first, last = min(rank * step, shape[cut]), min((rank + 1) * step, shape[cut])
    offset = tuple(first if dim == cut else 0 for dim in range(len(shape)))
    return offset, tuple(slice(first, last) if dim == cut else slice(0, n) for dim, n in enumerate(shape))


def values(name: str, turn: int) -> np.ndarray:
    """The same numbers on every rank."""
    count = int(np.prod(SHAPES[name]))
    seed = sorted(SHAPES).index(name) * 100 + turn
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32).reshape(SHAPES[name])


class Model(paddle.nn.Layer):
    """The parts of some weights that a rank has, as parameters."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.slices = {name: part(SHAPES[name], cut, rank, ranks) for name, cut in CUTS.items()}
        self.parts: dict[str, Any] = {}
        for name, (_, where) in self.slices.items():
            own = values(name, 0)[where]
            one = self.create_parameter(list(own.shape), dtype="float32")
            one.set_value(paddle.to_tensor(own))
            self.add_parameter(name.replace(".", "_"), one)
            self.parts[name] = one

    def sharded(self) -> dict[str, ShardedWeight]:
        """As `dist.save_state_dict` takes them."""
        return {
            name: ShardedWeight(name, one, tuple(one.shape), SHAPES[name], self.slices[name][0])
            for name, one in self.parts.items()
        }


def trained(rank: int, ranks: int) -> dict[str, ShardedWeight]:
    """Weights and AdamW's states with float32 masters after some steps; beside them a tensor in flat parts (ZeRO)."""
    model = Model(rank, ranks)
    adamw = paddle.optimizer.AdamW(0.01, beta1=0.9, beta2=0.95, parameters=model.parameters(), weight_decay=0.1)
    for turn in range(1, STEPS + 1):
        for name, one in model.parts.items():
            one.grad = paddle.to_tensor(values(name, turn)[model.slices[name][1]])
        adamw.step()
    held = model.sharded()
    held |= adamw.sharded_state_dict(held)
    for name, kind in KINDS.items():
        if kind != "float32":
            one = held[name]
            where = (one.local_shape, one.global_shape, one.global_offset)
            held[f"{name}.w_0"] = ShardedWeight(f"{name}.w_0", one.local_tensor, *where)
            held[name] = ShardedWeight(name, one.local_tensor.astype(kind), *where)
    flat = np.arange(15, dtype=np.float32) * 1.5
    first, last = ((0, 7), (7, 15))[rank] if ranks == 2 else (0, 15)
    held["flat.weight"] = ShardedWeight(
        "flat.weight", paddle.to_tensor(flat[first:last]), (3, 5), (3, 5), (0, 0), True, slice(first, last)
    )
    held["count"] = ShardedWeight("count", paddle.to_tensor(np.array([7, -1], dtype=np.int64)), (2,), (2,), (0,))
    return held


def save(folder: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = trained(rank, ranks)
    dist.save_state_dict(dict(held), str(folder / "safetensors"), safetensors=True)
    dist.save_state_dict(dict(held), str(folder / "pickled"))
    dist.save_state_dict(dict(held), str(folder / "copies"), safetensors=True, save_replicas=True)
    arrays: dict[str, np.ndarray] = {}
    for name, one in held.items():
        wide = one.local_tensor.astype("float32") if one.local_tensor.dtype == paddle.bfloat16 else one.local_tensor
        where = [*one.global_offset, *((one.flattened_range.start,) if one.is_flattened else ())]
        arrays[f"{name}|{','.join(map(str, where))}"] = wide.numpy()
    np.savez(folder / f"held-{rank}.npz", **arrays)


def load(folder: Path, out: Path, shapes: dict[str, tuple[list[int], str]]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > 1:
        paddle.Tensor.cuda = lambda self, *_, **__: self
    wanted: dict[str, ShardedWeight] = {}
    for name, (shape, kind) in shapes.items():
        whole = not shape or shape[0] < ranks
        offset, where = part(tuple(shape), None if whole else 0, rank, ranks)
        own = [s.stop - s.start for s in where]
        wanted[name] = ShardedWeight(
            name, paddle.full(own, 77).astype(kind), tuple(own), tuple(shape), offset if shape else ()
        )
    dist.load_state_dict(wanted, str(folder), safetensors=True)
    arrays = {name: one.local_tensor.astype("float64").numpy() for name, one in wanted.items()}
    np.savez(out / f"{rank}.npz", **arrays)


if __name__ == "__main__":
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    what, target, *more = sys.argv[1:]
    if what == "save":
        save(Path(target))
    else:
        load(Path(target), Path(more[0]), json.loads(more[1]))
