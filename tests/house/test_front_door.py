"""The front door and the faces of the rooms: every name is there, is found by type checkers, and costs nothing before.

What a user does with them: a state saved and loaded in five lines, a model derived, a cluster planned.
"""

import ast
import copy
import importlib
import inspect
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tangram
import tangram.checkpoint
import tangram.planner
from tangram.errors import UserError
from tangram.training import eager
from tests.house.doc_blocks import all_blocks
from tests.ranks import start

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tangram"
FACES = ("", "layout", "relayout", "checkpoint", "planner", "tracing", "training", "sharding", "models", "hardware")
LAZY = ("", "checkpoint", "training", "sharding", "models", "hardware")
INNER = ("training.data", "sharding.eager", "cli")
"""Parts of rooms that are public, too."""


def module_of(face: str) -> str:
    return f"tangram.{face}" if face else "tangram"


def file_of(face: str) -> Path:
    return SOURCE / face.replace(".", "/") / "__init__.py"


# ------------------------------------------------------------ the names


@pytest.mark.parametrize("face", FACES)
def test_every_name_is_there_and_documented(face: str) -> None:
    module = importlib.import_module(module_of(face))
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        assert not inspect.ismodule(value), f"{name} is a module"
        if inspect.isfunction(value) or inspect.isclass(value):
            assert value.__doc__, f"{module.__name__}.{name} has no docstring"


@pytest.mark.parametrize("face", FACES)
def test_a_path_may_be_text(face: str) -> None:
    module = importlib.import_module(module_of(face))
    public = [getattr(module, name) for name in module.__all__]
    functions = [one for one in public if inspect.isfunction(one)]
    for kind in (one for one in public if inspect.isclass(one)):
        own = [one for name, one in vars(kind).items() if name == "__init__" or not name.startswith("_")]
        functions += [one for one in own if inspect.isfunction(one) and not hasattr(kind, "__dataclass_fields__")]
    for function in functions:
        for name, parameter in inspect.signature(function).parameters.items():
            text = str(parameter.annotation)
            assert "Path" not in text or "str" in text, f"{function.__qualname__}({name}) takes no text"


