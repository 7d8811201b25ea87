"""Writes docs/planner-accuracy.md from what `tangram bench planner --json` printed.

Run as `python -m bench._planner.card REPORT.json THREADS.txt CURVES.txt`; the last two are what
`python -m bench._planner.threads` (and `questions` after it) and `python -m bench._planner.curves` printed. All figures
of the page are theirs; the words around them are here. What a report has nothing of (`--only`), and what no file is
given of, stays as it is on the page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "planner-accuracy.md"
THREADS, CURVES = "Runs told of in public threads", "Curves of kernels"
HEAD = """# How far the planner is off

Written by `python -m bench._planner.card` from what `tangram bench planner` printed; the published runs are in
[data/published](../data/published/README.md). Of a group's runs nothing has been seen: each run is predicted from runs
of other sources and of models of other names. "Unlearned" is the closed form with curves of kernels alone, to
which no training run was fitted. "Constant MFU" is FLOPs / (devices x best rate x the median MFU of like runs
elsewhere): of the same device, type and kind of model where there are three, else of the same device, else of the type
and kind. "Inside" are runs within their interval of 90 %.

The widths of effects (`planner/cost/calibration.py`) and the constants of `planner/cost/block_time.py` and
`frameworks.toml` were chosen while these groups were looked at, so they are less independent of them than the held-out
runs are. On runs that nobody here has seen errors will be larger.

## Step time

| group (gpu/type/kind/source) | runs | zero-shot | 90th percentile | inside | unlearned | constant MFU | after 5 runs |
|---|---|---|---|---|---|---|---|
"""
MISSES = """
## What falls short, and why

- `mist_aceso_runs` and `mist_l4`: what is recomputed differs by stage there, and a grid has one share for all
  stages, so that memory is overestimated.
- `mcore_golden` of a billion parameters and more (7 runs): four offload activations by fine-grained choice, which the
  rows do not tell how far, and one captures attention in a graph of its own; the two without either are predicted 5%
  and 9% too high. Other large misses are older runs with up to 1.6 times the memory of later ones of the same
  configuration.
- The search for DeepSeek-V3 takes 8.9 s with a core to itself, 20.5 s beside other work.
- Plans run here, on 4 and 8 processes that share two cores: the first choice is 19% to 26% beyond the best until
  three trials have been run, for rates of two cores shared by many processes are not those of each by itself. After
  three trials the best is chosen.
- `torchtitan`, allocated: four runs of one page, which does not name its model (it is taken as Llama-3-8B). Other runs
  of torchtitan with that model and the same recomputation held 77 GiB with two samples and 16 bytes a number divided by
  8, which makes 46 with one; this page says 31, and what is predicted, 37, lies between. Not understood.
- `bigscience_1b3`: figures are whole GB that nvidia-smi showed. Pipelines are predicted about 1 GB too high in every
  row: context and communicators of a V100 take less than the 3 GB taken for every device. One stage alone is predicted
  too low, by more with larger micro-batches: from one stage to two 6 GB less were measured, of which divided parameters
  and gradients explain 2.6; the rest is not understood.
- Questions 40, 41, 42, 50, 54, 98, 107 and 137 ran out of memory and are said to fit, with chances of 0.54 to 1. Rows
  of unlike lengths are not the reason: of ten such runs (listed in data/published) 0% to 5% was reserved and not
  allocated; 4% are taken. Of 41 and 42 the frameworks of that month are: the handbook put both models whole in
  float32 on each rank (until its pull request 115), TRL 0.7.2 had ZeRO's stage 0 for the policy, too (until its 957).
  50 ran out before any row with the bytes that 51 has, which fitted. 57 and 105 fitted: rows of 57 are mostly
  shorter, the configuration of 105 is not shown whole. 137 is within 1 GiB.
