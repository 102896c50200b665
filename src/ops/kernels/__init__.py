"""Triton kernels of the scalar-decay operators. ``docs/kernels.md`` says how they work together."""
