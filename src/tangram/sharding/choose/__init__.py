"""Choice: the sharding of a whole model that takes the least time on a cluster, within its memory."""
