"""The sum of hidden states and of what a product adds to them, and the sum's RMS norm."""
