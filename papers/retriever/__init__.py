"""The embedded model: the recipe of its weights."""
