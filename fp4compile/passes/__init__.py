"""Graph passes: rewrite the joint graph, then hoist, merge, fuse and lower. They choose kernels by `choose` alone."""
