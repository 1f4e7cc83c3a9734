"""What can't be collected everywhere."""

import importlib.util

# Kernels in triton, which comes with torch for GPUs alone.
collect_ignore = [] if importlib.util.find_spec("triton") else ["src/bayeszip/variational/gpu_kernels.py"]
