"""Models whose linear layers and experts are quantised by hand, in eager mode, and how far two results are apart."""

import functools
from unittest import mock

import torch
from torch import nn

import fp4compile


def rounded(x, fmt, dim):
    return fp4compile.quantize(x, fmt, dim=dim).dequantize(x.dtype).movedim(-1, dim)


class HandLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias, recipe):
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, w)
        ctx.recipe, ctx.has_bias = recipe, bias is not None
        y = rounded(flat, recipe.fprop_x, -1) @ rounded(w, recipe.fprop_w, -1).t()
        return (y if bias is None else y + bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        flat, w = ctx.saved_tensors
        dy = grad.reshape(-1, grad.shape[-1])
        dx = rounded(dy, ctx.recipe.dgrad_dy, -1) @ rounded(w, ctx.recipe.dgrad_w, 0)
        dw = rounded(dy, ctx.recipe.wgrad_dy, 0).t() @ rounded(flat, ctx.recipe.wgrad_x, 0)
        return dx.view(*grad.shape[:-1], -1), dw, dy.sum(0) if ctx.has_bias else None, None


def by_hand(model, recipe):
    """The model, its linear layers but the LM head computing as the recipe says."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.forward = functools.partial(_hand_forward, layer, recipe)
    return model


def _hand_forward(layer, recipe, x):
    tensors = x, layer.weight, layer.bias
    if torch.is_autocast_enabled(x.device.type):  # quantised is what the product multiplies
        dtype = torch.get_autocast_dtype(x.device.type)
        tensors = (t if t is None else t.to(dtype) for t in tensors)
    return HandLinear.apply(*tensors, recipe)


class HandExperts(torch.autograd.Function):
    """`F.grouped_mm` of x [M, K] and w [E, K, N], expert by expert."""

    @staticmethod
    def forward(ctx, x, w, offs, recipe):
        ctx.save_for_backward(x, w)
        ctx.spans, ctx.recipe = list(zip([0, *offs.tolist()[:-1]], offs.tolist(), strict=True)), recipe
        out = x.new_zeros(x.shape[0], w.shape[2])
        for matrix, (start, end) in zip(w, ctx.spans, strict=True):
            if start < end:
                rows = rounded(x[start:end], recipe.fprop_x, -1)
                with torch.autocast(x.device.type, enabled=False):  # grouped products are in the operands' dtype
                    product = rows.float() @ rounded(matrix, recipe.fprop_w, 0).float()
                out[start:end] = product.to(x.dtype)
        return out

    @staticmethod
    def backward(ctx, dy):
        (x, w), recipe = ctx.saved_tensors, ctx.recipe
        dx, dw = torch.zeros_like(x), torch.zeros_like(w)
        for expert, (start, end) in enumerate(ctx.spans):
            if start < end:
                own, grad = x[start:end], dy[start:end]
                turned = rounded(w[expert], recipe.dgrad_w, -1).t()
                dx[start:end] = (rounded(grad, recipe.dgrad_dy, -1).float() @ turned.float()).to(x.dtype)
                left = rounded(own, recipe.wgrad_x, 0).t()
                dw[expert] = (left.float() @ rounded(grad, recipe.wgrad_dy, 0).float()).to(w.dtype)
        return dx, dw, None, None


def experts_by_hand(recipe):
    """A context in which `torch.nn.functional.grouped_mm` computes as the recipe says."""
    by_hand = lambda x, w, offs: HandExperts.apply(x, w, offs, recipe)  # noqa: E731
    return mock.patch("torch.nn.functional.grouped_mm", by_hand)


def sqnr(exact, other):
    exact, other = exact.detach().double(), other.detach().double()
    return (10 * torch.log10(exact.square().sum() / (exact - other).square().sum())).item()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
