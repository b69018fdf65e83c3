"""`python -m gemworks.jagged.bench`: our attention beside its peers, on the lengths of a recommender."""
