"""Graph passes: rewrite the joint graph, then hoist, merge, fuse and lower. None knows the inside of a kernel."""
