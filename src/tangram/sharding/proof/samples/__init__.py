"""Calls to prove rules with."""
