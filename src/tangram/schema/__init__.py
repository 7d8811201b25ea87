"""The schema of jobs and plans: TOML read and checked, older versions migrated, pipeline schedules as tables."""
