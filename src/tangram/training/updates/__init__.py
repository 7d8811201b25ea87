"""The optimiser: rules of updates, their states, and what ranks put together for them."""
