"""Random models, policies and prompts against the decoder in NumPy that keeps every key: ``python -m tests.campaign``.

``cases`` draws a case and makes it smaller, ``checking`` holds it against the reference, ``__main__`` counts.
"""
