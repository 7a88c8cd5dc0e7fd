"""Attention over the slots that each head has chosen: what the others hold does not matter."""
