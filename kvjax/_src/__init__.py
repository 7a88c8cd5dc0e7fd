"""Holds what kvjax is made of, which may change: import the public names from kvjax."""
