"""The op rules, by family: files of text that `tangram.sharding.table` reads."""
