"""The gemworks command line: train, evaluate, print configurations, diagnose."""
