"""Choice tasks made from a text, under a budget or a selection (as in arXiv 2503.07518, table 1)."""
