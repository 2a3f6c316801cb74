"""The optimizer's arithmetic on host and device, and the C++ and CUDA code that it runs."""
