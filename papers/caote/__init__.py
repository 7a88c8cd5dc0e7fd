"""CAOTE (arXiv 2504.14051): what its scores cost in a decode step."""
