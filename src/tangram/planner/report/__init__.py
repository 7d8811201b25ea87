"""Answers for people: tables, charts and the HTML report."""
