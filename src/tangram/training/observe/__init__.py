"""What a run tells: events, progress, tables, boards, profiles."""
