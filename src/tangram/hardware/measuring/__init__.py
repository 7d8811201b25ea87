"""What this machine takes for operators and collectives, measured, and the rows that benches print."""
