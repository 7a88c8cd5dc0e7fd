"""CAOTE's scores of a cache's slots, and the eviction of the slots of lowest score."""
