"""The gemworks command line: train, evaluate, plan, benchmark, diagnose."""
