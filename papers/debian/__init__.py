"""Texts of Debian's packages, on which most experiments run."""
