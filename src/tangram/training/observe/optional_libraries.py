"""Whether the optional libraries are there that make what a run leaves for people to look at."""

from importlib.util import find_spec

from tangram.errors import UserError


def need(libraries: tuple[str, ...], extra: str) -> None:
    """Raise UserError, with the extra to install, unless the libraries are there."""
    missing = [library for library in libraries if not _there(library)]
    if missing:
        what = f"a run's report and boards need {' and '.join(missing)}"
        raise UserError(f'{what}: install with pip install "tangram-train[{extra}]"')


def _there(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
