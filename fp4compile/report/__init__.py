"""What a user reads: the report, its rows and pages, the names of modules, and `explain`."""
