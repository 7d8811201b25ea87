"""The mesh of a run made real: groups of ranks, layouts for torch, derived programs, modes and buffers."""
