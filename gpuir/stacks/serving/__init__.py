"""What engines that serve language models do: vLLM, SGLang and TensorRT-LLM."""
