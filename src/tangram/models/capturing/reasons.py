"""Why a model cannot be captured, as a sentence: where in the user's own code, what happened, and what to do instead.

One table, a row for each kind of thing that a run without memory cannot do. What no row knows is an error of the
model's own code, and is told with its type.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, cast

from tangram.models.capturing.called import caller, short

_BRANCHES = r"DataDependent|data-dependent|item\(\)|_local_scalar_dense|is_nonzero"
_VALUES = "a capture without memory has no values"
REASONS: tuple[tuple[str, str], ...] = (
    (
        r"_detect_is_causal_mask",
        "torch looks up in the values of a mask whether it is causal, which a capture without memory lacks: say so by "
        "is_causal=True or False, tgt_is_causal of a decoder",
    ),
    (
        r"_pack_padded_sequence|_pad_packed_sequence",
        "a packed sequence is as long as its values say, and a capture without memory has none: give the padded "
        "sequence to the layer, and mask what comes of the padding",
    ),
    (
        r"FlexAttention|flex_attention",
        "flex_attention is not captured: its function of the scores is compiled, not run by torch's operators; call "
        "F.scaled_dot_product_attention with a mask",
    ),
    (
        r"randomness error mode",
        "torch.vmap does not say how to draw random numbers: call torch.vmap(..., randomness=\"different\")",
    ),
    (
        r"higher_order\.|HigherOrderOperator",
        "{operator} calls functions where a capture does not see them: write it as a loop of Python, or torch.where",
    ),
    (
        r"devices, cpu and meta|a derivative in forward mode",
        "a derivative by torch.func in forward mode (jvp, jacfwd, hessian) makes tensors that a capture cannot follow: "
        "take it in reverse mode, by torch.func.jacrev or torch.autograd.grad",
    ),
    (
        r"__format__",
        "a number is printed out of a tensor, and a capture without memory has none: print and log outside of forward",
    ),
    (
        r"[Nn]ested_?[Tt]ensor",
        "nested tensors are not captured: pad what is shorter, and mask it",
    ),
    (
        r"SparseTensor|SparseCsr|sparse_coo|to_sparse",
        "sparse tensors are not captured: work with dense ones",
    ),
    (
        r"ScriptModules",
        "a ScriptModule is compiled code: give the module that it was made of",
    ),
    (
        _BRANCHES,
        "what runs depends on the values of a tensor, which a capture without memory lacks: choose with torch.where, "
        "and print or log numbers outside of forward",
    ),
    (
        r"DynamicOutputShape|dynamic shape|Dynamic(ally)? shape",
        "how many elements {operator} gives depends on the values of a tensor, which a capture without memory lacks: "
        "keep all of them and mask with torch.where",
    ),
    (
        r"data is not allocated",
        f"numbers are taken out of tensors, as by torch.tensor of a list of them, and {_VALUES}: give the model what "
        "it works out of them, as position_ids, or call torch.stack",
    ),
    (
        r"numpy|__array__",
        f"a tensor is made numpy's, and {_VALUES}: work with functions of torch",
    ),
    (
        r"data pointer|data_ptr|Cannot access storage|no storage|FakeTensor storage",
        f"a kernel reads the memory of a tensor itself, and {_VALUES}: make it an operator by torch.library.custom_op "
        "with a register_fake",
    ),
    (
        r"UnsupportedOperator|UnsupportedFakeTensor|no fake impl|register_fake|meta kernel|no Meta|'Meta' backend",
        "{operator} does not say what size its result has: give it torch.library.register_fake",
    ),
    (
        r"Could not run '|not implemented for the|No backend|missing kernel|kernel .*not found",
        "{operator} has no kernel that runs on a CPU, and models are captured as on one: call another function of "
        "torch, or give the operator torch.library.register_fake",
    ),
    (
        r"UninitializedParameter|uninitialized parameter",
        "it has parameters without a size, as of nn.LazyLinear: call the model once on its inputs before",
    ),
    (
        r"^Unsupported: |^BackendCompilerFailed|^InductorError|^InternalTorchDynamoError",
        "torch.compile cannot be captured: compile the model after it is made parallel",
    ),
)  # fmt: skip
"""By what is looked for in an error's type and text, and in the names of functions on its way; the first that fits."""


def place_and_reason(error: Exception) -> str:
    """In which line of a model something went wrong, what, and where it is known what to do."""
    line = _line_of(error)
    if line is None:
        return f"its forward: {reason_of(error)}"
    place = f"{short(line.tb_frame.f_code.co_filename)}:{line.tb_lineno}"
    module = line.tb_frame.f_locals.get("self")
    drops = layer_drops(module) if getattr(module, "training", False) else []
    if drops and re.search(_BRANCHES, f"{type(error).__name__}: {error}"):
        none = ", ".join(f"{key} = 0" for key in drops)
        return f"{place}: layers are left out at random, and a capture has all of them: build the model with {none}"
    return f"{place}: {reason_of(error)}"


def layer_drops(module: Any) -> list[str]:
    """The keys of a module's configuration, as transformers calls them, by which training leaves out whole layers at
    random (Fan et al., 2019).
    """
    config: Any = getattr(module, "config", None)
    fields = {} if config is None else cast("dict[str, Any]", vars(config))
    return [key for key, chance in fields.items() if key.endswith("layerdrop") and chance]


def _line_of(error: BaseException) -> TracebackType | None:
    """The innermost line of the user's own code; None where there is none."""
    line, trace = None, error.__traceback__
    while trace is not None:
        line = trace if caller(trace.tb_frame) is trace.tb_frame else line
        trace = trace.tb_next
    return line


def reason_of(error: BaseException) -> str:
    """What happened, without a stop."""
    kind, text = type(error).__name__, str(error).strip()
    said = f"{kind}: {text} {' '.join(_way(error))}"
    for pattern, reason in REASONS:
        if re.search(pattern, said):
            return reason.format(operator=_operator(text) or "an operator")
    first = text.splitlines()[0].rstrip(". ") if text else ""
    known = isinstance(error, RuntimeError) and kind == "RuntimeError"  # torch's own sentences
    return first if known and first else f"{kind}{first and f': {first}'}"


def _way(error: BaseException) -> list[str]:
    """The names of the functions of torch that it came through, inside of the user's own line."""
    names, trace = list[str](), error.__traceback__
    while trace is not None:
        names = [] if caller(trace.tb_frame) is trace.tb_frame else [*names, trace.tb_frame.f_code.co_name]
        trace = trace.tb_next
    return names


def _operator(text: str) -> str:
    if called := re.search(r"higher_order\.(\w+)", text):
        return f"torch's {called[1]}"
    found = re.search(r"(?:torch\.ops\.)?\b(aten|[A-Za-z_]\w*)(?:\.|::)(\w+)(?:\.\w+)?(?:\(\))?", text)
    return "" if found is None else f"{found[1]}::{found[2]}"
