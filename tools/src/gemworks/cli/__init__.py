"""The gemworks command line: plan, train, evaluate, measure, diagnose."""
