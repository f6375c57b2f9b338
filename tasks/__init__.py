"""Prefect tasks, one module per stage, around one call of the libraries each."""
