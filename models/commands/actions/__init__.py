"""What each command does once its flags are read. These modules import JAX; those of the flags do not."""
