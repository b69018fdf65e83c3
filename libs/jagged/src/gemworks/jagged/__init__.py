"""Attention, norms and pooling on packed variable-length sequences, without padding."""
