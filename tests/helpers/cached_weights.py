"""Layers whose packed weights are cached, and what they compute from their present weights, by hand."""

import torch

import fp4compile

# Activation and weight differ, and so do the layers.
RECIPE = fp4compile.Recipe(fprop_x="nvfp4", fprop_w="nvfp4_te", rules=[("2", "mxfp8")])
FORMATS = {0: ("nvfp4", "nvfp4_te"), 2: ("mxfp8", "mxfp8")}


def uncached(layer, x, formats=("nvfp4", "nvfp4")):
    """The layer's quantised output, composed by hand from its present weight; by the reference, on the CPU."""
    x, w = (
        fp4compile.quantize(t.detach().cpu().contiguous(), fmt).dequantize()
        for t, fmt in zip((x, layer.weight), formats, strict=True)
    )
    return x @ w.t() + layer.bias.detach().cpu()


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32))


def uncached_two(model, x):
    return uncached(model[2], torch.relu(uncached(model[0], x, FORMATS[0])), FORMATS[2])


def assert_current(compiled, model, x):
    """The compiled model's inference is that of its present weights."""
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), uncached_two(model, x), rtol=1e-5, atol=1e-5)


def write_unseen(weight, factor):
    """Multiply a weight by a factor, as a collective or a kernel that PyTorch does not know would."""
    memory = weight.detach().new_empty(0)
    memory.set_(weight.untyped_storage(), weight.storage_offset(), weight.shape, weight.stride())
    memory.mul_(factor)
