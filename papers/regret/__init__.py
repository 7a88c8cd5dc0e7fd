"""Regret: how far the tokens that a policy keeps are from the best that could have been kept."""
