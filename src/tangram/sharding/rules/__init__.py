"""The op rules, by family: files of text that `tangram.sharding.ops.rule_table` reads."""
