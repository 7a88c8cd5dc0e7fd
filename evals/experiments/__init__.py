"""Experiments that repeat the papers': they are in a checkout, but not in the wheel."""
