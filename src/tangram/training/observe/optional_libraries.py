"""Whether the optional libraries are there that make what a run leaves for people to look at."""

from importlib.util import find_spec

from tangram.errors import UserError

REPORT = ("plotly", "tensorboard")


def need_report(libraries: tuple[str, ...] = REPORT) -> None:
    """Raise UserError, with what to install, unless the libraries of the report and the boards are there.

    Both are looked for as soon as one is needed: a job opens its boards before it trains, and a report that cannot be
    written is found then and not after hours.
    """
    missing = [library for library in libraries if find_spec(library) is None]
    if missing:
        raise UserError(
            f'a run\'s report and boards need {" and ".join(missing)}: install with pip install "tangram-train[report]"'
        )
