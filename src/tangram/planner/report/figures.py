"""Figures as people read them: durations, sizes, counts and shares, each with its unit."""

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def seconds(value: float) -> str:
    """A duration: "0.4 ms", "12.3 s", "1 min 15 s", "2 h 5 min"."""
    if not value:
        return "0 s"
    if value < 0.9995:
        return f"{three(value * 1e3)} ms"
    if value < 59.95:
        return f"{three(value)} s"
    if value < 3599.5:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def megabytes(value: float) -> str:
    """A size that is given in MB: "812 MB", "2.05 GB"."""
    if value < 999.5:
        return f"{three(value)} MB"
    return f"{three(value / 1e3)} GB" if value < 999_500 else f"{three(value / 1e6)} TB"


def count(value: float) -> str:
    """How many, at three digits: "950", "1.8 M", "70.6 B"."""
    for size, letter in _UNITS:
        if value >= size * 0.9995:
            return f"{three(value / size)} {letter}"
    return three(value)


def rate(value: float, unit: str) -> str:
    """So many a second: "12,346 tokens/s"; at three digits from a million on."""
    return f"{value:,.0f} {unit}" if 100 <= value < 999_999.5 else f"{count(value)} {unit}"


def flops(value: float) -> str:
    """So much computed a second: "40.9 GFLOP/s", "1.2 TFLOP/s"."""
    size, letter = next((unit for unit in ((1e15, "P"), (1e12, "T")) if value >= unit[0] * 0.9995), (1e9, "G"))
    return f"{three(value / size)} {letter}FLOP/s"


def percent(value: float) -> str:
    """A share: "43%", "0.8%"."""
    return f"{value:.0%}" if abs(value) >= 0.0995 or not value else f"{value:.1%}"


def three(value: float) -> str:
    """Three digits that count, without an exponent and without noughts behind the point."""
    if not value:
        return "0"
    text = f"{value:.2f}" if 0.995 <= abs(value) < 9.995 else f"{value:.1f}" if 9.995 <= abs(value) < 99.95 else ""
    text = text or (f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.2g}")
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
