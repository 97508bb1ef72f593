"""`kronfac report` without a browser: what is read, what is on the page, what is refused."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
import tyro

from kronfac import KronfacError
from kronfac_experiments.pages.document import PageError
from kronfac_experiments.report import ReportConfig, ReportError, write_report
from kronfac_experiments.report.figures import line_of
from kronfac_experiments.report.page import best_first, number
from kronfac_experiments.report.runs import flatten, read_runs
from tests.experiments.fabricated_runs import config, metrics, write_run

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """The elements of a page, its text outside scripts and styles, and whether tags match."""

    def __init__(self, source):
        super().__init__()
        self.source, self.elements, self.text, self.open = source, [], "", []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data

    def attributes(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def headings(self):
        return re.findall(r"<h2>(.*?)</h2>", self.source)


@pytest.fixture
def report(tmp_path):
    def write(*folders):
        path = write_report(ReportConfig(runs=folders, output=tmp_path / "page.html"))
        return Page(path.read_text(encoding="utf-8"))

    return write


def test_page_of_whole_runs_has_every_section(tmp_path, report):
    kfac = write_run(tmp_path / "kfac")
    other = write_run(
        tmp_path / "nag", metrics(kfac=False, scale=2), config(optimizer="nag", kfac={})
    )
    page = report(kfac, other)
    assert page.headings == [
        "Summary",
        "Time by part",
        "Configuration",
        "Error",
        "Step by step",
    ]
    assert (
        "Lowest training error on mnist: 1.346 by kfac; the next, nag, ended at 2.692"
        in " ".join(page.text.split())
    )
    assert all(image["alt"] for image in page.attributes("img"))


def test_page_loads_nothing(tmp_path, report):
    page = report(write_run(tmp_path / "run"))
    for _, attributes in page.elements:
        assert attributes.get("src", "data:").startswith("data:")
        assert attributes.get("href", "#").startswith(("#", "data:"))
        assert "url(" not in attributes.get("style", "")
    assert not {tag for tag, _ in page.elements} & {"iframe", "object", "embed", "base", "script"}
    policy = next(m["content"] for m in page.attributes("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    styles = source[source.index("<style>") : source.index("</style>")]
    assert not re.search(r"url\(|@import|http", styles)


def test_runs_may_be_many_and_long_and_the_page_stays_light(tmp_path, report):
    rows = metrics(iterations=600)
    for row in rows:
        row["train_error"] = row["loss"]
    folders = [write_run(tmp_path / f"run {k}", rows, config(seed=k)) for k in range(12)]
    report(*folders)
    assert (tmp_path / "page.html").stat().st_size < 2e6
    assert len({line_of(index) for index in range(12)}) == 12


def test_a_half_written_last_line_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"iteration": 61, "loss": 1.0, "name": "\xc3')
    (run,) = read_runs([folder])
    assert run.last("iteration") == 60
    assert run.notes == ()


def test_events_are_told(tmp_path, report):
    rows = metrics()
    rows[7]["events"] = ["refused: loss <nan>"]
    page = report(write_run(tmp_path / "run", rows))
    assert "1 events, the first in iteration 7: refused: loss <nan>" in page.text


def test_an_empty_run_is_said_to_be_empty(tmp_path, report):
    page = report(write_run(tmp_path / "run", []))
    assert "metrics.jsonl holds no iteration yet" in page.text


@pytest.mark.parametrize("name", ["Läufe $θ$", "<img src=x onerror=alert(1)>", "a&amp;b\"c'"])
def test_names_are_text_everywhere(tmp_path, report, name):
    folder = write_run(tmp_path / name, settings=config(**{name: f"</script>{name}"}))
    other = write_run(tmp_path / "other")
    page = report(folder, other)
    assert page.text.count(name) >= 3
    assert f"</script>{name}" in page.text
    assert not any("onerror" in attributes for _, attributes in page.elements)


def test_names_are_made_different(tmp_path):
    folders = [write_run(tmp_path / parent / "run") for parent in ("a", "b")]
    folders.append(tmp_path / "a" / ".." / "a" / "run")
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def test_best_first_within_a_problem(tmp_path):
    diverged = metrics()
    diverged[-1] |= {"train_error": None, "averaged_train_error": None}
    bare = [{"iteration": 1, "loss": 1.0}]
    runs = read_runs(
        [
            write_run(tmp_path / "never", bare),
            write_run(tmp_path / "diverged", diverged),
            write_run(tmp_path / "worse", metrics(scale=2)),
            write_run(tmp_path / "better", metrics(scale=1)),
            write_run(tmp_path / "curves", metrics(scale=0.1), config(problem="curves")),
        ]
    )
    assert [run.name for run in best_first(runs)] == [
        "better",
        "worse",
        "diverged",
        "never",
        "curves",
    ]


def test_two_problems_are_not_compared(tmp_path, report):
    page = report(
        write_run(tmp_path / "one"), write_run(tmp_path / "two", settings=config(problem="faces"))
    )
    assert "Errors of different problems cannot be compared" in page.text


def test_diverged_runs_say_so(tmp_path, report):
    rows = metrics()
    rows[-1] |= {"train_error": None, "test_error": None}
    page = report(write_run(tmp_path / "run", rows))
    assert page.text.count("not finite") == 2


def test_configurations_side_by_side(tmp_path, report):
    one = config(seed=1, extra=0.5, nothing=None)
    two = config(seed=2) | {"machine": {"processors": 8}}
    page = report(
        write_run(tmp_path / "one", settings=one), write_run(tmp_path / "two", settings=two)
    )
    differing = re.findall(
        r'<th scope="row">≠ ([\w.]+)</th><td>(.*?)</td><td>(.*?)</td>', page.source
    )
    assert differing == [
        ("seed", "1", "2"),
        ("extra", "0.5", "—"),
        ("machine.processors", "2", "8"),
    ]
    assert flatten({"a": {"b": [1, "é"]}, "d": True, "e": None}) == {"a.b": '[1, "é"]', "d": "true"}


def test_folders_of_runs_and_folders_of_other_things(tmp_path, report, capsys):
    """What `kronfac report runs/*` is given after a demo and a benchmark."""
    write_run(tmp_path / "runs" / "alone")
    for name in ("kfac", "adamw"):
        write_run(tmp_path / "runs" / "demo" / name)
    (tmp_path / "runs" / "demo" / "report.html").write_text("a page", encoding="utf-8")
    (tmp_path / "runs" / "bench").mkdir()
    page = report(*sorted((tmp_path / "runs").iterdir()))
    rows = re.findall(r'<th scope="row">(\w+)</th>', page.source)
    assert {"alone", "adamw", "kfac"} <= set(rows)
    assert "Left out, as no runs" in capsys.readouterr().err
    with pytest.raises(ReportError, match=r"'.*bench' is no run folder: it has no metrics.jsonl"):
        report(tmp_path / "runs" / "bench")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "There is no run folder '.*lost'"),
        (
            lambda folder: (write_run(folder) / "config.json").write_text("{"),
            r"cannot read '.*lost.config\.json'",
        ),
        (
            lambda folder: (write_run(folder) / "config.json").write_text("[1]"),
            r"cannot read '.*lost.config\.json'",
        ),
        (
            lambda folder: (write_run(folder) / "metrics.jsonl").write_text('{"iter\n{}\n'),
            r"cannot read line 1 of '.*lost.metrics\.jsonl'",
        ),
    ],
)
def test_a_run_that_can_not_be_read_is_refused_in_one_line(tmp_path, report, make, message):
    make(tmp_path / "lost")
    with pytest.raises(ReportError, match=message) as error:
        report(write_run(tmp_path / "good"), tmp_path / "lost")
    assert isinstance(error.value, KronfacError)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "page.html").exists()


def test_output_is_replaced_and_its_folder_made(tmp_path):
    run = write_run(tmp_path / "run")
    output = tmp_path / "new" / "page.html"
    for _ in range(2):
        assert write_report(ReportConfig(runs=(run,), output=output)) == output
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    with pytest.raises(PageError, match=r"cannot be written to .*--output") as error:
        write_report(ReportConfig(runs=(run,), output=output.parent))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "my run")
    path = write_report(tyro.cli(ReportConfig, args=["my run"]))
    assert str(path) == "report.html"
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Made with kronfac report 'my run'" in page.text
    with pytest.raises(ValueError, match="at least one run"):
        ReportConfig(runs=())
    with pytest.raises(SystemExit):
        tyro.cli(ReportConfig, args=[])
    assert "at least one run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "—"),
        (float("inf"), "not finite"),
        (0.0, "0.000"),
        (12.3456, "12.35"),
        (0.0012345, "0.001234"),
        (70_040.2, "70,040"),
        (3.2e-7, "3.200e-07"),
        (1.5e9, "1.500e+09"),
    ],
)
def test_numbers_in_words(value, text):
    assert number(value) == text


def test_text_has_contrast_in_light_and_dark(tmp_path, report):
    report(write_run(tmp_path / "run"))
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", source, flags=re.DOTALL)
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
