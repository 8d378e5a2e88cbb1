"""Packed layers: linear layers whose weight is stored quantised (`linear`), made by `pack`, kept in files by `files`."""
