"""Graph passes: find -> plan -> rewrite in the joint graph. Graph in, graph out; nothing here knows a kernel's inside."""
