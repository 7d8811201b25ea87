"""What a step costs: its time, its memory and its communication, corrected by what was measured."""
