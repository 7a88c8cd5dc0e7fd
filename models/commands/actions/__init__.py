"""Do what each command says, once its flags are read. These modules import JAX; those of the flags do not."""
