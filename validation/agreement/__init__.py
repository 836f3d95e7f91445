"""What real stacks do, beside what gpuir says of them: launches, memory, host time, results."""
