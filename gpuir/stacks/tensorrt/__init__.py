"""What TensorRT's builder does to a network."""
