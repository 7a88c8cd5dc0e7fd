"""Training: the retriever that ships, and TokenButler's predictor. Try `python -m train.butler --help`."""

from kvjax.install import check_packages

check_packages("models", "evals")
