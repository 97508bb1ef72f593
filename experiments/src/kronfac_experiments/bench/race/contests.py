"""What is raced on, and to which training errors.

The targets of the autoencoders are one thirteenth and one twenty-sixth of the error of the mean image,
which is what a network says before it has learnt anything: on MNIST (52.8) these are 4.0 and 2.0.
"""

from dataclasses import dataclass

from kronfac_experiments.config import PROBLEMS


@dataclass(frozen=True)
class Contest:
    """A problem with its targets.

    Args:
        problem: As `kronfac train` knows it.
        targets: Training errors, falling.
        why: These.
    """

    problem: str
    targets: tuple[float, ...]
    why: str


CONTESTS = {
    contest.problem: contest
    for contest in (
        Contest("curves", (1.3, 0.65), "1/13 and 1/26 of the mean image's error, 16.7"),
        Contest("mnist", (4.0, 2.0), "1/13 and 1/26 of the mean image's error, 52.8"),
        Contest("faces", (37.0, 18.0), "1/13 and 1/26 of the mean image's error, 478"),
        Contest("mnist16", (4.0, 2.0), "per cent of cases misclassified"),
        Contest("friedman", (0.01, 0.001), "shares of the targets' variance"),
    )
}
assert set(CONTESTS) == set(PROBLEMS)


def contests_named(names: tuple[str, ...]) -> tuple[Contest, ...]:
    """Those named, all for none.

    Raises:
        ValueError: a name is of no problem.
    """
    for name in names:
        if name not in CONTESTS:
            raise ValueError(f"--problems are of {', '.join(CONTESTS)}; got {name!r}.")
    return tuple(contest for name, contest in CONTESTS.items() if not names or name in names)
