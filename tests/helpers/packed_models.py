"""Small models whose linear layers the tests pack, and the recipes that they are packed with."""

import torch

import fp4compile
from fp4compile.recipe import named
from fp4compile.weights.buffers import BUFFERS, packed_in


class Net(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = torch.nn.Embedding(96, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=i == 0) for i in range(2))
        self.lm_head = torch.nn.Linear(width, 96, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.lm_head(x)


TOKENS = torch.arange(24).view(2, 12)
STATIC = {"layers.0": 0.002, "layers.1": 0.001}


def run(model):
    with torch.no_grad():
        return model(TOKENS)


def buffers(model):
    return {(name, part): getattr(layer, part) for name, layer in packed_in(model).items() for part in BUFFERS}


def same_codes(one, other):
    """Whether two models have equal codes and scales in equal places."""
    a, b = buffers(one), buffers(other)
    return a.keys() == b.keys() and all(a[k] is b[k] is None or torch.equal(a[k], b[k]) for k in a)


def write_packed(model, path, recipe="nvfp4"):
    """Pack a model, and save it to a file."""
    fp4compile.pack_(model, recipe)
    fp4compile.save_packed(model, path)


def recipe_of(name):
    return named(name).replace(static_scales=STATIC) if name == "nvfp4_static" else named(name)


class Twice(torch.nn.Module):
    """A layer with two names, and another that lies in a block with two names."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(64, 64)
        self.b = self.a
        self.one = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
        self.two = self.one

    def forward(self, x):
        return self.two(self.b(self.one(self.a(x))))
