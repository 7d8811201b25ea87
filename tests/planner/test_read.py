"""Reading jobs and plans: what is right reads back equal, what is wrong is one sentence with its line and key."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram.errors import UserError
from tangram.schema.files import absolute, changes_of, dumps, line_of, load
from tangram.schema.job import CheckpointPlan, DataPlan, Job, ModelPlan, RunPlan, SourcePlan
from tangram.schema.optimiser import OptimiserPlan
from tangram.schema.parallelism import AxesPlan, LayoutsPlan
from tangram.schema.plan import Plan
from tests.planner.small import JOB, PLAN

MARKS = '[layouts.marks]\n"*.q_proj.weight" = "o/tp i"\n\n'
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "job.toml"


def said(path: Path, text: str, changes: dict[str, str] | None = None) -> str:
    """The one sentence that a file is refused with, without the path."""
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path, changes or {})
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("preset =", "presett ="), ', line {line}: unknown key "model.presett"; did you mean "preset"?'),
        (("[optimiser]", "[optimizer]"), ', line {line}: unknown key "optimizer"; did you mean "optimiser"? (and 1'),
        (("lr = 2e-3", "zzz = 1\nlr = 2e-3"), ', line {line}: unknown key "optimiser.zzz"; known are name, lr, lr_of,'),
        (("seed = 1", "steps = 1"), ', line {line}: unknown key "steps"; did you mean "run.steps"?'),
        (
            ("weight = 2.0", "wieght = 2.0"),
            ', line {line}: unknown key "data.sources.1.wieght"; did you mean "weight"?',
        ),
        (("weight = 2.0", "weight = 0"), ", line {line}: data.sources.1.weight = 0: input should be greater than 0"),
        (('path = "text"', "path = 3"), ", line {line}: data.sources.1.path = 3: input should be a valid string"),
        (('path = "text"', 'path = ""'), ", line {line}: data.sources.1.path = '': string should have at least 1"),
        (("steps = 300", ""), ': the key "run.steps" is missing'),
        (("version = 3", "version = 0"), ", line {line}: version = 0: input should be 3"),
        (("version = 3", 'version = "3"'), ", line {line}: version = '3': input should be 3"),
        (("version = 3", "version = 4"), ", line {line}: version = 4: this Tangram reads plans of version 3 and older"),
        (("version = 3", ""), ': the key "version" is missing: write version = 3'),
        (("steps = 300", 'steps = "many"'), ", line {line}: run.steps = 'many': input should be a valid integer"),
        (("steps = 300", "steps = true"), ", line {line}: run.steps = True: input should be a valid integer"),
        (
            ("sequence = 16", 'sequence = 16\npacking = "singel"'),
            """: data.packing = 'singel': did you mean "single"?""",
        ),
        (
            ("sequence = 16", "sequence = 16\npacking = 3"),
            ": data.packing = 3: input should be 'packed', 'best-fit', 'single' or 'auto'",
        ),
        (("steps = 300", "steps = 20"), ", line 21: optimiser.warmup_steps: warming up takes 20 steps of the 20"),
        (("lr = 2e-3", "lr = -1"), ", line {line}: optimiser.lr = -1: input should be greater than 0"),
        (("lr = 2e-3", "lr = inf"), ", line {line}: optimiser.lr = inf: input should be a finite number"),
        (("lr = 2e-3", "lr = nan"), ", line {line}: optimiser.lr = nan: input should be"),
        (("lr = 2e-3", "betas = [0.9, 1.0]\nlr = 1.0"), ", line {line}: optimiser.betas.1 = 1.0: input should be less"),
        (("lr = 2e-3", "betas = [0.9]\nlr = 1.0"), 'line {line}: the key "optimiser.betas.1" is missing'),
        (("lr = 2e-3", "clip_norm = nan\nlr = 1.0"), ", line {line}: optimiser.clip_norm = nan: input should be"),
        (("lr = 2e-3", 'schedule = "wsd"\nlr = 1.0'), ', line {line}: optimiser.schedule: the schedule "wsd" needs'),
        (("lr = 2e-3", "decay_steps = 9\nlr = 1.0"), ', line {line}: optimiser.decay_steps: only the schedule "wsd"'),
        (
            ("lr = 2e-3", 'decay_steps = 281\nschedule = "wsd"\nlr = 1.0'),
            ", line {line}: optimiser.decay_steps: warming up and decaying take 20 + 281 steps, more than the 300",
        ),
        (("[run]", '[precision]\nreduce = "bfloat16"\n\n[run]'), ": precision.reduce: gradients of a float32"),
        (("sequence = 16", "sequence = 16\nheld_out = 0"), ""),
        (("seed = 1", "seed = -1"), ", line {line}: seed = -1: input should be greater than or equal to 0"),
        (("[model]", "[model]\npath = 'here'"), ", line {line}: model: give the model by preset or by path, not both"),
        (("[model]", "[model]\nchange = { a = [1] }"), ", line 5: model.change.a = [1]: input should be a valid bool"),
        (("[model]", "[model]\nchange = 3"), ", line 5: model.change = 3: input should be a table"),
        (
            ("steps = 300", 'steps = 300\nrecompute = "layers"'),
            ", line 25: run.recompute = 'layers': write a list, as [\"layers\"]",
        ),
        (("steps = 300", "steps = "), ": this is not TOML: "),
        (("steps = 300", "steps = 300\nsteps = 300"), ": this is not TOML: "),
        (("seed = 1", 'mesh = "dp=2"'), ': the key "axes" is missing (and 1 more)'),
        (("seed = 1", f"seed = {'[' * 3000}"), ": this is"),
    ],
)
def test_a_wrong_job(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    assert change[0] in JOB
    line = JOB[: JOB.index(change[0])].count("\n") + 1
    text = JOB.replace(*change, 1)
    if not message:
        text, message = f"{text}evaluate_every = 3\n", ": run.evaluate_every: data.held_out = 0 leaves nothing to"
    assert message.replace("{line}", str(line)) in said(tmp_path / "job.toml", text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('mesh = "dp=2 tp=2"', 'mesh = "dp 2"'), ", line 3: mesh: "),
        (('mesh = "dp=2 tp=2"', ""), ': the key "mesh" is missing'),
        (('mesh = "dp=2 tp=2"', 'mesh = "dp=4 | a=2 b=2"'), ", line 3: mesh: this version trains over a mesh of one"),
        (('mesh = "dp=2 tp=2"', 'mesh = "dp=16 tp=2"'), "data.global_batch: 8 samples cannot be cut over the 16 ranks"),
        (('tensor = ["tp"]', 'tensor = ["dp"]'), ': axes: the axis "dp" of the mesh has 2 roles: name it once'),
        (('tensor = ["tp"]', 'tensor = ["xp"]'), ': axes: "xp" is no axis of the mesh "dp=2 tp=2"'),
        (('tensor = ["tp"]', ""), ': axes: the axis "tp" of the mesh has 0 roles'),
        (("(heads/tp head_dim)/dp h", "_/dp h"), ': axes.tensor: no mark and no layout of a parameter names "tp"'),
        (('"_/dp ..."', '"_/dp/ ..."'), ": layouts.parameters.*: "),
        (('"_/dp ..."', '"_/xp ..."'), ': layouts.parameters.*: "_/xp ..." names xp, no axis of the mesh'),
        (("head_dim = 32", "head_dim = 0"), ": layouts.sizes.head_dim = 0: input should be greater than 0"),
        (("[layouts.sizes]", "[layouts.activations]\n\n[layouts.sizes]"), "layouts.activations"),
    ],
)
def test_a_wrong_plan(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    assert change[0] in PLAN
    assert message in said(tmp_path / "plan.toml", PLAN.replace(*change, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("o/tp i", "o/dp i"), "names dp, but marks say how tensors lie over tensor, context and expert axes"),
        (("o/tp i", "o/ i"), ": layouts.marks.*.q_proj.weight: "),
    ],
)
def test_a_plan_with_wrong_marks(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    plan = PLAN.replace("[layouts.sizes]", MARKS + "[layouts.sizes]")
    (tmp_path / "right.toml").write_text(plan)
    assert dumps(load(tmp_path / "right.toml")).count("[layouts.marks]") == 1
    assert message in said(tmp_path / "plan.toml", plan.replace(*change, 1))


def test_the_line_of_a_rule(tmp_path: Path) -> None:
    line = PLAN[: PLAN.index('"*" =')].count("\n") + 1
    assert said(tmp_path / "plan.toml", PLAN.replace("_/dp", "_/dp/")).startswith(
        f", line {line}: layouts.parameters.*"
    )


def test_a_missing_file_a_folder_and_no_text(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no.toml", "there is no plan file"), (tmp_path, "cannot be read")):
        with pytest.raises(UserError, match=message):
            load(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not UTF-8 text"):
        load(tmp_path / "binary")


def test_keys_of_all_ways_of_writing_have_lines() -> None:
    text = 'a.b = 1\n[x."y.z"]\n"k*" = { deep = 1 }\n[[s]]\nq = 1\n[[s]]\nq = 2\n[s.t]\nr = 1\n'
    places = [["a", "b"], ["x", "y.z", "k*", "deep"], ["s", "0", "q"], ["s", "1", "q"], ["s", "1", "t", "r"]]
    assert [line_of(text, keys) for keys in places] == [1, 3, 5, 7, 9]
    assert line_of(text, ["s", "1", "no"]) == 6
    assert line_of(text, ["no"]) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run.stepz": "3"}, '--set run.stepz=3: unknown key "run.stepz"; did you mean "steps"?'),
        ({"run.steps": "many"}, "--set run.steps=many: run.steps = 'many': input should be a valid integer"),
        ({"optimiser.betas": "[1]"}, "--set optimiser.betas=[1]: optimiser.betas.0 = 1: input should be less than 1"),
        ({"seed.x": "1"}, '--set seed.x=1: "seed" is a value and has no keys below it'),
        ({"data.sources.2.path": "x"}, '--set data.sources.2.path=x: "2" is none of the 2 items'),
        ({"data.sources.path": "x"}, '--set data.sources.path=x: "path" is none of the 2 items'),
        ({"data.sources.7": "x"}, '--set data.sources.7=x: "7" is none of the 2 items'),
        ({"model.change.x": "[1]"}, "--set model.change.x=[1]: model.change.x = [1]: input should be"),
        ({"version": "2"}, "--set version=2: version = 2: input should be 3"),
        ({"run": "3"}, "--set run=3: run = 3: input should be a table"),
    ],
)
def test_a_wrong_change(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    assert message in said(tmp_path / "job.toml", JOB, changes)


def test_changes(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    plan = load(
        path,
        changes_of(
            [
                "run.steps = 30",
                "model.change.hidden_size=64",
                "data.sources.1.path=other",
                'data.sources.0.pattern="**/*.md"',
                "layouts.parameters.*.k_proj.weight=_/dp ...",
                "optimiser.clip_norm=inf",
                "checkpoint.asynchronous=false",
                "model.freeze=['*.bias']",
            ]
        ),
    )
    assert isinstance(plan, Plan)
    assert plan.run.steps == 30
    assert plan.model.change == {"hidden_size": 64}
    assert plan.model.freeze == ("*.bias",)
    assert [source.path for source in plan.data.sources] == ["stdlib", str(tmp_path / "other")]
    assert plan.data.sources[0].pattern == "**/*.md"
    assert plan.layouts.parameters["*.k_proj.weight"] == "_/dp ..."
    assert plan.optimiser.clip_norm == float("inf")
    assert not plan.checkpoint.asynchronous
    for word in ("run.steps", "=3", " = "):
        with pytest.raises(UserError, match="write a key and a value"):
            changes_of([word])


def test_a_change_makes_a_plan_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    changes = {"mesh": "dp=2", "axes.data": '["dp"]', "layouts.parameters.*": "_/dp ..."}
    assert isinstance(load(tmp_path / "job.toml", changes), Plan)
    assert type(load(tmp_path / "job.toml")) is Job


def test_paths_are_found_from_the_file(tmp_path: Path) -> None:
    text = JOB.replace('preset = "qwen3-1m"', 'path = "models/one"')
    text = text.replace("micro_batch = 2", 'micro_batch = 2\ntokenizer = "../words"\ncache = "cache"')
    (tmp_path / "job.toml").write_text(text)
    job = load(tmp_path / "job.toml")
    assert job.model.path == str(tmp_path / "models" / "one")
    assert job.data.tokenizer == str(tmp_path.parent / "words")
    assert job.data.cache == str(tmp_path / "cache")
    assert job.data.sources[0].path == "stdlib"
    assert load(QUICKSTART).data.tokenizer == "model"


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\\u0000b", "loop/x"])
def test_a_path_that_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "job.toml").write_text(JOB.replace('"text"', f'"{name}"'))
    with pytest.raises(UserError, match="is no path"):
        load(tmp_path / "job.toml")


def test_no_torch_is_loaded() -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-c",
        f"from tangram.schema.files import load; load({str(QUICKSTART)!r})",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pydantic" in done.stderr
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)  # a mistake shows at once


words = st.text(st.characters(codec="utf-8", exclude_characters="\0$"), min_size=1, max_size=8)  # $: a variable's
names = st.from_regex(r"[a-z*?_.\"' \\]{1,8}", fullmatch=True)
rates = st.floats(1e-9, 1e9)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job, or a plan of one."""
    steps = draw(st.integers(5, 10**12))
    job: dict[str, Any] = {
        "seed": draw(st.integers(0, 2**70)),
        "model": ModelPlan(
            path=f"/{draw(words)}",
            change=draw(st.dictionaries(names, st.booleans() | st.integers() | rates | words, max_size=3)),
            freeze=tuple(draw(st.lists(names, max_size=2))),
        ),
        "data": DataPlan(
            sources=(
                SourcePlan(path="stdlib", pattern=draw(st.none() | words)),
                SourcePlan(path=f"/{draw(words)}", weight=draw(rates), field=draw(words)),
            ),
            tokenizer=draw(st.sampled_from(["bytes", "model", "/a/b"])),
            cache=draw(st.sampled_from([None, "/a"])),
            sequence=draw(st.integers(2, 999)),
            global_batch=draw(st.integers(4, 999)),
            held_out=draw(st.floats(0.01, 0.99)),
        ),
        "optimiser": OptimiserPlan(
            lr=draw(rates),
            betas=(draw(st.floats(0, 0.99)), 0.5),
            clip_norm=draw(st.sampled_from([1.0, 2.5, float("inf")])),
            warmup_steps=draw(st.integers(0, 4)),
            no_decay=tuple(draw(st.lists(names, max_size=2))),
        ),
        "checkpoint": CheckpointPlan(every_steps=draw(st.integers(0, 9)), asynchronous=draw(st.booleans())),
        "run": RunPlan(steps=steps, max_seconds=draw(rates), recompute=tuple(draw(st.lists(names, max_size=2)))),
    }
    if draw(st.booleans()):
        return Job(**job)
    rules = draw(
        st.dictionaries(names, st.sampled_from(["...", "_/dp ...", "(a/tp b)/dp ..."]), min_size=1, max_size=4)
    )
    marks = draw(st.dictionaries(names, st.just("b s (n/tp d)"), max_size=2)) or {"x": "b/tp"}
    layouts = LayoutsPlan(parameters=rules, marks=marks, sizes=draw(st.dictionaries(names, st.just(3), max_size=2)))
    return Plan(**job, mesh="dp=2 tp=2", axes=AxesPlan(data=("dp",), tensor=("tp",)), layouts=layouts)


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_what_is_written_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    job = absolute(job, Path("/"))
    path = tmp_path_factory.getbasetemp() / "again.toml"
    text = dumps(job)
    path.write_text(text, encoding="utf-8")
    again = load(path)
    assert type(again) is type(job)
    assert again == load(path) == job
    assert dumps(again) == text
    if isinstance(again, Plan) and isinstance(job, Plan):  # the first rule that matches decides, so order counts
        assert list(again.layouts.parameters) == list(job.layouts.parameters)
        assert list(again.layouts.marks) == list(job.layouts.marks)


