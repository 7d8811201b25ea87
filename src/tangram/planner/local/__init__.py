"""The ranking of strategies for the machine at hand: plans that `tangram train` runs."""
