"""Network and memory planned together: budgets, offload, SM-free collectives."""
