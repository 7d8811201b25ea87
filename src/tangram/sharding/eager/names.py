"""Functions and attributes of tensors that are no matter of operators alone, by name."""

VALUES = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"}
    | {"is_nonzero", "__contains__", "equal", "allclose"}
)
"""Functions that read what a tensor holds."""
REFUSED = frozenset(
    {"__set__", "data_ptr", "storage", "untyped_storage", "share_memory_", "register_hook", "retain_grad", "grad"}
    | {"register_post_accumulate_grad_hook", "__deepcopy__", "__reduce_ex__", "set_", "resize_", "as_subclass"}
)
"""Functions that need a tensor with memory and a history of its own."""
MADE = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
"""Attributes that operators make; others are read as they are."""
OWN = frozenset({"requires_grad", "grad_fn", "is_leaf", "output_nr", "_version"})
"""Attributes of a rank's part."""
VIEWS = frozenset({"view", "_unsafe_view"})
