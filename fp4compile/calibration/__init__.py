"""What is measured on a user's batches: static scales, the sensitivity of layers, and block scales by least error."""
