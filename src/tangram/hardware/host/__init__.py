"""The machine at hand: its cores, memory and devices, and the processes that are started on it."""
