"""A derivation for people: tables, reasons, contradictions, differences, alternatives."""
