"""Fused attention on the meta device, where torch would decompose it into products and a softmax of their own.

A GPU runs one kernel, which keeps what lies between its products on the chip. Tensors on the meta device stand for
tensors of a GPU, so `fuse_attention` puts the operator into the graph that torch has there: flash attention, or
memory-efficient attention under a mask.
"""

import torch
import torch.nn.functional as F
from torch.fx import GraphModule

aten = torch.ops.aten


def fuse_attention(gm: GraphModule) -> None:
    """Make the attention of a Dynamo graph on meta tensors the operators of a GPU."""
    for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        query = node.args[0] if node.args else node.kwargs["query"]
        value = query.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.is_meta and value.dim() == 4:
            node.target = attention
    gm.recompile()


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention` by the operators of a GPU."""
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    bias = attn_mask
    if bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, float("-inf")).to(query.dtype)
    bias = bias.expand(*query.shape[:3], key.shape[2])
    kept = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, kept, dropout_p, False, scale=scale)[0]
