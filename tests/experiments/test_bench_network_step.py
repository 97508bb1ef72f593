"""`kronfac bench network-step` measures a network and writes a page."""

from tests.experiments.runs import kronfac


def test_it_measures_and_writes_the_page(tmp_path):
    page = tmp_path / "page.md"
    arguments = ("--networks", "tabular", "--repeats", "1", "--steps", "2", "--warm-up", "1")
    folder = str(tmp_path / "runs")
    kronfac("bench", "network-step", *arguments, "--output", str(page), "--run-dir", folder)
    text = page.read_text()
    assert "kronfac bench network-step" in text
    assert "| tabular | 1024 |" in text
