"""Propagation of one operator: what each axis does, what moves, what the results' layouts are."""

import pytest
import torch
from torch._ops import OpOverload

from tangram.errors import UserError
from tangram.layout import Layout, Mesh
from tangram.layout.errors import LayoutError
from tangram.sharding.ops.calls import OpCall
from tangram.sharding.ops.rule_table import NoRuleError, RuleTable, builtin, parse_lines
from tangram.sharding.proof.propagated import check
from tangram.sharding.propagation.propagate import Propagation, propagate
from tests.sharding.propagating import some

aten = torch.ops.aten
sdpa = aten._scaled_dot_product_flash_attention_for_cpu.default
conv = aten.convolution.default


def found(call: OpCall, mesh: str, *layouts: str | None, differentiable: bool = True, lines: str = "") -> Propagation:
    """A propagation that has been proved by running it."""
    rules = builtin().with_lines(parse_lines(lines))
    given = [None if text is None else Layout.parse(text) for text in layouts]
    made = propagate(rules, call, given, Mesh.parse(mesh), differentiable=differentiable)
    assert check(made, call.run()) is None
    return made


def call(operator: OpOverload, *args: object) -> OpCall:
    return OpCall.of(operator, args, {})


def texts(made: Propagation) -> list[str]:
    return [str(layout).replace("_=", "") for layout in made.outputs]


def mm(m: int = 8, k: int = 12, n: int = 6) -> OpCall:
    return call(aten.mm.default, some(m, k), some(k, n))


def test_one_axis_cuts_a_factor_in_every_tensor_that_has_it() -> None:
    made = found(mm(), "x=2 y=3", "m/x k/y", "k/y n")
    assert {axis: str(one) for axis, one in made.choices.items()} == {"x": "cut m", "y": "cut k"}
    assert texts(made) == ["m=8/x n=6 sum:y"]
    assert made.relayouts == ()
    assert (made.flops, made.memory, made.nbytes) == (2 * 4 * 4 * 6, 4 * 6 * 8, 0)


def test_what_moves_fewest_bytes_is_chosen_and_the_rest_moves() -> None:
    made = found(mm(), "x=2", "m/x k", "k n/x")
    (moved,) = made.relayouts
    assert (moved.place, str(moved.source), str(moved.target)) == (1, "k=12 n=6/x", "k=12 n=6")
    assert made.moved == {("all-gather", "x"): 12 * 6 * 8 / 2}
    small = found(mm(m=2), "x=2", "m/x k", "k n/x")
    assert small.moved == {("all-gather", "x"): 2 * 12 * 8 / 2}
    assert texts(small) == ["m=2 n=6/x"]


def test_ties_are_broken_the_same_way_whatever_the_order_of_the_inputs() -> None:
    one = found(call(aten.add.Tensor, some(4, 4), some(4, 4)), "x=2", "a/x b", "a b/x")
    other = found(call(aten.add.Tensor, some(4, 4), some(4, 4)), "x=2", "a b/x", "a/x b")
    assert texts(one) == ["a=4/x b=4"]
    assert texts(other) == ["a=4 b=4/x"]
    assert one.moved == other.moved == {("all-to-all", "x"): 32.0}


@pytest.mark.parametrize("dim", ["b/x/y", "b/y/x", "b/x:zigzag", "b/x:cyclic[2]", "b/y:strided[2]/x", "b/x:[1 5]",
                                 "(2 h/x)/y", "(2 (a/x + 2))", "(h/y 2)/x:zigzag"])  # fmt: skip
def test_a_dim_that_stays_one_factor_keeps_its_tree(dim: str) -> None:
    x = some(6, 5)
    for one in (
        found(call(aten.add.Tensor, x, x), "x=2 y=3", f"{dim} c", f"{dim} c"),
        found(call(aten.mm.default, x, some(5, 3)), "x=2 y=3", f"{dim} c", "c d"),
        found(call(aten._softmax.default, x, 1, False), "x=2 y=3", f"{dim} c"),
    ):
        assert one.relayouts == ()
        assert str(one.outputs[0].dims[0]) == str(Layout.parse(f"{dim} c").bind((6, 5)).dims[0])


