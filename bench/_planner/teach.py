"""Learns from all published runs and writes `planner/cost/learned.npz`: run as `python -m bench._planner.teach`."""

from __future__ import annotations

from pathlib import Path

from bench._planner.predict import HeldOut, predictable
from bench._planner.rows import cases, read
from tangram.hardware.catalogue.devices import device
from tangram.planner.cost.calibration import save

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "data" / "published" / "runs.csv"
LEARNED = ROOT / "src" / "tangram" / "planner" / "cost" / "learned.npz"


def main() -> None:
    """Write the file."""
    known = predictable(list(cases(read(RUNS))))
    found = HeldOut(known).all()
    save(found.elsewhere(), LEARNED)
    devices = {device(one.gpu).name for one in known}
    print(f"{len(known)} runs on {len(devices)} devices, {len(found.names)} effects, noise {found.noise:.3f}")


if __name__ == "__main__":
    main()
