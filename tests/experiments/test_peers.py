"""Muon and SOAP do what their papers say."""

import pytest
import torch
from torch import nn

from kronfac_experiments.race.contestants import CONTESTANTS
from kronfac_experiments.race.models import GPT, ViT, cnn
from kronfac_experiments.race.peers import SOAP, Muon, orthogonalised
from kronfac_experiments.race.problems import PROBLEMS


@pytest.mark.parametrize("shape", [(30, 80), (80, 30), (40, 40)])
def test_newton_schulz_in_float32_makes_singular_values_near_1(shape):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    X = orthogonalised(G)
    assert X.dtype == torch.float32
    U, S, Vt = torch.linalg.svd(G.double(), full_matrices=False)
    seen = U.T @ X.double() @ Vt.T  # the same singular vectors, so this is diagonal
    assert torch.allclose(seen, seen.diagonal().diag(), atol=1e-4)
    large = 0.05 * S.norm() < S  # five steps do not lift the smallest all the way
    assert ((seen.diagonal()[large] > 0.6) & (seen.diagonal()[large] < 1.3)).all()


def test_muon_is_pytorchs_but_for_bfloat16_and_leaves_the_rest_to_adamw():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = Muon(layers[0].parameters(), [layers[0].weight], lr=0.1, weight_decay=0.01, beta2=0.95)
    theirs = (
        torch.optim.Muon(
            [layers[1].weight], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([layers[1].bias], lr=0.1, weight_decay=0.01, betas=(0.9, 0.95)),
    )
    for x in torch.randn(3, 7, 5):
        for layer in layers:
            layer.zero_grad()
            layer(x).square().mean().backward()
        for optimizer in (ours, *theirs):
            optimizer.step()
    torch.testing.assert_close(layers[0].weight, layers[1].weight, rtol=0, atol=5e-3)
    torch.testing.assert_close(layers[0].bias, layers[1].bias, rtol=0, atol=5e-3)


def test_soap_does_not_depend_on_the_basis_and_adam_does():
    """W' = U W Vᵀ and a rotated gradient give the rotated iterates, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    rotation = [
        torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64))[0]
        for _ in range(2)
    ]
    U, V = rotation
    start = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(5, 5, generator=generator, dtype=torch.float64) for _ in range(25)]

    def end(kind, turn):
        W = nn.Parameter(turn(start).clone())
        optimizer = kind([W], lr=0.1)
        for G in gradients:
            W.grad = turn(G)
            optimizer.step()
        return W.detach()

    rotated = end(SOAP, lambda M: U @ M @ V.T)
    torch.testing.assert_close(rotated, U @ end(SOAP, lambda M: M) @ V.T, rtol=1e-9, atol=1e-9)
    adam = end(torch.optim.Adam, lambda M: U @ M @ V.T)
    assert not torch.allclose(adam, U @ end(torch.optim.Adam, lambda M: M) @ V.T, atol=1e-2)


def test_soap_is_adam_for_vectors_after_its_first_gradient():
    gradients = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (nn.Parameter(torch.zeros(5, dtype=torch.float64)) for _ in range(2))
    soap = SOAP([one], lr=0.1, weight_decay=0.3)
    adam = torch.optim.AdamW([other], lr=0.1, weight_decay=0.3, betas=(0.95, 0.95))
    one.grad = gradients[0].clone()
    soap.step()
    assert torch.equal(one, torch.zeros_like(one))
    for g in gradients[1:]:
        one.grad, other.grad = g.clone(), g.clone()
        soap.step()
        adam.step()
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_muon_takes_hidden_matrices_and_convolutions_alone():
    def chosen(model):
        settings = {"lr": 0.1, "weight_decay": 0.0}
        build = CONTESTANTS["muon"].build
        (group,) = build(model, nn.MSELoss(), PROBLEMS["cnn"], settings).param_groups
        return group["params"]

    shapes = [tuple(p.shape) for p in chosen(cnn())]
    assert shapes == [(16, 1, 3, 3), (32, 16, 3, 3), (32, 1568)]
    for gpt in (GPT(65, 8), GPT(65, 8, tied=True)):
        matrices = chosen(gpt)
        assert len(matrices) == 4 * 4
        assert all(p is not gpt.tokens.weight and p is not gpt.head.weight for p in matrices)
    vit = ViT()
    assert len(chosen(vit)) == 1 + 4 * 4
    assert all(p is not vit.positions for p in chosen(vit))
