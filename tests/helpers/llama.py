"""A Llama block as a function, its norms as Llama's own code has them."""

import torch
import torch.nn.functional as F

SQUARE, HIDDEN = (512, 512), (1536, 512)
# Of `llama_block`'s arguments: 2 x 128 tokens, 4 heads.
SHAPES = ((2, 128, 512), (512,), SQUARE, SQUARE, SQUARE, SQUARE, (512,), HIDDEN, HIDDEN, HIDDEN[::-1])


def llama_norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def llama_block(x, norm, w_q, w_k, w_v, w_o, post_norm, w_gate, w_up, w_down):
    """Without rotary embeddings. Attention is one op, of which nothing is decomposed."""
    y = llama_norm(x, norm)
    q, k, v = (F.linear(y, w).view(2, -1, 4, 128).transpose(1, 2) for w in (w_q, w_k, w_v))
    y, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    x = x + F.linear(y.transpose(1, 2).reshape(x.shape), w_o)
    y = llama_norm(x, post_norm)
    return x + F.linear(F.silu(F.linear(y, w_gate)) * F.linear(y, w_up), w_down)
