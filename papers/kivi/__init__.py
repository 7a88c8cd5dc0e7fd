"""KIVI (arXiv 2402.02750): what rounding keys and values costs."""
