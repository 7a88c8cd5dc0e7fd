"""Attention over the slots that each head has chosen: of the others, nothing is read."""
