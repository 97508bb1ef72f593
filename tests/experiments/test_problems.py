import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac_experiments.data.mnist import mnist
from kronfac_experiments.problems import (
    CURVES,
    FACES,
    MNIST,
    PROBLEMS,
    Problem,
    build_model,
    classifier_model,
    load,
    reconstruction_error,
)

SMALL = Problem("small", (12, 8, 3, 8, 12), "bernoulli", 1e-5, train_cases=1, test_cases=1)


@pytest.mark.parametrize(
    ("problem", "parameters"), [(CURVES, 842_340), (MNIST, 2_837_314), (FACES, 7_537_655)]
)
def test_parameter_counts_of_the_authors_program(problem, parameters):
    assert PROBLEMS[problem.name] is problem
    assert problem.parameters == parameters
    assert sum(p.numel() for p in build_model(problem, seed=0).parameters()) == parameters


def test_code_and_output_are_linear_and_the_rest_logistic():
    kinds = [type(module) for module in build_model(MNIST, seed=0)]
    encoder = [nn.Linear, nn.Sigmoid] * 3 + [nn.Linear]
    decoder = [nn.Linear, nn.Sigmoid] * 3 + [nn.Linear]
    assert kinds == encoder + decoder
    assert build_model(MNIST, seed=0)[6].out_features == 30
    assert MNIST.code_layer == 3
    assert build_model(CURVES, seed=0)[10].out_features == 6
    assert CURVES.code_layer == 5


def test_models_repeat_with_the_seed_and_leave_the_global_generator_alone():
    for build in (lambda seed: build_model(SMALL, seed), classifier_model):
        before = torch.get_rng_state()
        first, again, other = build(1), build(1), build(2)
        assert torch.equal(before, torch.get_rng_state())
        for parameter, same in zip(first.parameters(), again.parameters(), strict=True):
            assert torch.equal(parameter, same)
        assert not torch.equal(first[0].weight, other[0].weight)


def test_classifier_is_the_network_of_section_3():
    model = classifier_model(seed=0)
    widths = [layer.out_features for layer in model if isinstance(layer, nn.Linear)]
    assert widths == [20, 20, 20, 20, 20, 10]
    assert model[0].in_features == 256
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh] * 5 + [nn.Linear]
    bound = (6 / (256 + 20)) ** 0.5
    assert 0.95 * bound < model[0].weight.abs().max() <= bound
    assert not model[0].bias.any()


def test_reconstruction_error_is_the_summed_square_per_case():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(23, 12, generator=generator)
    model = build_model(SMALL, seed=0)
    with torch.no_grad():
        logits = model(x)
    expected = sum(((logits[i].sigmoid() - x[i]) ** 2).sum().item() for i in range(23)) / 23
    error = reconstruction_error(model, x, problem=SMALL)
    assert_close(error, expected, rtol=1e-6, atol=0)
    chunked = reconstruction_error(model, x, chunk=5, problem=SMALL)
    assert_close(chunked, expected, rtol=1e-6, atol=0)

    linear = Problem("linear", SMALL.layers, "gaussian", 0.0, train_cases=1, test_cases=1)
    expected = ((logits - x) ** 2).sum(1).mean().item()
    error = reconstruction_error(model, x, problem=linear)
    assert_close(error, expected, rtol=1e-6, atol=0)


def test_load_gives_the_cases_of_the_problem(real_data):
    train, test = load("mnist")
    assert train.shape == (MNIST.train_cases, MNIST.layers[0])
    assert test.shape == (MNIST.test_cases, MNIST.layers[0])


@pytest.mark.slow
@pytest.mark.parametrize("problem", [CURVES, FACES])
def test_load_gives_the_cases_of_the_generated_problems(problem, real_data):
    train, test = load(problem.name)
    assert train.shape == (problem.train_cases, problem.layers[0])
    assert test.shape == (problem.test_cases, problem.layers[0])


def test_mnist_starts_where_the_authors_program_does(real_data):
    # About 263 with a standard deviation of 7 over seeds: four standard errors of three seeds.
    images = mnist().train.images[:2000]
    errors = [
        reconstruction_error(build_model(MNIST, seed), images, problem=MNIST) for seed in range(3)
    ]
    assert abs(sum(errors) / 3 - 263) < 16
