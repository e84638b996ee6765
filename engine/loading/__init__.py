"""From a checkpoint's files to the arrays that kernels read."""
