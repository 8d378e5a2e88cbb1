"""Graph passes: rewrite the joint graph, then hoist, merge, fuse and lower. None depends on a kernel's inside."""
