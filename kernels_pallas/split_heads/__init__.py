"""The rotated queries and keys, and the values, of what a product has made of each token."""
