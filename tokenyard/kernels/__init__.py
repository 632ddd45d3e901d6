"""Triton kernels, one file per operator; imported by `tokenyard.backend` alone, when it chooses them."""
