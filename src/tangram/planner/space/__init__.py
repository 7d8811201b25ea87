"""What a strategy is made of: grids of axes, recompute, ZeRO stages, offload, stages; and what frameworks can do."""
