"""Orthogonalise a matrix by a quintic iteration: every singular value is pulled towards one (report §2.5, Muon).

Read next: `gnomon/train/muon.py`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Muon, Moonlight report 2502.16982 eq. 3: steep at zero, not exactly convergent
TINY = 1e-7  # keeps a zero matrix zero instead of dividing by its norm


def newton_schulz(
    gradient: Float[Tensor, "*S A B"], steps: int = 5, compute_dtype: torch.dtype | None = None
) -> Float[Tensor, "*S A B"]:
    """An approximation of U V^T where gradient = U S V^T, for each matrix of a batch.

    X <- a X + (b X X^T + c (X X^T)^2) X, from X = gradient / |gradient|_F, with the transpose taken so that X X^T is the
    smaller square. After five steps the singular values lie in about 0.7..1.2, which Muon tolerates.

    `compute_dtype` is the dtype of the products (bf16 on accelerators; `None`: the dtype of `gradient`);
    the result has the dtype of `gradient`.
    """
    a, b, c = COEFFICIENTS
    tall = gradient.shape[-2] > gradient.shape[-1]
    wide = gradient.mT if tall else gradient
    wide = wide.reshape(-1, *wide.shape[-2:])  # [S, A, B], A <= B
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(wide.dtype, torch.float32))
    x = (wide / (norm + TINY)).to(compute_dtype or gradient.dtype)
    for _ in range(steps):
        square = x @ x.mT  # [S, A, A]
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.to(gradient.dtype)
    return (x.mT if tall else x).reshape(gradient.shape)
