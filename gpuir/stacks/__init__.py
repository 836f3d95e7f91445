"""What software stacks do besides the passes that all share: PyTorch, Inductor, onnxruntime."""
