"""The run folder: the one memory of a run. Prefect shows it, everything else may die."""
