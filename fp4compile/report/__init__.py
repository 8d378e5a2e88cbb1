"""The report: its rows, texts and pages, and the names of modules."""
