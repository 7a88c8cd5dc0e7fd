"""Attention over the slots that each head has chosen; the content of the other slots does not matter."""