- Thread 29 ran out and fits by 0.19: frozen layers had gradients before. Not understood: 132, 133.
- Samples that are packed of documents whose lengths nobody says are taken as one each (70: 1,469 s so, 172 with
  lengths that a page tells, 150 measured). transformers ran a mixture's experts one by one until 2025, and ZeRO-3
  each one's hooks (67: 91 s): `--framework deepspeed-transformers-4` says 26 s, `deepspeed` 3. 66 took twice as long
  as predicted; its network, loads and documents are not said.
- gpt-oss-120b by Megatron-Bridge on H100 (180, 182) takes 25 to 28 ms a layer and micro-batch of 2,048 or 4,096
  tokens, twice what is predicted: not understood. 174 takes less than its documents' kernels add; 170 captures
  routers as graphs. 188 ran out with 80.6 GiB, 6 more than are predicted; 191 keeps dropout's masks.
- 195, 196 say no loss; 197: `zero3_init_flag` off; 200: DeepSpeed gathers less.
- Memory of ms-swift's tables (73 to 81) is what the allocator held for rows of unlike lengths, up to twice what is
  needed; that of its Megatron runs (62 to 72) is predicted 1% to 34% too low, most of mixtures whose layers are
  recomputed, of which the loss that its arguments ask for (`--loss parallel-fused`) explains 4.6 GiB.
- Threads 30 to 35: DeepSpeed's table does not say which AdamW it has. Torch's, which Trainer gives it, needs 8 bytes of
  each number of a rank's part more than DeepSpeed's own while it updates, which is most where activations are few (31).
