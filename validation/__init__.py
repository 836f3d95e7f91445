"""How far gpuir is from what others measured: readers of public data sets, whole models and
deployments against their labels, agreement with real stacks. Not a part of the package."""
