"""Four real ranks that save by one strategy and load by another, in the pairs of Paddle's own conversion tests."""

import json
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from tangram.checkpoint.loading.load import load
from tangram.checkpoint.saving.save import save
from tests.checkpoint.stored import elements, same
from tests.checkpoint.strategies import FLAT, TENSOR, WHOLE, Strategy, stages

RANKS = 4
EXPERTS = {"*.experts*": "e/ep f h"}
NAMED = {
    "d2": Strategy("dp=2", FLAT),
    "d4": Strategy("dp=4", FLAT),
    "t2": Strategy("tp=2", TENSOR),
    "t4": Strategy("tp=4", TENSOR),
    "p2": Strategy("pp=2", stages(0, 1, 0, 1), absent=True),
    "p4": Strategy("pp=4", stages(0, 1, 2, 3), absent=True),
    "e2": Strategy("ep=2", EXPERTS),
    "e4": Strategy("ep=4", EXPERTS),
    "t2d2": Strategy("tp=2 dp=2", {f"optim{k}": f"{v} //dp" for k, v in TENSOR.items()} | TENSOR | FLAT),
    "d2t2": Strategy("dp=2 tp=2", {f"optim{k}": f"{v} //dp" for k, v in TENSOR.items()} | TENSOR | FLAT),
    "d2p2": Strategy("dp=2 pp=2", stages(0, 0, 1, 1, inside=FLAT), absent=True),
    "t2p2": Strategy("tp=2 pp=2", stages(0, 1, 0, 1, inside=TENSOR), absent=True),
    "d2e2": Strategy("dp=2 ep=2", {"optim*.experts*": "e/ep f h //dp"} | EXPERTS | FLAT),
    "t2e2": Strategy("tp=2 ep=2", TENSOR | {"*.experts*": "e/ep f/tp h"}),
}
PAIRS = (
    *("d2-d4", "t2-t4", "p2-p4", "e2-e4", "p2-t4", "t2-p2", "d4-t2d2", "d2-p2", "d2-e2", "e2-t2"),
    *("t2-e2", "d2t2-t4", "d2t2-p4", "d2p2-t4", "t2p2-d4", "t2p2-d2t2", "d2e2-d4", "t2e2-t4", "d2t2-p2", "d2e2-t2e2"),
)


def play(rank: int, folder: str) -> None:
    """One rank: save each strategy once, load every pair; what differs, as names by pair, in a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    groups = {2: _group(2), 4: _group(4)}
    wrong: dict[str, list[str]] = {}
    for pair in PAIRS:
        source, target = pair.split("-")
        path = Path(folder) / source
        strategy = NAMED[source]
        if rank < strategy.ranks and not path.exists():
            save(strategy.state(rank), path, group=groups[strategy.ranks])
        dist.barrier()  # fewer ranks load than saved, or others
        strategy = NAMED[target]
        if rank < strategy.ranks:
            state = strategy.state(rank, empty=True)
            load(state, path, group=groups[strategy.ranks])
            held = {f"{section}.{name}": one for section, table in state.items() for name, one in table.items()}
            parts = {name: elements(WHOLE[name], strategy.region(name, rank)) for name in held}
            wrong[pair] = [name for name, part in parts.items() if not same(torch.as_tensor(held[name].local), part)]
        dist.barrier()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


def _group(ranks: int) -> dist.ProcessGroup:
    """The first ranks."""
    return cast("dist.ProcessGroup", dist.new_group(list(range(ranks))))  # a number on ranks that are not in it
