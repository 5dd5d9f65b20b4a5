"""Ghost norms that cannot fall below the gradient that is summed.

Ghost clipping never builds a sample's gradient, so the norm it clips by and the gradient that the
second backward pass sums are computed along different roads. For a layer that is applied to
``T`` tokens of a sample both sum ``T`` products, and where these cancel the float32 results can
differ by as much as they are long: Opacus's float32 Gram matrices put the norm of two nearly equal
tokens with large activations many times too low.

Here the Gram matrices are float64 (or the gradient is built, where that is smaller), and the
rounding of both roads is added on top, with ``S = sum_t |b_t| |a_t|`` the length of the terms:

    norm = exact norm + T eps S,   error of either road <= T (eps / 2) S

The result is an upper bound on the norm of what is summed, about ``T eps S / norm`` too large.
"""

from __future__ import annotations

import torch
from opacus.grad_sample.embedding_norm_sample import compute_embedding_norm_sample
from opacus.grad_sample.linear import compute_linear_norm_sample
from torch import nn

_NormSamples = dict[torch.Tensor, torch.Tensor]


def linear_norm_sample(
    layer: nn.Linear, activations: list[torch.Tensor], backprops: torch.Tensor
) -> _NormSamples:
    """Return per-sample gradient norms of a linear layer, bounded from below for sequences.

    Args:
        layer: The layer.
        activations: Its input, shape (B, ..., d_in), in a list.
        backprops: Gradient of the loss with respect to its output, shape (B, ..., d_out).

    Returns:
        Norms of shape (B,) for each trainable parameter. Without tokens (two dimensions) they are
        Opacus's, bit for bit: a single product cannot cancel.
    """
    if backprops.dim() == 2:
        norms: _NormSamples = dict(compute_linear_norm_sample(layer, activations, backprops))
        if layer.weight.requires_grad:
            # Theirs squares each factor by itself, which can underflow where the product does not.
            product = _norm(backprops) * _norm(activations[0].to(backprops))
            lost = norms[layer.weight] < 0.9 * product
            norms[layer.weight] = torch.where(lost, product, norms[layer.weight])
        return norms
    b = backprops.flatten(1, -2)  # (B, T, d_out)
    a = activations[0].to(b.dtype).flatten(1, -2)  # (B, T, d_in)
    b_norms = b.norm(2, dim=-1)
    ret: _NormSamples = {}
    if layer.weight.requires_grad:
        terms = (b_norms * a.norm(2, dim=-1)).sum(dim=1)
        ret[layer.weight] = _outer_product_norm(b, a) + _rounding(b) * terms
    if layer.bias is not None and layer.bias.requires_grad:
        ret[layer.bias] = _norm(b.sum(dim=1)) + _rounding(b) * b_norms.sum(dim=1)
    return ret


def embedding_norm_sample(
    layer: nn.Embedding, activations: list[torch.Tensor], backprops: torch.Tensor
) -> _NormSamples:
    """Return per-sample gradient norms of an embedding, bounded from below for repeated tokens.

    Args:
        layer: The layer.
        activations: Token indices, shape (B, ...), in a list.
        backprops: Gradient of the loss with respect to its output, shape (B, ..., d).

    Returns:
        Norms of shape (B,) for the weight.
    """
    if len(backprops) == 0:  # where the parent raises
        return {layer.weight: backprops.new_zeros(0)}
    norms = compute_embedding_norm_sample(layer, activations, backprops)
    tokens = backprops.reshape(len(backprops), -1, backprops.shape[-1])
    slack = _rounding(tokens) * tokens.norm(2, dim=-1).sum(dim=1)
    return {parameter: norm + slack for parameter, norm in norms.items()}


def _rounding(tokens: torch.Tensor) -> float:
    return float(tokens.shape[1] * torch.finfo(tokens.dtype).eps)


def _has_float64(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "mps"


def _norm(vectors: torch.Tensor) -> torch.Tensor:
    """Return the norms of rows; long float32 sums of squares would come out too low."""
    dtype = torch.float64 if _has_float64(vectors) else vectors.dtype
    norms: torch.Tensor = vectors.norm(2, dim=-1, dtype=dtype)
    return norms.to(vectors.dtype)


def _outer_product_norm(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return ``|sum_t b_t a_t^T|`` of each sample, by the smaller of two intermediates."""
    gram_entries = 4 * a.shape[1] ** 2  # two Gram matrices, in float64
    # Squares need twice the digits: float64 has them for float32, nothing has them for float64.
    if a.shape[-1] * b.shape[-1] <= gram_entries or b.dtype == torch.float64 or not _has_float64(b):
        return _norm(torch.einsum("nti,ntj->nij", b, a).flatten(1))
    a, b, dtype = a.double(), b.double(), b.dtype
    products = torch.bmm(a, a.mT) * torch.bmm(b, b.mT)
    return products.sum(dim=(1, 2)).clamp(min=0).sqrt().to(dtype)
