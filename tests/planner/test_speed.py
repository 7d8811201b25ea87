"""What makes an answer quick changes none: bounds from strategies that are known, and imports that are put off."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tangram.hardware.catalogue.cluster import Cluster, load
from tangram.models.outlines.catalogue import in_catalogue
from tangram.models.outlines.outline import Dims, Outline, decoder
from tangram.planner.cost.calibration import published
from tangram.planner.legality.enumerate import Request
from tangram.planner.search.by_precision import Ranked, among, ranked, reached
from tangram.planner.search.query import requested
from tangram.planner.search.strategy import Ask, limit_of

MODELS = {
    "dense": decoder(Dims(12, 4096, 32, 32000, ffn=14336, kv_heads=8)),
    "mixture": decoder(Dims(8, 2048, 16, 32000, kv_heads=4, experts=16, per_token=2, expert_ffn=4096)),
}


def where() -> Cluster:
    return load("h100-8x2")


def best(outline: Outline, ask: Ask, request: Request, limit: float, most: int = 1, within: float = math.inf) -> Ranked:
    return ranked(outline, where(), ask, request, limit, most, published(), within)


@pytest.mark.parametrize("model", MODELS)
def test_what_would_be_otherwise_is_the_same_when_known_strategies_bound_it(model: str) -> None:
    """With more memory, less, and samples of twice the length, where layers need be recomputed and where not."""
    outline, ask = MODELS[model], Ask(2**18, 4096, others=("fp8",))
    request, limit = requested(where(), ask), 0.2 * limit_of(where(), ask)
    known = best(outline, ask, request, limit, 96).choices
    assert known
    longer = replace(request, batch=request.batch // 2, sequence=request.sequence * 2)
    tight = 0
    for other, most in ((request, 1.5 * limit), (request, 0.8 * limit), (longer, limit)):
        asked = replace(ask, sequence=other.sequence)
        within = reached(outline, where(), asked, other, most, published(), known)
        alone = best(outline, asked, other, most).choices
        assert best(outline, asked, other, most, within=within).choices == alone
        if alone and within < alone[0].step * 1.001:
            tight += 1
            assert not best(outline, asked, other, most, within=0.99 * within).choices  # a bound too low is seen
    assert tight  # the bound is the answer itself somewhere


def test_with_less_the_best_is_among_those_that_were_the_quickest() -> None:
    """Of memory and of the network: what a search finds anew, layers cut and recomputed anew too."""
    outline, ask, there = MODELS["dense"], Ask(2**18, 4096, others=("fp8",)), where()
    request, full = requested(there, ask), limit_of(there, ask)
    near, far = there.links
    half = replace(there, links=(near, replace(far, rate=far.rate / 2)))
    recomputed = list[str]()
    for limit in (0.16 * full, full):
        known = best(outline, ask, request, limit, 768).choices
        for cluster, most in ((there, 0.95 * limit), (half, limit)):
            if reached(outline, cluster, ask, request, most, published(), known) >= known[-1].step:
                continue  # there is a search then
            (searched,) = ranked(outline, cluster, ask, request, most, 1, published()).choices
            (found,) = among(outline, cluster, ask, request, most, published(), known)
            assert found.step == pytest.approx(searched.step, rel=1e-12)
            assert (found.mesh, found.micro, found.precision) == (searched.mesh, searched.micro, searched.precision)
            assert found.memory <= searched.memory  # of those that are as quick to the last bits
            assert found.step > known[0].step or found.at == known[0].at
            recomputed.append(found.again)
    assert len(recomputed) >= 3
    assert len({*recomputed}) > 1
    assert among(outline, there, ask, request, 1e9, published(), known) == ()


def test_nothing_is_as_quick_as_a_bound_and_the_smallest_is_still_named() -> None:
    outline, ask = MODELS["dense"], Ask(2**18, 4096)
    request, limit = requested(where(), ask), limit_of(where(), ask)
    found = best(outline, ask, request, limit, within=1e-6)
    assert not found.choices
    assert found.smallest.memory > 0


HEAVY = ("numpy", "lark", "tangram.planner.search.strategy", "torch", "transformers")


@pytest.mark.parametrize(
    ("typed", "nearest", "loaded"),
    [
        ("cluster llama-3-70x --cluster h100-8x8", "did you mean llama-3-70b", 0),
        ("cluster llama-3-70b --cluster h10-8x8", "did you mean h100", 0),
        ("cluster llama-3-70b --cluster h100-8x8 --framework megatrn", "did you mean 'megatron'", 0),
        ("cluster llama-3-70b --cluster h100-8x8 --loss eagre", "did you mean 'eager'", 0),
        ("cluster llama-3-70b --cluster h100-8x8 --optimiser adamww", "did you mean 'adamw'", 1),
        ("cluster llama-3-70b --cluster h100-8x8 --base nf5", "did you mean 'nf4'", 1),
        ("cluster llama-3-70b --cluster h100-8x8 --offload optimizer", "did you mean 'optimiser'", 1),
        ("cluster llama-3-70b --cluster h100-8x8 --precision f8", "did you mean 'fp8'", 1),
        ("cluster llama-3-70b --cluster h100-8x8 --task dpoo", "did you mean 'dpo'", 1),
        ("cluster llama-3-70b --cluster h100-8x8 --without zer3", "did you mean zero2 or zero3", 1),
        ("cluster {job} --cluster h100-8x8 --set run.step=3", 'did you mean "steps"', 2),
        ("local {job} --set run.step=3", 'did you mean "steps"', 2),
    ],
)
def test_a_misspelt_name_is_refused_before_anything_heavy_is_loaded(typed: str, nearest: str, loaded: int) -> None:
    """`loaded`: how many of `HEAVY` the names themselves need."""
    job = Path(__file__).parents[2] / "examples" / "quickstart" / "job.toml"
    words = typed.format(job=job).split()
    code = (
        f"import sys\nfrom tangram.cli import main\ncode = main(['plan', *{words!r}])\n"
        f"heavy = [one for one in {HEAVY[loaded:]!r} if one in sys.modules]\n"
        "sys.exit(0 if code == 2 and not heavy else str((code, heavy)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert nearest in found.stderr


def test_presets_of_public_models_are_in_the_catalogue_by_their_own_names() -> None:
    """So that their plans need neither torch nor transformers; `tests/models` compares their blocks."""
    for name in ("llama-3-8b", "llama-3-70b", "deepseek-v3"):
        found = in_catalogue(name)
        assert found is not None
        assert found.name.lower() == name
