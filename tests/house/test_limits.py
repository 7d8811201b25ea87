"""docs/limits.md lists what the source refuses."""

import ast

from tests.house.limits import KINDS, PAGE, Refusal, _sentences, _subclasses, kind_of, page, refusals


def test_the_page_is_what_the_source_refuses() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.house.limits`"


def test_every_kind_has_limits() -> None:
    counted = {kind.title: sum(kind_of(one) is kind for one in refusals()) for kind in KINDS}
    assert min(counted.values()) > 0, counted


def test_a_refusal_is_found_wherever_it_is_raised() -> None:
    text = (
        "class OwnError(UserError): pass\nclass Other(Exception): pass\ndef f(x):\n"
        "    if x:\n        raise OwnError(f'the {x} cannot be cut' + ': mark it') from None\n    raise Other('no')\n"
    )
    tree = ast.parse(text)
    assert list(_sentences(tree, _subclasses({PAGE: tree}))) == ["the ... cannot be cut: mark it"]


def test_a_limit_is_told_from_a_mistake() -> None:
    limit = Refusal("training", "training/x", "this version cuts no such model into stages")
    mistake = Refusal("training", "training/x", "the folder of the run is not empty: give another")
    assert kind_of(limit) is not None
    assert kind_of(mistake) is None
