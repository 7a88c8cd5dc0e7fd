"""The order of each head's tokens in the text, continued from the step before."""
