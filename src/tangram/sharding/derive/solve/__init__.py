"""The cheapest choice for every variable: exact, or bounded with its gap."""
