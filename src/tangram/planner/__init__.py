"""The planner: the plan as an artefact, what is legal, what it needs, and which one to take."""