def test_defaults_are_left_out_and_a_comment_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    text = dumps(load(tmp_path / "plan.toml"))
    assert text.startswith("# A Tangram plan")
    assert dumps(load(QUICKSTART)).startswith("# A Tangram job")
    for default in ("betas", "checkpoint", "precision", "keep", "held_out =", "no_decay"):
        assert default not in text
    assert f'"{tmp_path / "text"}"' in text


def test_the_first_layout_rule_that_matches_decides(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    plan = load(tmp_path / "plan.toml")
    assert isinstance(plan, Plan)
    rules = LayoutsPlan(parameters={"*.norm.weight": "a/dp", "model.*": "b/dp ..."})
    plan = plan.model_copy(update={"layouts": rules})
    assert plan.layout_of("model.norm.weight") == "a/dp"
    assert plan.layout_of("model.embed.weight") == "b/dp ..."
    with pytest.raises(UserError, match=r"no rule in \[layouts.parameters\] matches the parameter \"lm_head\.weight\""):
        plan.layout_of("lm_head.weight")


def test_rules_of_what_is_kept_are_read_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    rules = '["every=1000", "best=metrics.held_out_loss:min:2", "younger=2d"]'
    plan = load(tmp_path / "plan.toml", {"checkpoint.also": rules})
    assert plan.checkpoint.also == ("every=1000", "best=metrics.held_out_loss:min:2", "younger=2d")
    with pytest.raises(UserError, match=r"checkpoint.*evry=3: give last=N, every=STEPS"):
        load(tmp_path / "plan.toml", {"checkpoint.also": '["evry=3"]'})
