"""CAOTE (arXiv 2504.14051): how far attention outputs move, and what its scores cost in a decode step."""
