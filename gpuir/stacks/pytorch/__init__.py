"""What PyTorch itself does, eager and compiled."""
