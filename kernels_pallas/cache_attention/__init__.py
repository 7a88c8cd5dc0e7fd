"""Attention of a block of queries over the slots of a cache, with the column statistics that scores read."""
