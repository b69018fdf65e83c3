"""MXFP8 and FP8 training numerics: exact, measured, and honest on every GPU."""
