"""Whatever a capture raises of a user's model is one sentence, with the line of the user's own code."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import M2M100Config, M2M100Model

from tangram.errors import UserError
from tangram.models.capturing.answers import still_right
from tangram.models.capturing.capture import capture


class Model(nn.Module):
    """A layer, and a function of it that cannot be captured."""

    def __init__(self, code: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.code, self.layer, self.lazy = code, nn.Linear(8, 8), cast("nn.Module | None", None)
        self.rnn, self.encoder = (
            nn.LSTM(8, 8),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1),
        )

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


def _branches(m: Any, x: Tensor) -> Tensor:
    return m.layer(x) if x.sum() > 0 else x


def _asserts(m: Any, x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    return m.layer(x)


def _packs(m: Any, x: Tensor) -> Any:
    return m.rnn(nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([4]), batch_first=True))


def _prints(m: Any, x: Tensor) -> Tensor:
    return m.layer(x) if f"{x.sum():.1f}" else x


def _flexes(m: Any, x: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # pyright: ignore[reportUnknownVariableType]

    q = m.layer(x).view(1, 1, 4, 8)
    return cast(Any, flex_attention)(q, q, q)


def _forward_mode(m: Any, x: Tensor) -> Any:
    return cast(Any, torch.vmap)(cast(Any, torch.func).jacfwd(lambda row: torch.tanh(m.layer(row))))(x)


@torch.library.custom_op("reasons::cube", mutates_args=())
def _cube(x: Tensor) -> Tensor:
    return x**3


AT = r"test_reasons.py:\d+: "
NASTY: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a branch": (_branches, "what runs depends on the values of a tensor.*torch.where"),
    "an assertion": (_asserts, "what runs depends on the values"),
    "item": (lambda m, x: m.layer(x) * x.mean().item(), "what runs depends on the values"),
    "a list": (lambda m, x: m.layer(x) * sum(x[0].tolist()), "what runs depends on the values"),
    "a tensor of tensors": (lambda m, x: m.layer(x) * torch.tensor([x.mean(), x.sum()])[0], "call torch.stack"),
    "a length": (lambda m, x: m.layer(x)[: int(x.sum())], "what runs depends on the values"),
    "a mask": (lambda m, x: m.layer(x)[x[:, 0] > 0], "how many elements aten::nonzero gives depends on the values"),
    "unique": (lambda m, x: torch.unique(m.layer(x)), "how many elements aten::_unique2 gives"),
    "a causal mask that is given": (
        lambda m, x: m.encoder(m.layer(x), mask=x[:, :4]), "is_causal=True or False",
    ),
    "print": (_prints, "print and log outside of forward"),
    "numpy": (lambda m, x: torch.as_tensor(np.sin(m.layer(x).detach().numpy())), "functions of torch"),
    "numpy's function": (lambda m, x: m.layer(torch.as_tensor(np.sin(cast(Any, x)))), "functions of torch"),
    "packed": (_packs, "give the padded sequence to the layer"),
    "sparse": (lambda m, x: m.layer(x.to_sparse().to_dense()), "work with dense ones"),
    "nested": (lambda m, x: cast(Any, torch).nested.nested_tensor([x[0], x[1]]), "pad what is shorter"),
    "an operator without sizes": (lambda m, x: _cube(m.layer(x)), "reasons::cube does not say.*register_fake"),
    "cond": (
        lambda m, x: cast(Any, torch.cond)(x.sum() > 0, torch.sin, torch.cos, (m.layer(x),)), "cond calls functions"
    ),
    "flex attention": (_flexes, "scaled_dot_product_attention"),
    "forward mode": (_forward_mode, "reverse mode"),
    "dropout in vmap": (
        lambda m, x: cast(Any, torch.vmap)(lambda r: torch.dropout(m.layer(r), 0.5, True))(x), 'randomness="different"'
    ),
    "an error of its own": (lambda m, x: {"a": m.layer(x)}["b"], "KeyError: 'b'"),
    "wrong sizes": (lambda m, x: m.layer(x[:, :3]), "must have same reduction dim"),
    "a derivative of nothing": (
        lambda m, x: cast(Any, torch.autograd.grad)(x.sum(), m.layer.weight), "does not require grad",
    ),
}  # fmt: skip


def _said(model: nn.Module) -> str:
    with pytest.raises(UserError) as error:
        capture(model, {"x": torch.zeros(4, 8)})
    return str(error.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, of forward mode
@pytest.mark.parametrize("name", NASTY)
def test_what_cannot_be_captured_is_a_sentence_with_the_line(name: str) -> None:
    code, reason = NASTY[name]
    said = _said(Model(code))
    assert "\n" not in said
    assert re.search(f"Model cannot be captured: .*{AT}.*{reason}", said), said


def test_what_cannot_be_copied_is_named() -> None:
    model = Model(lambda m, x: m.layer(x))
    cast(Any, model.layer).lock = threading.Lock()
    assert "keep layer.lock, a lock, out of the model" in _said(model)


def test_layers_that_are_left_out_at_random() -> None:
    """M2M-100's default. Built as the sentence says it is captured, and in evaluation nothing is left out."""
    small = dict.fromkeys(("d_model", "vocab_size", "max_position_embeddings", "encoder_ffn_dim", "decoder_ffn_dim"), 8)
    layers = dict.fromkeys(
        ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 1
    )
    config = M2M100Config(**small, **layers, use_cache=False, pad_token_id=1)
    ids = {"input_ids": torch.full((1, 4), 3), "decoder_input_ids": torch.full((1, 4), 3)}
    with pytest.raises(
        UserError, match=r"m2m_100.py:\d+: layers are left out at random, and a capture has all"
    ) as error:
        capture(M2M100Model(config).train(), ids)
    capture(M2M100Model(config).eval(), ids)
    advice = re.findall(r"(\w+) = 0", str(error.value))
    assert advice == ["encoder_layerdrop", "decoder_layerdrop"]
    for key in advice:
        setattr(config, key, 0)
    capture(M2M100Model(config).train(), ids)


