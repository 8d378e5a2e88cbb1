"""Linear layers whose weight is stored quantised: the layer itself, how it is made, and how files hold it."""
