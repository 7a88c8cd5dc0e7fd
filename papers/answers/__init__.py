"""The adapter `smollm2-answers`: the questions that it was trained on."""