def test_other_maps_or_another_order_do_not_agree() -> None:
    x = some(6, 5)
    for left, right in (("a/x b", "a/x:zigzag b"), ("a/x:zigzag b", "a/x:cyclic b")):
        assert found(call(aten.add.Tensor, x, x), "x=3", left, right).moved == {("all-to-all", "x"): 80 * 2 / 3}
    order = found(call(aten.add.Tensor, x, x), "x=2 y=3", "a/x/y b", "a/y/x b")
    assert {kind for kind, _ in order.moved} == {"all-to-all"}
    assert texts(order) == ["a=6/x/y b=5"]
    slices = found(call(aten.add.Tensor, x, x), "x=2 y=3", "a/x/y b", "a/x b")
    assert not slices.moved
    assert [step.kind for step in slices.relayouts[0].steps] == ["slice"]


def test_the_same_cut_in_other_words_agrees() -> None:
    """Brackets whose cuts fall where those of the whole dim do; but 15 rows of 5 heads over 2 do not."""
    even = call(aten.add.Tensor, some(12, 5), some(12, 5))
    assert found(even, "x=2 y=2", "(h=4/x d)/y b", "r/x/y b").relayouts == ()
    odd = call(aten.add.Tensor, some(15, 5), some(15, 5))
    assert found(odd, "x=2 y=2", "(h=5/x d) b", "r/x b").nbytes > 0


@pytest.mark.parametrize(
    ("shape", "to", "mesh", "layout", "result", "moves"),
    [
        ((4, 6, 5), [24, 5], "x=2", "a/x b c", "24/x c=5", False),
        ((4, 6, 5), [24, 5], "x=2", "a b/x c", "(a=4 b=6/x) c=5", False),
        ((3, 5), [15], "x=2", "a/x b", "(a=3/x b=5)", False),
        ((24, 5), [4, 6, 5], "x=2 y=2", "a/x/y c", "4/x/y 6 c=5", False),
        ((24, 5), [2, 12, 5], "x=2 y=3", "a/x/y c", "2/x 12/y c=5", False),
        ((24, 5), [4, 6, 5], "x=3", "a/x c", "4 6 c=5", True),
        ((24, 5), [4, 6, 5], "x=2", "a/x:zigzag c", "4/x:zigzag 6 c=5", False),
        ((24, 5), [6, 4, 5], "x=2", "a/x:cyclic[8] c", "6/x:cyclic[2] 4 c=5", False),
        ((24, 5), [6, 4, 5], "x=2", "a/x:cyclic[6] c", "6 4 c=5", True),
        ((24, 5), [6, 4, 5], "x=2", "a/x:[8 16] c", "6/x:[2 4] 4 c=5", False),
        ((24, 5), [4, 6, 5], "x=2 y=2", "(h=4/x d)/y c", "4/x/y 6 c=5", False),
        ((24, 5), [6, 4, 5], "x=2 y=2", "(h=6/x d)/y c", "6/x 4 c=5", True),
        ((24, 5), [2, 12, 5], "x=2", "(g=2 f/x) c", "2 12/x c=5", False),
        ((24, 5), [2, 3, 4, 5], "x=3", "(g=2 f/x) c", "2 3/x 4 c=5", False),
    ],
)
def test_cuts_pass_through_views_on_borders_of_factors(
    shape: tuple[int, ...], to: list[int], mesh: str, layout: str, result: str, moves: bool
) -> None:
    made = found(call(aten.view.default, some(*shape), to), mesh, layout)
    assert bool(made.relayouts) == moves
    assert texts(made) == [result]


