"""CAOTE's scores of the slots of a cache, and which of them are freed."""
