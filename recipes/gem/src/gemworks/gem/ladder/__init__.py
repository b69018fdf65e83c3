"""The ablation ladder: real training steps, one thing added per row. `python -m gemworks.gem.ladder`."""
