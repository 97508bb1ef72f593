"""`kronfac bench small-step` measures both pairs and writes a page."""

from tests.experiments.runs import kronfac


def test_it_measures_and_writes_the_page(tmp_path):
    page = tmp_path / "page.md"
    arguments = ("--repeats", "1", "--steps", "2", "--output", str(page))
    kronfac("bench", "small-step", *arguments, "--run-dir", str(tmp_path / "runs"))
    text = page.read_text()
    assert "kronfac bench small-step" in text
    assert "K-FAC / AdamW, 10-50-50-50-1" in text
    assert "K-FAC with dropout / without" in text
