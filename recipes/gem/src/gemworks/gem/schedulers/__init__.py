"""Schedulers of torchx that the recipe's components are launched with; loaded by torchx alone, through entry points."""
