"""The state of a program as entries with layouts, and which rank writes which replica."""
