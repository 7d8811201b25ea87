"""The notation prints as it parses, reads every case it was made for, and says where a bad text goes wrong."""

import pytest
from hypothesis import given

from tangram.errors import UserError
from tangram.layout import Layout, LayoutError, Mapping, Mesh, NotationError, Region
from tests.layout import strategies
from tests.layout.strategies import examples

MESHES = ("dp=4 tp=8", "rep=2 shard=4", "dp=2 tp=4 | dp=2 kv=2 rep=2", "dp=4 tp=2 | edp=2 ep=2 etp=2", "one=1", "")
LAYOUTS = """
out/tp/dp in
out/dp/tp in
(heads/tp d)/dp h
(heads/tp/dp d)
out/shard in
out/one/tp in/two
(g/tp (r + 1 + 1) d) h/dp
(g/kv (r/rep + 1 + 1) d) h
(2 f/tp)/dp h
(2 f/tp/dp) h
v/tp h @pp=0
h v/tp @pp=3
v/tp h @pp=0,3
l e/ep h/edp (2 f/etp)
(c p/pp k) o i
l/pp:[3 5]
b s/cp:zigzag
b/dp s/cp:zigzag[docs]
s/cp:cyclic[64]
o/dp:strided[2]/tp
e/ep:[counts] f
e/ep:[7 8 8 7] f
o/dp (b/tp j)
(heads/tp d) rank
rank i/dp
(z/tp + x/tp + B + C + dt/tp) h
out/tp in //dp
b/dp h sum:tp max:cp
_ h/dp
heads=32/tp _=4
... h/tp
sum max/avg
""".strip("\n").split("\n")
MAPPINGS = """
q: (g r d) h, k: (g d) h, v: (g d) h -> qkv: (g (q r + k + v) d) h
q: (t a) h, k: (t b) h, v: (t b) h -> qkv: (t (q a + k b + v b)) h
gate: f h, up: f h -> w1: ((gate + up) f) h
gate: f h, up: f h -> w1: (f (gate + up)) h
gate: f h, up: f h -> w1: h ((gate + up) f)
emb: v h -> words: (v + _) h = head: h (v + _)
m.{l}.e.{e}.gate as gate: f h, m.{l}.e.{e}.up as up: f h -> x.{l}.w13: e h ((gate + up) f)
layers.{(c p k)}.w: o i -> stage{p}.chunk{c}.{k}.w: o i
a.{m+3}.w: o -> moe.{m}.w: o
k: (H n) c, v: (H v) c -> kv_b: (H (k n + v d)) c
c_proj: c h, pe: p h -> kv_a: (c_proj c + pe p) h
q: (heads two half) h -> q2: (heads half two) h
norm: h -> ln: h; add=-1
w: h -> w2: h; cast=float32:bfloat16 swap_nibbles
a: n m -> b: m n
_ -> step:; fill=0
rotary.inv_freq -> _
x.{rest*} -> y.{rest*}
a/b-c: o -> d/e-f: o
w: o i = 0.weight: o i -> out: o i
""".strip("\n").split("\n")


@pytest.mark.parametrize("text", MESHES)
def test_meshes_print_as_they_parse(text: str) -> None:
    assert str(Mesh.parse(text)) == text


@pytest.mark.parametrize("text", LAYOUTS)
def test_layouts_print_as_they_parse(text: str) -> None:
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", MAPPINGS)
def test_mappings_print_as_they_parse(text: str) -> None:
    assert str(Mapping.parse(text)) == text


@pytest.mark.parametrize("text", ["[0:4 0:8]", "[0:4,8:12 0:8] + [4:5 0:2]", "[]", "nothing"])
def test_regions_print_as_they_parse(text: str) -> None:
    assert str(Region.parse(text)) == text


