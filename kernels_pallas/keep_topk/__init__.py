"""Selection of the slots of largest score in each head."""
