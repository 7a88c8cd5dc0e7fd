"""Insertion of one token per row into the first free slot of each head."""
