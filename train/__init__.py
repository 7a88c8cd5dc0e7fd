"""Training: the retriever that ships, and (later) the predictors."""