def test_pending_sums_wait_where_the_operator_is_linear() -> None:
    product = found(mm(), "x=2 y=2", "m k sum:x", "k n/y")
    assert str(product.choices["x"]) == "sum waits on input 0"
    assert texts(product) == ["m=8 n=6/y sum:x"]
    mean = found(call(aten.mean.dim, some(4, 6), [1]), "x=2 y=4", "a b/y sum:x")
    assert sorted(texts(mean)[0].split()) == ["a=4", "sum:x", "sum:y"]
    both = found(
        call(aten.add.Tensor, some(4), some(4)), "x=2", "a sum:x", "a", lines="add.Tensor : ... -> ... ; linear"
    )
    assert [step.kind for step in both.relayouts[0].steps] == ["zero"]
    assert texts(both) == ["a=4 sum:x"]
    average = found(call(aten.sum.dim_IntList, some(4, 3), [1]), "x=2", "a b avg:x")
    assert texts(average) == ["a=4 avg:x"]


def test_pending_sums_are_reduced_where_it_is_not() -> None:
    made = found(call(aten._softmax.default, some(4, 6), -1, False), "x=2 y=2", "a/y b sum:x")
    assert made.moved == {("all-reduce", "x"): 2 * 6 * 8 / 2 * 2}
    cut = found(call(aten.mul.Tensor, some(4, 6), some(4, 6)), "x=2", "a b sum:x", "a/x b")
    assert cut.moved == {("reduce-scatter", "x"): 4 * 6 * 8 / 2}


def test_a_maximum_stays_pending_only_without_a_gradient() -> None:
    one = call(aten.amax.default, some(4, 6), [-1])
    assert texts(found(one, "x=2", "a b/x")) == ["a=4"]
    assert texts(found(one, "x=2", "a b/x", differentiable=False)) == ["a=4 max:x"]


def test_the_spelling_of_dims_does_not_matter() -> None:
    sum_, softmax = aten.sum.dim_IntList, aten._softmax.default
    for dim in range(3):
        for make in (lambda d: call(sum_, some(4, 6, 5), [d]), lambda d: call(softmax, some(4, 6, 5), d, False)):
            one, other = (found(make(d), "x=2 y=3", "a/x b/y c") for d in (dim, dim - 3))
            assert (one.inputs, one.outputs, one.moved) == (other.inputs, other.outputs, other.moved)


@pytest.mark.parametrize("axes", range(1, 8))
def test_any_number_of_axes(axes: int) -> None:
    names = "abcdefg"[:axes]
    mesh = " ".join(f"{a}=2" for a in names)
    cut = "".join(f"/{a}" for a in names[::-1])
    made = found(call(aten.add.Tensor, some(5, 3), some(3)), mesh, f"s{cut} h", "h")
    assert made.relayouts == ()
    assert texts(made) == [f"s=5{cut} h=3"]


def test_axes_of_one_rank_stay_in_the_text_and_move_nothing() -> None:
    made = found(mm(), "one=1 x=2 two=1", "m/one/x k/two", "k n/one sum:two")
    assert made.nbytes == 0
    assert made.relayouts == ()
    assert texts(made) == ["m=8/one/x n=6"]
    made = found(call(aten._softmax.default, some(4, 6), 1, False), "one=1", "a b/one")
    assert made.choices == {}
    assert made.relayouts == ()
    made = found(mm(), "one=1", "m k sum:one", "k/one n")
    assert made.nbytes == 0


def test_a_mesh_of_one_rank() -> None:
    assert texts(found(mm(), "", None, None)) == ["8 6"]
    assert found(mm(), "x=1", "m/x k", "k n").relayouts == ()


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_parts_of_nothing(n: int) -> None:
    made = found(call(aten.add.Tensor, some(n, 3), some(3)), "x=4", "a/x b", "b")
    assert texts(made) == [f"a={n}/x b=3" if n > 1 else f"a={n} b=3"]
    found(call(aten.mm.default, some(3, n), some(n, 2)), "x=4", "m k/x", "k n")


