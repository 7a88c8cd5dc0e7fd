"""The experiments of arXiv 2503.07518: what its predictor finds, what it costs, what it saves."""
