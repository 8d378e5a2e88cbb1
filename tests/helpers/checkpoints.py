"""Checkpoints of other libraries, read without the package."""

from pathlib import Path

import torch
from safetensors.torch import load_file

DATA = Path(__file__).parents[1] / "data"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def tensors_of(folder):
    return {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def decoded(tensors, layer):
    """The weight of a layer by ModelOpt's layout."""
    codes, scales = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
    elements = codes.float()
    if codes.dtype == torch.uint8:
        elements = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], -1).flatten(1)
    decoding = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    values = elements * decoding.repeat_interleave(elements.shape[1] // scales.shape[1], 1)
    return values * tensors.get(f"{layer}.weight_scale_2", torch.ones(()))


def bits(tensors):
    return {name: (t.dtype, tuple(t.shape), t.reshape(-1).view(torch.uint8).tolist()) for name, t in tensors.items()}
