"""Packed layers: linear layers whose weight is stored quantised."""
