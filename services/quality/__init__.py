"""What a model's numbers cost in quality: perplexity, divergence from a reference, quantising."""
