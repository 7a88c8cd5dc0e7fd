"""Decoders of other packages under a KV budget: gemma, google-tunix and keras-hub, each in a module of its own.

A module imports its package only when it is used. None of the three packages is a dependency of this one.
"""
