"""Documents of tables and pictures: HTML that needs no network, Markdown that keeps what people wrote."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from kronfac import KronfacError
from kronfac_experiments.pages.document import WRITTEN, Document, PageError, Picture, Table

VOID = {"meta", "link", "img", "br"}


def document(cell="1", name="Errors"):
    tables = [Table(name, ("name", "error"), [(f"{name} a", cell)], note=f"{name}.")]
    pictures = [Picture(name, f"{name}, drawn", b"\x89PNG")]
    return Document(f"{name}: a page", "kronfac bench", "One seed.", tables, pictures)


class Page(HTMLParser):
    """The elements of a page, its text outside styles, and whether tags match."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.text, self.open = [], "", []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def test_a_page_loads_nothing():
    source = document().html
    page = Page(source)
    for _, attributes in page.elements:
        assert attributes.get("src", "data:").startswith("data:")
        assert attributes.get("href", "#").startswith(("#", "data:"))
        assert "url(" not in attributes.get("style", "")
    assert not {tag for tag, _ in page.elements} & {"iframe", "object", "embed", "base", "script"}
    (policy,) = (a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    styles = source[source.index("<style>") : source.index("</style>")]
    assert not re.search(r"url\(|@import|http", styles)


def test_the_lowest_of_a_line_is_bold():
    page = document("**1.5**, <b>").html
    assert "<td><b>1.5</b>, &lt;b&gt;</td>" in page


@pytest.mark.parametrize("name", ["Läufe $θ$", "<img src=x onerror=alert(1)>", "a&amp;b\"c'"])
def test_names_are_text_everywhere(name):
    page = Page(document(f"</script>{name}", name).html)
    assert page.text.count(name) >= 6
    assert f"</script>{name}" in page.text
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert any(name in a["alt"] for tag, a in page.elements if tag == "img")


def test_a_page_is_replaced_and_its_folder_made(tmp_path):
    output = tmp_path / "new" / "page.html"
    for _ in range(2):
        assert document().write_html(output) == output
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    with pytest.raises(PageError, match=r"cannot be written to .*--output") as error:
        document().write_html(output.parent)
    assert isinstance(error.value, KronfacError)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_text_has_contrast_in_light_and_dark():
    light, dark = re.findall(r":root \{(.*?)\}", document().html, flags=re.DOTALL)
    colours = {}
    for scheme in (light, dark):
        colours |= dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", scheme))
        for text in ("text", "muted", "accent"):
            for ground in ("page", "panel"):
                # WCAG 2.2, level AA.
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def contrast(one, other):
    def luminance(colour):
        levels = np.array([int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        linear = np.where(levels <= 0.04045, levels / 12.92, ((levels + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("own", ["", f"{WRITTEN}\n\nIt is *good*.\n\n- Twice.\n\n"])
def test_the_written_section_stays_and_all_else_is_new(own, tmp_path):
    page = tmp_path / "page.md"
    document("1").write_markdown(page)
    fresh = page.read_text()
    assert WRITTEN not in fresh
    page.write_text(fresh.replace("## Errors", f"{own}## Errors", 1))
    expected = fresh.replace("| 1 |", "| 2 |").replace("## Errors", f"{own}## Errors", 1)
    for _ in range(2):
        document("2").write_markdown(page)
        assert page.read_text() == expected
