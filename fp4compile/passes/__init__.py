"""Graph passes: find -> plan -> rewrite in the joint graph. Graph in, graph out; none knows the inside of a kernel."""
