"""Reading a checkpoint into any layout: blocks assigned to ranks, read, verified and exchanged."""