def typed(tree: ast.Module) -> set[str]:
    """What a face imports for type checkers, as `module name` or `module name as other`."""
    block = next(one for one in tree.body if isinstance(one, ast.If))
    return {
        f"{node.module} {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def looked_up(tree: ast.Module) -> set[str]:
    """What it looks up when it is used."""
    table = next(node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    places: dict[str, list[str]] = ast.literal_eval(table)
    return {f"{module} {name}" for module, names in places.items() for name in names}


@pytest.mark.parametrize("face", LAZY)
def test_type_checkers_see_what_is_looked_up(face: str) -> None:
    tree = ast.parse(file_of(face).read_text())
    assert typed(tree) == looked_up(tree)
    names = {one.split()[-1] for one in typed(tree)}
    assert names == set(importlib.import_module(module_of(face)).__all__) - {"__version__"}


def hidden(package: Path, names: set[str]) -> set[str]:
    """Names that a module or a folder of the package has, too: importing it would put it in their place."""
    return {name for name in names if (package / f"{name}.py").exists() or (package / name).is_dir()}


@pytest.mark.parametrize("face", LAZY)
def test_no_name_is_that_of_a_module_beside_it(face: str) -> None:
    assert hidden(SOURCE / face, set(importlib.import_module(module_of(face)).__all__)) == set()


def test_a_name_that_a_module_would_hide_is_found(tmp_path: Path) -> None:
    (tmp_path / "save.py").touch()
    assert hidden(tmp_path, {"save", "load"}) == {"save"}


def test_names_that_there_are_not_are_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'tangram' has no attribute 'sav'"):
        _ = tangram.sav  # pyright: ignore


def test_the_package_is_imported_within_50_ms_and_brings_nothing() -> None:
    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    lean = "import sys, tangram; dir(tangram); assert not {'torch', 'numpy', 'pydantic'} & {*sys.modules}"
    assert min(seconds(lean) for _ in range(3)) - min(seconds("import sys") for _ in range(3)) < 0.05


# ------------------------------------------------------------ who uses them

INTERNALS = frozenset(
    f"docs/{name}.md"
    for name in (
        *("attention-kernels", "attention-numerics", "data", "extending", "fused", "hardware"),
        *("notation", "op-accuracy", "planner", "relayout", "sharding", "sharding-choose", "sharding-derive"),
        *("sharding-dtensor", "sharding-propagation", "sharding-run", "planner-export", "training"),
    )
)
"""Pages on a room's inside, which name its modules."""


def public() -> dict[str, set[str]]:
    """The names of each public module."""
    return {
        module_of(face): {*importlib.import_module(module_of(face)).__all__, *FACES, *INNER}
        for face in (*FACES, *INNER)
    }


def private_imports(text: str) -> list[str]:
    """What a Python text imports of Tangram that is not public."""
    code = "\n".join(re.findall(r"^>>> (.*(?:\n\.\.\. .*)*)", text, re.MULTILINE)) if ">>> " in text else text
    known, found = public(), list[str]()
    for node in ast.walk(ast.parse(code.replace("\n... ", "\n"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tangram"):
            names = known.get(node.module or "", set())
            found += [f"{node.module} {alias.name}" for alias in node.names if alias.name not in names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if f"{alias.name}.".startswith("tangram.")]
    return [one for one in found if one not in known]


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.py")), ids=lambda file: file.name)
def test_examples_import_public_names_only(file: Path) -> None:
    assert private_imports(file.read_text()) == []


@pytest.mark.parametrize(
    "block",
    [b for b in all_blocks() if b.language in ("python", "py") and b.page not in INTERNALS],
    ids=str,
)
def test_pages_import_public_names_only(block: Any) -> None:
    assert private_imports(block.text) == []


def test_a_private_import_is_found() -> None:
    assert private_imports("from tangram.checkpoint.store.commits import newest\nimport tangram.cli\n") == [
        "tangram.checkpoint.store.commits newest"
    ]
    assert private_imports(">>> from tangram import save, plans\n") == ["tangram plans"]


@pytest.mark.slow
def test_examples_are_typed_as_a_user_would_check_them(tmp_path: Path) -> None:
    """Strict, but for two rules that only report torch; a mistake in the use of Tangram is seen, so types are there."""
    for file in (ROOT / "examples").glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "wrong.py").write_text("import tangram\n\ntangram.verify(3)\ntangram.nothing()\n")
    rules = '"reportUnknownMemberType": false, "reportPrivateImportUsage": false'
    (tmp_path / "pyrightconfig.json").write_text(f'{{"typeCheckingMode": "strict", {rules}}}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    errors = [line.strip() for line in ran.stdout.splitlines() if " - error" in line]
    assert [re.sub(r"^.*/", "", one).split(" - ")[0] for one in errors] == ["wrong.py:3:16", "wrong.py:4:9"], ran.stdout


# ------------------------------------------------------------ what they do


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(8, 12)


def test_a_plain_state_is_saved_loaded_verified_and_converted(tmp_path: Path) -> None:
    model = linear()
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optim.step()
    saved = tangram.save({"model": model, "optim": optim, "progress": {"step": 1}}, tmp_path / "a")
    assert saved is not None
    other = nn.Linear(8, 12)
    progress = {"step": 0}
    state = {"model": other, "optim": torch.optim.AdamW(other.parameters()), "progress": progress}
    tangram.checkpoint.load(state, str(tmp_path / "a"))
    assert torch.equal(other.weight, model.weight)
    assert progress == {"step": 1}
    assert tangram.verify(tmp_path / "a").sound
    made = tangram.convert(tmp_path / "a", tmp_path / "hf", to="hf")
    assert made.tensors == 2
    assert tangram.verify(tmp_path / "hf").sound
    file = next((tmp_path / "hf").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4])
    assert not tangram.verify(str(tmp_path / "hf")).sound
    with pytest.raises(UserError, match="there already"):
        tangram.convert(tmp_path / "a", tmp_path / "hf", to="dcp")


def test_a_model_of_accelerate_is_saved_as_it_is(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = linear()
    prepared, optim = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    prepared(torch.ones(2, 8)).sum().backward()
    optim.step()
    state = {"model": accelerator.unwrap_model(prepared), "optim": optim}
    tangram.save(state, tmp_path / "a")
    other = nn.Linear(8, 12)
    tangram.load({"model": other, "optim": torch.optim.AdamW(other.parameters())}, tmp_path / "a")
    assert torch.equal(other.weight, model.weight)


def on_ranks(rank: int, folder: str) -> None:
    """From FSDP2 to DTensors, by the package's own functions; then a model made parallel."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sharded = linear()
    fully_shard(sharded)
    tangram.checkpoint.save({"model": sharded}, f"{folder}/fsdp")
    mesh = init_device_mesh("cpu", (2,))
    weight, bias = (distribute_tensor(torch.zeros(*shape), mesh, [Shard(0)]) for shape in ((12, 8), (12,)))
    tangram.checkpoint.load({"model": {"weight": weight, "bias": bias}}, f"{folder}/fsdp")
    assert torch.equal(weight.full_tensor(), linear().weight)

    x, alone, model = torch.ones(4, 8), linear(), linear()
    alone(x).square().sum().backward()
    model.weight._no_weight_decay = True  # type: ignore[attr-defined]
    beside = cast(Any, tangram.parallelize(model, "tp=2", ["weight: out/tp in"], inputs={"input": x}))
    with pytest.raises(UserError, match="made parallel in place, and this is what parallelize returns beside it: call"):
        beside(input=x)  # as of what DDP returns, which is the model
    with pytest.raises(AttributeError, match="beside it: parameters is the model's"):
        beside.parameters()
    assert not hasattr(beside, "nothing_such")
    assert vars(model.weight)["_no_weight_decay"], "code tells parameters apart by such attributes"
    model(input=x).square().sum().backward()
    found: Any = model.weight.grad
    assert torch.allclose(found.full_tensor(), alone.weight.grad)
    with pytest.raises(UserError, match='the mesh "tp=4" has 4 ranks and the process group 2'):
        tangram.parallelize(linear(), "tp=4", [], inputs={"input": x})
    a_loop_of_ones_own(folder, rank)
    a_step_as_it_runs()
    dist.destroy_process_group()


class Block(nn.Module):
    """A parameter that is cut, one that is not, a norm, and a dropout that evaluation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Dropout(0.1), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(self.up(self.norm(x)).relu()))


def block() -> Block:
    torch.manual_seed(1)
    return Block()


def a_loop_of_ones_own(folder: str, rank: int) -> None:
    """What such a loop has by habit, on a mesh with an axis that cuts nothing: the numbers are those of one process."""
    x, alone = torch.randn(4, 8), block().eval()
    for mesh, marks in (
        ("tp=2", ["up.weight: out/tp in"]),
        ("dp=1 tp=2", ["down.weight: out in/tp"]),
        ("dp=2", ["norm: batch/dp hidden"]),
    ):
        model = block()
        parallel = tangram.parallelize(model, mesh, marks, inputs={"x": x})
        assert all(isinstance(p, DTensor) for p in model.parameters()), "else torch refuses to take them together"
        with torch.inference_mode():  # as the first call of all
            assert torch.allclose(model.eval()(x), alone(x), atol=1e-6)
        optim = torch.optim.AdamW(model.parameters(), foreach=True)
        whole = block().eval()
        theirs = torch.optim.AdamW(whole.parameters())
        norms: list[torch.Tensor] = []
        for _ in range(2):
            for one, stepped in ((model, optim), (whole, theirs)):
                stepped.zero_grad()
                for half in x.chunk(2):
                    one(half).square().sum().backward()
                parallel.sum_gradients()  # nothing is left to sum
                norm: Any = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                norms = [*norms, norm] if one is whole else [norm.full_tensor()]
                stepped.step()
            assert torch.allclose(norms[0], norms[1])
        for name, p in model.named_parameters():
            assert torch.allclose(cast(Any, p).full_tensor(), whole.get_parameter(name), atol=1e-6)
        tangram.save({"model": model, "optim": optim}, f"{folder}/{mesh}")
        other = block()
        if rank == 0:  # and one process of several
            tangram.load(
                {"model": other, "optim": torch.optim.AdamW(other.parameters())}, f"{folder}/{mesh}", no_dist=True
            )
            assert all(torch.allclose(p, whole.get_parameter(name), atol=1e-6) for name, p in other.named_parameters())
        compiled = torch.compile(again := block(), backend="eager")
        tangram.parallelize(again, mesh, marks, inputs={"x": x})
        tangram.load({"model": again}, f"{folder}/{mesh}")
        again.eval()
        assert torch.allclose(compiled(x), whole(x), atol=1e-6)
        with pytest.raises(UserError, match="a parallel model has no copies"):
            copy.deepcopy(model)


def a_step_as_it_runs() -> None:
    """One of the parameters is cut, and torch's functions over many take all of them."""
    x, model, whole = torch.randn(4, 8), block().eval(), block().eval()
    parallel = eager(model, "tp=2", ["up.weight: out/tp in"])
    with parallel:
        found = model(x).square().sum()
    for one, loss in ((model, found), (whole, whole(x).square().sum())):
        optim = torch.optim.AdamW(one.parameters(), foreach=True)
        loss.backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        optim.step()
    for name, p in model.named_parameters():
        assert torch.allclose(cast(Any, p).full_tensor(), whole.get_parameter(name), atol=1e-6)
    with pytest.raises(UserError, match="a parallel model has no copies"):
        copy.deepcopy(model)


def inside_fsdp(rank: int, folder: str) -> None:
    """Blocks that are parallel over one axis and sharded over the other, where each has samples of its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, alone, model = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), block().eval(), block().eval()
    tangram.parallelize(model, mesh["tp"], ["norm: batch/tp hidden", "up.weight: out/tp in"], inputs={"x": x[:2]})
    fully_shard(model.up, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for _ in range(2):
        (alone(x).square().sum() / 2).backward()
        model(x.chunk(2)[mesh["dp"].get_local_rank()]).square().sum().backward()
    for name, p in model.named_parameters():
        found: Any = p.grad
        assert torch.allclose(found.full_tensor(), cast("Any", alone.get_parameter(name)).grad, atol=1e-5), name
    dist.destroy_process_group()


def test_a_parallel_model_inside_of_fsdp(tmp_path: Path) -> None:
    start(inside_fsdp, str(tmp_path), ranks=4)


def test_fsdp_dtensors_and_a_parallel_model_on_two_ranks(tmp_path: Path) -> None:
    start(on_ranks, str(tmp_path), ranks=2)


def test_a_model_is_derived_without_ranks() -> None:
    found = tangram.derive(linear(), "tp=2", ["weight: out/tp in"], inputs={"input": torch.empty(4, 8, device="meta")})
    assert {name: str(layout) for name, layout in found.parameters.items()} == {
        "weight": "_=12/tp _=8",
        "bias": "_=12/tp",
    }
    assert [one.forward for one in found.communication] == ["all-gather"]
    assert "a rank receives" in str(found)
    with pytest.raises(UserError, match="wait"):
        tangram.derive(linear(), "tp=2", "wait: out/tp in", inputs={"input": torch.empty(4, 8)})
    with pytest.raises(UserError, match="inputs is a tuple: give a table"):
        tangram.derive(linear(), "tp=2", inputs=(torch.empty(4, 8),))  # pyright: ignore


def test_a_cluster_is_planned_from_python() -> None:
    workload = tangram.planner.Workload(tokens="256K", sequence=4096, devices="8", rows=3)
    found = tangram.plan("qwen3-2m", "h100-8x8", workload)
    assert len(found.choices) == 3
    assert found.best.step == min(one.step for one in found.choices)
    assert "h100-8x8, predicted" in str(found).splitlines()[0]


UP = "up.weight: inner/tp hidden"


def mistakes_on_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    said: dict[str, str] = {}

    def trying(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except UserError as error:
            said[name] = str(error)

    def begun(model: nn.Module, mesh: str = "tp=2", marks: Sequence[str] = (UP,)) -> nn.Module:
        tangram.parallelize(model, mesh, marks, inputs={"x": torch.ones(4, 8)})
        return model

    torch.manual_seed(rank)
    trying("weights", lambda: begun(Feed()))
    torch.manual_seed(0)
    trying("no marks", lambda: begun(Feed(), marks=()))
    trying("idle axis", lambda: begun(Feed(), "dp=2 tp=1"))  # a size-1 axis may be named, or not
    model = begun(Feed())
    trying("values", lambda: model(torch.ones(4, 8) + rank))
    trying("sizes", lambda: model(torch.ones(4 + rank, 8)))
    assert model(torch.ones(6, 8)).shape == (6, 8)
    known = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    ids = torch.arange(8).reshape(2, 4)
    expected = known(input_ids=ids).logits
    tangram.parallelize(known, "tp=2", inputs={"input_ids": ids})  # by the marks that come for Llama
    assert [*known.model.layers[0].self_attn.q_proj.weight.to_local().shape] == [8, 16]
    assert torch.allclose(known(input_ids=ids).logits, expected, atol=1e-5)
    full = get_model_state_dict(known, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        known.save_pretrained(f"{folder}/hf", state_dict=full)
        assert torch.equal(LlamaForCausalLM.from_pretrained(f"{folder}/hf")(input_ids=ids).logits, expected)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_ranks_that_are_not_alike_are_told_so(tmp_path: Path) -> None:
    start(mistakes_on_ranks, str(tmp_path), ranks=2)
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.keys() == {"weights", "no marks", "idle axis", "values", "sizes"}
        assert said["weights"].startswith(
            "up.weight (and 3 more) has other values on some ranks: give torch.manual_seed"
        )
        assert said["no marks"].startswith("no mark names the axis tp, so its 2 ranks would compute the same")
        assert said["idle axis"].startswith("no mark names the axis dp, so its 2 ranks would compute the same")
        assert said["values"].startswith("the ranks give the model other values of x: each gives all of the batch")
        assert said["sizes"].startswith("the ranks give the model other inputs, or of other sizes")
