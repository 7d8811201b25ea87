"""Keep a job going: what a rank's end is taken for, where the run goes on from, and when it had better stop."""