@examples(500)
@given(strategies.layouts)
def test_any_layout_parses_back_to_itself(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@examples(400)
@given(strategies.mappings)
def test_any_mapping_parses_back_to_itself(mapping: Mapping) -> None:
    assert Mapping.parse(str(mapping)) == mapping


@examples(150)
@given(strategies.meshes, strategies.regions((5, 3, 2)))
def test_any_mesh_and_region_parse_back_to_themselves(mesh: Mesh, region: Region) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert Region.parse(str(region)) == region


@pytest.mark.parametrize(
    ("loose", "tight"),
    [
        ("  out / tp /dp   in ", "out/tp/dp in"),
        ("(heads/tp d)/dp\th", "(heads/tp d)/dp h"),
        ("s/cp : zigzag [docs] //dp", "s/cp:zigzag[docs] //dp"),
        ("v h @ pp = 0 , 3", "v h @pp=0,3"),
        ("h = 32", "h=32"),
        ("b sum : tp", "b sum:tp"),
        ("sum:tp b/dp", None),  # a suffix stands last
        ("2f/tp", "2 f/tp"),
    ],
)
def test_white_space_does_not_count(loose: str, tight: str | None) -> None:
    if tight is None:
        with pytest.raises(NotationError):
            Layout.parse(loose)
    else:
        assert str(Layout.parse(loose)) == tight


# ---------------------------------------------------------------- errors

# The mark ^ stands before the character that the error points at.
BAD_LAYOUTS = [
    "a/^",
    "a/^3",
    "(a^",
    "a^)",
    "(^) h",
    "(a + ^) h",
    "(a / ^/b) h",
    "a b @^",
    "a b @pp^",
    "a b @pp^=x",
    "a/dp:[^]",
    "a/dp:[1 ^x]",
    "a/dp:zigzag[^",
    "a//dp ^b",
    "a sum:^",
    "^$",
    "a ^| b",
    "a b\n^- c",
    "a/dp:^foo",
    "a/dp: ^foo h",
    "a/x:zigzag b/y:^zig",
    "a //x:^zig",
    "a/dp:^sizes",
    "... (a ^...)",
    "... a ^...",
    "^.../dp a",
]
BAD_MESHES = ["dp^=", "dp^", "^=3", "dp=2 ^3", "dp=2 ^& tp=2", "dp=2^, tp=2"]
BAD_REGIONS = ["^", "[^", "[0^]", "[0:4^", "[0:4 ^+", "[0:2] ^[0:1]", "[0:^x]", "^nothing + [0:1]"]
BAD_MAPPINGS = [
    "a^",
    "a ->^",
    "^-> b",
    "a -> b ^-> c",
    "^_ -> _",
    "a: x -> b: x;^",
    "a: ( ^-> b",
    "a as^: h -> b: h",
    "a: h -> b: h; ^3",
    "a: h -> b: h; x=^;",
    "a.{l^/dp}.w: o -> b: o",
    "a.{^}.w: o -> b: o",
    "a: h -> b.{l + ^x}: h",
    "a: h -> b.{(l^}: h",
    "a.{^...}: h -> b: h",
    "a/b: o^/dp -> c: o",
    "a: o -> c/d: (o^/dp)",
    "a/...: o -> b: ^...",
    "a: h -> b: h\nc: h -> d: (h^\n",
    "# what it is\na: h, # one\nb: h -> c: h ^)",
]


def check(parse: object, marked: str) -> None:
    position, text = marked.index("^"), marked.replace("^", "")
    assert callable(parse)
    with pytest.raises(NotationError) as caught:
        parse(text)
    error = caught.value
    assert (error.text, error.position) == (text, position)
    sentence, line, mark = str(error).split("\n")
    assert isinstance(error, LayoutError)
    assert isinstance(error, UserError)
    assert len(mark) - 3 == position - (text.rfind("\n", 0, position) + 1)
    assert line.strip() in text
    for lark in ("Token", "ANON", "Unexpected", "$END", "LPAR", "Lark", "None"):
        assert lark not in sentence
    assert not any(word.isupper() and len(word) > 1 for word in sentence.replace("'", " ").split())


@pytest.mark.parametrize("marked", BAD_LAYOUTS)
def test_layout_errors_point_at_the_character(marked: str) -> None:
    check(Layout.parse, marked)


@pytest.mark.parametrize("marked", BAD_MESHES)
def test_mesh_errors_point_at_the_character(marked: str) -> None:
    check(Mesh.parse, marked)


@pytest.mark.parametrize("marked", BAD_REGIONS)
def test_region_errors_point_at_the_character(marked: str) -> None:
    check(Region.parse, marked)


@pytest.mark.parametrize("marked", BAD_MAPPINGS)
def test_mapping_errors_point_at_the_character(marked: str) -> None:
    check(Mapping.parse, marked)


def test_the_sentence_says_what_was_expected() -> None:
    with pytest.raises(NotationError, match=r"^the end of the text .*; expected a name\n") as caught:
        Layout.parse("a/")
    assert str(caught.value).endswith("\n  a/\n    ^")
    with pytest.raises(NotationError, match=r"no index map 'zigzig'; there are cyclic, strided, zigzag"):
        Layout.parse("a/cp:zigzig")


# ---------------------------------------------------------------- mappings of many lines

ONE = "a: h, b: h -> c: ((a + b) h); fill=0"


@pytest.mark.parametrize(
    "text",
    [
        ONE,
        "a: h,\nb: h -> c: ((a + b) h); fill=0",
        "a: h, b: h ->\nc: ((a + b) h); fill=0",
        "a: h, b: h\n  -> c: ((a + b) h);\n    fill=0",
        "# first\n\na: h, b: h -> c: ((a + b) h); fill=0  # last\n# end",
        "a: h,  # one\n  b: h  # two\n  -> c: ((a + b) h); fill=0",
        "a: h,\n# between\nb: h -> c: ((a + b) h); fill=0",
        "a: h,\n\n\nb: h ->  \n\n c: ((a + b) h); fill=0",
        "  a: h, b: h -> c: ((a + b) h); fill=0  \n",
    ],
)
def test_comments_and_lines_that_go_on(text: str) -> None:
    assert Mapping.parse(text) == Mapping.parse(ONE)


def test_statements_stand_one_a_line() -> None:
    text = "\n    a -> b\n    c: h -> d: h\n\n    e -> f\n"
    assert str(Mapping.parse(text)) == "a -> b\nc: h -> d: h\ne -> f"
    assert Mapping.parse("# nothing\n").statements == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("fill=-1.5", -1.5),
        ("fill=inf", float("inf")),
        ("cast=infer", "infer"),
        ("x=nano:inf2", "nano:inf2"),
        ("y", None),
    ],
)
def test_options(text: str, value: object) -> None:
    (statement,) = Mapping.parse(f"a -> b; {text}").statements
    assert statement.options == ((text.split("=")[0], value),)
    assert Mapping.parse(str(statement)).statements == (statement,)


def test_an_indented_mapping_goes_on_where_it_is_indented_further() -> None:
    text = """
        a: x y
            -> b: y x
        c -> d  # the last
    """
    assert str(Mapping.parse(text)) == "a: x y -> b: y x\nc -> d"
    with pytest.raises(NotationError) as error:
        Mapping.parse("  a: x\n     -> b: $")
    assert error.value.position == len("  a: x\n     -> b: ")
