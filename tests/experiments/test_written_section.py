"""What people wrote into a page of results stays when the command that makes the page runs again."""

from pathlib import Path

from kronfac_experiments.pages.document import WRITTEN, Document, Table


def document(cell: str) -> Document:
    tables = [Table("Errors", ("name", "error"), [("a", cell)])]
    return Document(title="Title", command="kronfac bench", settings="One seed.", tables=tables)


def test_the_written_section_stays_and_all_else_is_new(tmp_path: Path):
    page = tmp_path / "page.md"
    document("1").write_markdown(page)
    fresh = page.read_text()
    own = f"{WRITTEN}\n\nIt is *good*.\n\n- Twice.\n\n"
    page.write_text(fresh.replace("## Errors", f"{own}## Errors"))
    document("2").write_markdown(page)
    expected = fresh.replace("| a | 1 |", "| a | 2 |").replace("## Errors", f"{own}## Errors")
    assert "| a | 2 |" in expected
    assert page.read_text() == expected
    document("2").write_markdown(page)  # and again
    assert page.read_text() == expected


def test_without_one_nothing_is_added(tmp_path: Path):
    page = tmp_path / "page.md"
    document("1").write_markdown(page)
    document("2").write_markdown(page)
    assert WRITTEN not in page.read_text()
