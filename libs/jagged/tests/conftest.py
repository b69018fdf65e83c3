"""What pytest collects here."""

# Started by tests as scripts, which find their neighbours; a module that pytest imports from a file does not.
collect_ignore_glob = ["compile*.py"]