- Of 11 groups three hold 85% to 95% of their runs in 90% intervals. Each is of one source, and sources are off as
  wholes by 7.5% (standard deviation of the groups' means) beside 13% within one: intervals that cover 90% of the runs
  of all sources cover nearly all runs of a source that is met well, and too few of one that is not. Weights by source
  were tried (`planner/cost/calibration.py`).
- Intervals are as wide as errors on held-out runs of other places and models were, most of those alike in device,
  type, kind of model and framework. Of a single source whose machine or software is off as a whole (mixtures in FP8,
  which one source alone has) fewer lie within, of one that is predicted well more: that cannot be known before a run
  of it.
- Collectives: the medians above are from 64 KiB; from 1 MB those of A100, H100 and B200 are 14% to 18% but for
  all-to-all (5% to 13%). Networks between nodes have one curve for all devices.
- `internevo`: its figure does not say what it is of; taken as the device's it is far above what is predicted.
- Groups of tuned runs on one machine (`dgxc`, `nemo_docs` in FP8) lie so close together that the MFU of one
  predicts the other's best; the planner is not below it there.
- Runs that fitted and are called unsafe are many where a source does not say what it offloads or keeps in 8 bits
  (`mbridge`), and where recomputation differs by stage.
- Mixtures on GB200 and GB300: dispatchers that combine tokens by node are not modelled, all-to-all is. Releases of one
  source differ by a third there (NeMo 25.09 was 12% slower than the closed form, 26.06 is 20% quicker), and what other
  sources have taught lies nearer the slow end.
- `torchtitan`: its H100 have 96 GB and 500 W, a device of their own in the catalogue (h100-96); steps with recompute by
  operator take a tenth longer on them than the closed form says. 8-bit matmuls with a scale for each row are not told
  from those with one for each tensor.
- Mixtures in FP8 on B200 and H100 (`mbridge`): of the same recipe some releases took twice as long as others, so no one
  prediction is near both; on B200 all other runs are of one machine whose matmuls reach 70% of what others measured.
- Hybrid models (`nemotron-3`), T5 and BERT have other layers and are not predicted.
"""


def main(report: Path, threads: Path | None = None, curves: Path | None = None) -> None:
    """Write the page."""
    rows: list[dict[str, Any]] = json.loads(report.read_text())["rows"]
    before = PAGE.read_text(encoding="utf-8")
    text = HEAD + _times(rows) + _rest(rows, before)
    text += _threads(threads.read_text()) if threads else _section(before, THREADS)
    text += _curves(curves.read_text()) if curves else _section(before, CURVES)
    PAGE.write_text(text + MISSES, encoding="utf-8")
    print(f"wrote {PAGE}")


def _section(page: str, title: str) -> str:
    """Of the page as it stands, with its title; "" where it has none."""
    start = page.find(f"\n## {title}\n")
    return "" if start < 0 else page[start : page.index("\n## ", start + 1)]


def _threads(printed: str) -> str:
    each = [line.partition(": ") for line in printed.strip().splitlines()]
    typed = ((re.sub(r"^(q\d+) (.*)$", r"\1 `\2`", run), rest) for run, colon, rest in each if colon)
    rows = "\n".join(f"| {run} | {rest} |" for run, rest in typed)
    whole = "\n".join(line for line, colon, _ in each if not colon)
    head = (
        "Of `data/published/threads.csv`, and of `questions.csv` as typed; nothing was learned from them, but how far "
        "learned effects reach and how wide intervals are was chosen with the threads in view, what torchtune has, "
        "frozen ends and the pace at which 4 bits are unpacked with questions 0 to 38, the seconds of Megatron's hosts "
        "with 167 to 180. As first typed 6 of 9 (39 to 47), 4 of 10 (48 to 57), 25 of 33 (58 to 90), 14 of 22 (91 to "
        "112), 10 of 15 (113 to 127), 10 of 15 (128 to 142), 16 of 20 (147 to 166), 6 of 12 (181 to 192) "
        "and 5 of 8 (193 to 200) were right; eighteen were refused for names that are there since. "
    )
    return f"\n## {THREADS}\n\n{head}\n\n| run | |\n|---|---|\n{rows}\n\n{whole}\n"


def _times(rows: list[dict[str, Any]]) -> str:
    few = {
        match.group(1): row["ours"]
        for row in rows
        if (match := re.fullmatch(r"step time after 5 runs, (.*)", row["figure"])) and "median of" not in row["figure"]
    }
    lines: list[str] = []
    pattern = re.compile(
        r"step time, zero-shot, (.*) \((\d+) runs; nothing learned ([\d.]+), 90th percentile ([\d.]+), "
        r"in the interval ([\d.]+)\)"
    )
    for row in rows:
        if match := pattern.fullmatch(row["figure"]):
            group, runs, physics, worst, inside = match.groups()
            after = f"{few[group]:.1%}" if group in few else ""
            bar = row["peers"]["constant MFU"]
            ours = f"{row['ours']:.1%} | {float(worst):.1%} | {float(inside):.0%} | {float(physics):.1%}"
            lines.append(f"| {group} | {runs} | {ours} | {bar:.1%} | {after} |")
    return "\n".join(lines) + "\n"


def _rest(rows: list[dict[str, Any]], before: str) -> str:
    titles = {
        "All groups, and intervals": ("step time, zero-shot: ", "the same", "groups below", "step time after 5 runs: ",
                                      "runs in their"),
        "Ranking": ("ranking",),
        "Memory": ("memory", "runs of memory", "runs out of memory", "runs that fitted"),
        "Speed": ("configurations", "DeepSeek"),
        "Plans of the quickstart model, run on two cores": ("plans here",),
    }  # fmt: skip
    text = ""
    for title, starts in titles.items():
        if not any(row["figure"].startswith(starts) for row in rows):
            text += _section(before, title)
            continue
        text += f"\n## {title}\n\n| figure | measured | to reach | met |\n|---|---|---|---|\n"
        for row in rows:
            if row["figure"].startswith(starts):
                met = {True: "yes", False: "no", None: ""}[row["met"]]
                goal = "" if row["target"] is None else f"{row['target']:.4g}"
                text += f"| {row['figure']} | {row['ours']:.3g} {row['unit']} | {goal} | {met} |\n"
    return text


def _curves(printed: str) -> str:
    table = printed[printed.index("| curve") :].strip()
    head = "How well `hardware/curves.toml` fits the published kernel tables; the held-out half is of other shapes.\n"
    return f"\n## {CURVES}\n\n{head}\n{table}\n"


if __name__ == "__main__":
    main(*(Path(one) for one in sys.argv[1:4]))
