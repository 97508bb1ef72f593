"""Public names and signatures are as recorded, so that no release changes them unseen."""

from difflib import unified_diff

from tests.release.public_api import MODULES, RECORDED, current

MEANING = """The public names of kronfac are not as recorded in tests/release/public_api.txt:

{changes}

If it is meant: a line in CHANGELOG.md, then `python -m tests.release.public_api`. If not, undo it.
A line that is gone needs a major version (a minor one before 1.0), a new line a minor one."""


def test_public_names_are_as_recorded():
    both = RECORDED.read_text(), current()
    found = unified_diff(*(text.splitlines() for text in both), n=0, lineterm="")
    assert both[0] == both[1], MEANING.format(changes="\n".join(found))


def test_the_record_has_the_front_door():
    record = RECORDED.read_text()
    assert "\nkronfac.KFAC (model, loss=None, *, " in record
    assert "\nkronfac.StepReport.iteration attribute\n" in record
    for module in MODULES:
        assert f"\n{module}." in record