def test_parameters_without_a_size() -> None:
    model = Model(lambda m, x: m.lazy(x))
    model.lazy = nn.LazyLinear(8)
    assert "call the model once on its inputs before" in _said(model)


def test_a_mask_of_the_codes_own_numbers_is_looked_at() -> None:
    """torch asks of a mask whether it is causal: of one that the code has made there is one answer."""
    model = Model(lambda m, x: m.encoder(m.layer(x), mask=torch.full((4, 4), float("-inf")).triu(1)))
    answers = [one.answer for one in capture(model, {"x": torch.zeros(4, 8)}).answers]
    assert answers == [True]


class Documents(nn.Module):
    """As code of images and of packed samples does: it cuts up what it is given by lengths that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        ends = torch.repeat_interleave(lengths, lengths).unique_consecutive()
        parts = torch.split(self.layer(x), lengths.tolist())
        return torch.cat([part.cumsum(0) * end for part, end in zip(parts, ends, strict=False)])


def test_small_inputs_of_integers_have_their_values() -> None:
    model, x = Documents(), torch.zeros(6, 8)
    for lengths in ([2, 4], [1, 5]):
        graph = capture(model, {"x": x, "lengths": torch.tensor(lengths)})
        (split,) = (node for node in graph.nodes if "split" in node.operator.name())
        assert split.arguments["split_sizes"] == lengths
        assert graph.read_inputs == ("lengths",)
    assert still_right(graph, {"lengths": torch.tensor([1, 5])})
    assert not still_right(graph, {"lengths": torch.tensor([2, 4])})
    for unknown in (torch.empty(2, dtype=torch.long, device="meta"), torch.ones(1 << 17, dtype=torch.long)):
        with pytest.raises(UserError, match="depends on the values"):
            capture(model, {"x": x, "lengths": unknown})


class Shifted(nn.Module):
    """Code that reads a number, and another one of a tensor that is as long as the first says."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        places = torch.arange(n.item(), device=x.device)
        return x * (places + torch.repeat_interleave(n, n)).sum().item()


def test_values_with_which_what_was_read_cannot_be_worked_out_are_others() -> None:
    graph = capture(Shifted(), {"x": torch.zeros(2), "n": torch.tensor(3)})
    assert still_right(graph, {"n": torch.tensor(3)})
    assert not still_right(graph, {"n": torch.tensor(2)})
