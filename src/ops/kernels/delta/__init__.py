"""The delta rule on kernels; ``ops.py`` is where calls come in."""