def test_where_tensors_are_held() -> None:
    same = found(mm(), "pp=3 x=2", "m/x k @pp=1", "k n")
    assert same.relayouts == ()
    assert texts(same) == ["m=8/x n=6 @pp=1"]
    other = found(mm(), "pp=3", "m k @pp=1", "k n @pp=2")
    assert texts(other) == ["m=8 n=6 @pp=2"] or texts(other) == ["m=8 n=6 @pp=1"]
    assert {kind for kind, _ in other.moved} == {"broadcast"}


def test_flat_cuts_are_gathered() -> None:
    made = propagate(builtin(), mm(), [Layout.parse("m k //x"), None], Mesh.parse("x=2"))
    assert made.moved == {("all-gather", "x"): 8 * 12 * 8 / 2}
    assert str(made.inputs[0]) == "m=8 k=12"


def test_axes_of_two_views_that_share_ranks_do_not_stand_together() -> None:
    mesh = "tp=4 | kv=2 rep=2"
    made = found(call(aten.mm.default, some(8, 8), some(8, 8)), mesh, "m/tp k", "k n/kv")
    assert texts(made) == ["m=8/tp n=8"]
    fused = found(call(aten.mul.Tensor, some(24, 4), some(24, 4)), mesh, *["(g=4/kv (r=4/rep + 1 + 1)) h"] * 2)
    assert fused.relayouts == ()


def test_what_an_operator_writes_stays_where_it_is() -> None:
    made = found(call(aten.mul_.Tensor, some(4, 6), some(4, 6)), "x=2", "a/x b", "a b/x")
    assert [one.place for one in made.relayouts] == [1]
    with pytest.raises(UserError, match=r"mul_.Tensor writes its input 0.*give that input another layout first|writes"):
        found(call(aten.exp_.default, some(4, 6)), "x=2", "a b sum:x")
    assert found(call(aten.cumsum_.default, some(4, 6), 1), "x=2", "a b/x:zigzag").choices["x"].kind == "cut"


def test_the_same_names_of_other_sizes_are_not_kept() -> None:
    made = found(mm(), "x=2", "a/x b", "b a")
    again = Layout.parse(str(made.outputs[0])).bind((8, 6))
    assert again.shape == (8, 6)


def test_bad_input_is_refused_in_one_sentence() -> None:
    mesh = Mesh.parse("x=2")
    for given, words in (
        (["m k q", "k n"], "has 3 dims, but the tensor has shape"),
        (["m/y k", "k n"], "no axis 'y'"),
        (["m/x k/x", "k n"], "axis x cuts twice"),
        (["m=9 k", "k n"], "m"),
        (["m/x:[3 3] k", "k n"], "do not cut 8 elements"),
    ):
        with pytest.raises(LayoutError, match=words):
            propagate(builtin(), mm(), [Layout.parse(t) for t in given], mesh)
    with pytest.raises(UserError, match="mm has 2 tensors here, but 1 layouts are given"):
        propagate(builtin(), mm(), [None], mesh)
    with pytest.raises(UserError, match=r"input 0 has shape \[8, 12\], but its layout .* is of \[8, 11\]"):
        propagate(builtin(), mm(), [Layout.parse("m k").bind((8, 11)), None], mesh)
    with pytest.raises(NoRuleError, match="there is no rule for mm"):
        propagate(RuleTable(), mm(), [None, None], mesh)


@pytest.mark.parametrize(
    ("one", "operations"),
    [
        (mm(2, 3, 4), 2 * 2 * 3 * 4),
        (call(aten.bmm.default, some(5, 2, 3), some(5, 3, 4)), 5 * 2 * 2 * 3 * 4),
        (call(aten.addmm.default, some(4), some(2, 3), some(3, 4)), 2 * 2 * 3 * 4),
        (call(aten.add.Tensor, some(2, 3), some(3)), 6),
        (call(aten.sum.dim_IntList, some(2, 3), [1]), 6),
        (call(aten.embedding.default, some(50, 3), torch.tensor([1, 2])), 6),
        (call(aten.view.default, some(2, 3), [6]), 0),
        (call(sdpa, *[some(2, 3, 5, 4)] * 3), 2 * 2 * 2 * 3 * 5 * 5 * 4),
        (call(conv, some(2, 6, 9), some(4, 3, 3), None, [2], [1], [1], False, [0], 2), 2 * 2 * 4 * 3 * 3 * 5),
    ],
)  # fmt: skip
def test_operations_from_the_line(one: OpCall, operations: int) -> None:
    tensors = one.tensors
    assert found(one, "x=2", *[None for _ in tensors]).flops == operations


