"""A doctor for training scripts of diffusion models: it records what one update does, and says what is wrong with it."""
