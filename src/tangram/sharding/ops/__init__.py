"""Operators and their rules: the table, how calls are bound to rules, rules that are computed."""