def test_memory_is_of_the_rank_that_holds_most() -> None:
    made = found(call(aten.mul.Tensor, some(7, 3), some(3)), "x=2 y=2", "a/x b", None)
    assert made.memory == 4 * 3 * 8
    sizes = found(call(aten.gt.Scalar, some(7, 3), 0), "x=3", "a/x:[1 5 1] b")
    assert sizes.memory == 5 * 3


def test_a_sum_waits_through_what_only_scales_and_adds() -> None:
    """As the sum over experts' inner dims, on the way to the routing weights and to the residual."""
    scaled = found(call(aten.mul.Tensor, some(8, 6), some(8, 1)), "x=2", "t h sum:x", None)
    assert (texts(scaled), scaled.nbytes) == (["t=8 h=6 sum:x"], 0)
    added = found(call(aten.add.Tensor, some(8, 6), some(8, 6)), "x=2", "t h sum:x", None)
    assert (texts(added), added.moved) == (["t=8 h=6 sum:x"], {})
    assert found(call(aten.add.Tensor, some(8, 6), 2.0), "x=2", "t h sum:x", None).moved == {
        ("all-reduce", "x"): 8 * 6 * 8
    }
    rows = found(call(aten.index.Tensor, some(8, 6), [torch.tensor([3, 1, 0])]), "x=2", "t h sum:x", None)
    assert (texts(rows), rows.nbytes) == (["3 h=6 sum:x"], 0)
    divided = found(call(aten.div.Tensor, some(8, 6), some(6)), "x=2", None, "h sum:x")
    assert divided.moved == {("all-reduce", "x"): 6 * 8}
    biased = found(call(aten.addmm.default, some(6), some(8, 16), some(16, 6)), "x=2", None, "m k sum:x", None)
    assert (texts(biased), biased.nbytes) == (["m=8 6 sum:x"], 0)


def test_a_sum_does_not_wait_where_the_result_is_larger() -> None:
    made = found(call(aten.mul.Tensor, some(8, 1), some(8, 6)), "x=2", "t _ sum:x", None)
    assert (texts(made), made.moved) == (["t=8 6"], {("all-reduce", "x"): 8 * 8})


def test_a_new_pending_sum_has_its_price() -> None:
    index = torch.tensor([[0, 1], [2, 3]])
    large, small = (call(aten.scatter_add.default, some(n, 2), 0, index % n, some(2, 2)) for n in (64, 2))
    assert texts(found(large, "x=2", None, "i/x k", None)) == ["64 2"]  # else all of it would have to be reduced
    assert texts(found(small, "x=2", None, "i/x k", "i/x k")) == ["2 2 sum:x"]
    assert found(large, "x=2", None, "i/x k", "i/x k").nbytes == 0  # what lies so already stays


@pytest.mark.parametrize("name", ["new_zeros", "new_ones", "new_full", "new_empty"])
def test_what_is_never_read_is_not_gathered(name: str) -> None:
    args = ([3, 2, 5], 0.5) if name == "new_full" else ([3, 2, 5],)
    made = found(call(getattr(aten, name).default, some(8, 6), *args), "x=2 y=2", "a/x b sum:y")
    assert (texts(made), made.moved) == (["3 2 5"], {})
    like = found(call(aten.ones_like.default, some(8, 6)), "x=2 y=2", "a/x b sum:y")
    assert (texts(like), like.moved) == (["a=8/x b=6"], {})
