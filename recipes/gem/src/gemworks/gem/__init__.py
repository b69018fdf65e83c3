"""A reference GEM: model, data, training loop and launch components."""
