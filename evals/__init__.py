"""Evaluations: what a policy forgets, measured. `python -m evals needle --help`."""
