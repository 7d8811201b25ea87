"""`python -m tangram`: the same command line as the console script `tangram`."""

from tangram.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
