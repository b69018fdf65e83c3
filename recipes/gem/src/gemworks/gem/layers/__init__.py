"""Local MFU: every layer type of a preset alone, forward and backward. `python -m gemworks.gem.layers`."""
