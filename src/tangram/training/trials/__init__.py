"""Plans tried before they run: dry runs, trials, the choice among them."""
