"""Products of quantised operands."""
