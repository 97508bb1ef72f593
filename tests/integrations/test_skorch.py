"""skorch: nets, grid search, copies."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.integrations.skorch import KFACMixin
from tests.integrations import problem


@pytest.fixture(scope="module")
def skorch() -> Any:
    return pytest.importorskip("skorch")


class Net(nn.Module):
    """The network of the problem, as a class."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(5, width), nn.Tanh(), nn.Linear(width, problem.CLASSES)
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return z


def net_class(skorch: Any, name: str = "NeuralNetClassifier") -> Any:
    """A net of skorch's with the mixin, where pickle finds it."""
    kind = type(f"KFAC{name}", (KFACMixin, getattr(skorch, name)), {"__module__": __name__})
    return globals().setdefault(kind.__name__, kind)


def net(skorch: Any, **settings: Any) -> Any:
    options = {"lr": 1.0, "max_epochs": problem.EPOCHS, "train_split": None, **settings}
    return net_class(skorch)(
        Net, criterion=nn.CrossEntropyLoss, batch_size=64, verbose=0, **options
    )


def test_it_takes_the_steps_of_a_plain_loop_and_trains(skorch):
    x, y = problem.data()
    fitted = net(skorch).fit(x, y)
    problem.assert_same(fitted.module_.layers, problem.train(closure=True))
    problem.assert_same(problem.train(closure=False), problem.train(closure=True))
    assert problem.loss_of(fitted.module_) < problem.REACHED
    assert fitted.score(x, y) > 0.9
    assert isinstance(fitted.optimizer_, KFAC)


def test_scikit_learn_searches_a_grid(skorch):
    search = pytest.importorskip("sklearn.model_selection").GridSearchCV(
        net(skorch, max_epochs=2),
        {"module__width": [2, 16], "optimizer__inverse": ["block_diagonal"]},
        cv=2,
        scoring="accuracy",
    )
    x, y = problem.data()
    search.fit(x.numpy(), y.numpy())
    assert len(search.cv_results_["params"]) == 2
    assert search.best_score_ > 0.7


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
@pytest.mark.parametrize("before", [0, 3])
def test_copies_of_a_net_go_on_as_it_would(skorch, copied, before):
    x, y = problem.data()
    one = net(skorch).initialize()
    if before:
        one.set_params(max_epochs=before)
        one.partial_fit(x, y)
    other = copied(one)
    for each in (one, other):
        each.set_params(max_epochs=2)
        each.partial_fit(x, y)
    problem.assert_same(one.module_, other.module_)


@pytest.mark.slow
def test_parameters_are_saved_and_loaded(skorch, tmp_path):
    x, y = problem.data()
    one, other = net(skorch, max_epochs=3).fit(x, y), net(skorch, max_epochs=3).initialize()
    files = {"f_params": str(tmp_path / "params"), "f_optimizer": str(tmp_path / "optimizer")}
    one.save_params(**files)
    other.load_params(**files)
    for each in (one, other):
        each.partial_fit(x, y)
    problem.assert_same(one.module_, other.module_)


@pytest.mark.slow
def test_regression_and_the_default_classifier(skorch):
    x, y = problem.data()
    x = x.float()
    net = net_class(skorch, "NeuralNetRegressor")(
        nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)),
        lr=1.0, max_epochs=12, batch_size=64, train_split=None, verbose=0,
    )  # fmt: skip
    net.fit(x, y.float().unsqueeze(1))
    assert net.history[-1, "train_loss"] < 0.1
    # Probabilities, of which skorch takes the logarithm for NLLLoss.
    net = net_class(skorch)(
        nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3), nn.Softmax(dim=-1)),
        lr=1.0, max_epochs=12, batch_size=64, train_split=None, verbose=0,
    )  # fmt: skip
    net.fit(x, y)
    assert net.history[-1, "train_loss"] < 0.2


def test_skorchs_own_learning_rate_is_warned_of(skorch):
    with pytest.warns(UserWarning, match=r"lr=0\.01 .* likely another optimizer's"):
        net_class(skorch)(Net, criterion=nn.CrossEntropyLoss).initialize()
