"""What onnxruntime does with its CUDA provider."""
