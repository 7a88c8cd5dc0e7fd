"""The trainers, of small networks and of models under a policy; each is a command, such as `python -m train.scorer`."""

from kvjax._src.install import check_packages

check_packages("models", "evals")
