"""Evaluations: they measure what a policy forgets. Try `python -m evals needle --help`."""

from kvjax._src.install import check_packages

check_packages("models")
