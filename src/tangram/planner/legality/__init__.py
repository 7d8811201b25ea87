"""Which strategies are legal, in one engine: tables of constraints, asked of grids by the search and of plans before a
run."""
