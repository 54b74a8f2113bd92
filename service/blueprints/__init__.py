"""One blueprint per concern, thin: requests in, the pool's client in the middle, responses out."""
