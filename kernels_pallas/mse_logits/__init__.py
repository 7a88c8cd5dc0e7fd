"""The mean squared error between a model's attention logits and those of a predictor, without a [T, T] array."""
