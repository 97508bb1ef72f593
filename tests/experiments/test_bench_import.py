"""`kronfac bench import` measures processes in turn and writes a page."""

import json

from tests.experiments.runs import kronfac


def test_it_measures_and_writes_the_page(tmp_path):
    page = tmp_path / "page.md"
    arguments = ("--repeats", "1", "--output", str(page), "--run-dir", str(tmp_path / "runs"))
    kronfac("bench", "import", *arguments)
    text = page.read_text()
    assert "kronfac bench import" in text
    assert "what kronfac adds to it" in text
    (file,) = (tmp_path / "runs").glob("*.json")
    (trial,) = json.loads(file.read_text())["trials"]
    assert 0 < trial["statement"][0] < trial["both"][0]
