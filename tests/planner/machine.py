"""A machine of round numbers, so that predictions can be worked out by hand."""

from tangram.hardware.measuring.rates import Curve, Rates


def rates(processes: int = 2, **changes: object) -> Rates:
    """What one rank of it can do."""
    fields: dict[str, object] = {
        "device": "cpu",
        "name": "abacus",
        "processes": processes,
        "products": {"float32": Curve(((1.0, 1e9),)), "bfloat16": Curve(((1.0, 2e9),))},
        "moves": Curve(((1.0, 1e9),)),
        "call_seconds": 0.0,
        "latency": 1e-3,
        "links": Curve(((1.0, 1e8),)),
        "memory": 4e9,
        "source": "made up",
    }
    return Rates(**{**fields, **changes})  # pyright: ignore[reportArgumentType]
