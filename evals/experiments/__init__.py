"""Experiments of the papers, repeated: in a checkout, not in the wheel."""
