"""Attention of a block of queries over the pages that each head owns, with the column statistics that scores read."""
