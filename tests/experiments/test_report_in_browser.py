"""`kronfac report` in a real browser: opened from the disk, clicked, looked at in light and dark."""

import json

import pytest

from kronfac_experiments.report import ReportConfig, write_report
from tests.experiments import browser
from tests.experiments.fabricated_runs import config, metrics, write_run

pytestmark = pytest.mark.skipif(browser.why_not() is not None, reason=str(browser.why_not()))

HOSTILE = "<img src=x onerror=window.hacked=1>"
RUNS = ("tridiagonal", "nesterov ∇", HOSTILE)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    growing = metrics(iterations=120)
    for row in growing:
        row["batch"] *= 1 + row["iteration"]
    runs = (
        write_run(folder / RUNS[0], growing, config(inverse="block_tridiagonal")),
        write_run(folder / RUNS[1], metrics(kfac=False, scale=3), config(optimizer="nag")),
        write_run(folder / RUNS[2], metrics(scale=2)),
    )
    return write_report(ReportConfig(runs, folder / "report.html")).as_uri()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.chromium(tmp_path_factory.mktemp("profile")) as session:
        yield session


class Page:
    """What a test asks of the page, and does to it."""

    def __init__(self, session):
        self.session = session

    def run(self, script, *arguments):
        return self.session.execute_script(f"return {script}", *arguments)

    def find(self, selector):
        return self.session.find_element("css selector", selector)

    def click(self, control, value):
        button = self.find(f'button[data-control="{control}"][data-value="{value}"]')
        button.click()
        return button.get_attribute("aria-pressed")

    def layout(self, plot, path):
        """The layout of what is drawn, not of what was asked for."""
        return self.run(f'document.getElementById("{plot}")._fullLayout.{path}')

    def curves(self, plot):
        """The curves of a plot as plotly has drawn them."""
        return self.run(
            f'document.getElementById("{plot}")._fullData.map(curve => ({{'
            "name: curve.name, x: [...curve.x], y: [...curve.y], colour: curve.line?.color, "
            "dash: curve.line?.dash, symbol: curve.marker?.symbol}))"
        )

    def ticks(self, plot, axis):
        return self.run(
            f'[...document.querySelectorAll("#{plot} .{axis}tick text")].map(t => t.textContent)'
        )

    def colours(self, scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.session.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def wait(self, condition):
        """The browser tells the page of new colours with its next frame, not at once."""
        from selenium.webdriver.support.wait import WebDriverWait  # noqa: PLC0415

        WebDriverWait(self.session, 20).until(lambda _: condition())

    def width(self, pixels, touch=False):
        size = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": touch}
        self.session.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.session.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})


@pytest.fixture
def page(chromium, address):
    page = Page(chromium)
    page.colours("light")
    page.width(1280)
    chromium.get(address)
    yield page
    assert chromium.get_log("browser") == []


def test_opens_from_the_disk_and_asks_for_nothing_else(page, address):
    messages = [json.loads(entry["message"]) for entry in page.session.get_log("performance")]
    requests = [
        message["message"]["params"]["request"]["url"]
        for message in messages
        if message["message"]["method"] == "Network.requestWillBeSent"
        and message["message"]["params"]["documentURL"] == address  # not the browser's own
    ]
    assert address in requests
    assert {url.split(":")[0] for url in requests} <= {"file", "data", "blob"}
    assert [url for url in requests if url.startswith("file:")] == [address]
    plots = page.run('[...document.querySelectorAll(".plot")].map(p => p.id)')
    assert {"error-plot", "time-plot", "trace-lambda", "trace-rho", "trace-batch"} <= set(plots)
    drawn = page.run(
        '[...document.querySelectorAll(".plot")].every(p => p.querySelector(".main-svg"))'
    )
    assert drawn
    loaded = page.run("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert loaded
    assert page.run("window.hacked") is None
    assert page.run('document.querySelector("td:nth-of-type(3)").textContent') == "0.9011"


def test_axis_buttons_change_what_is_below_the_curves(page):
    titles = {
        "iteration": ("iterations", 120),
        "cases": ("training cases seen", 60_000),
        "seconds": ("optimizer time, seconds", 12.0),
    }
    for axis in ("cases", "seconds", "iteration"):
        assert page.click("x", axis) == "true"
        pressed = page.run(
            'document.querySelectorAll("[data-control=x][aria-pressed=true]").length'
        )
        assert pressed == 1
        title, last = titles[axis]
        for plot in ("error-plot", "trace-lambda", "trace-rho"):
            assert page.layout(plot, "xaxis.title.text") == title
        curves = page.curves("error-plot")
        assert len(curves) == 3
        assert curves[0]["x"][-1] == pytest.approx(last)
        assert page.layout("error-plot", "xaxis.range[1]") >= last
        assert page.run('document.querySelector("#error-plot .xtitle").textContent') == title


def test_log_and_linear_buttons_change_the_axes(page):
    assert page.layout("error-plot", "yaxis.type") == "log"
    assert page.layout("error-plot", "xaxis.type") == "linear"
    logarithmic = page.ticks("error-plot", "y")
    assert "10" in logarithmic
    page.click("y-scale", "linear")
    assert page.layout("error-plot", "yaxis.type") == "linear"
    assert page.ticks("error-plot", "y")[0] == "0"
    below = page.ticks("error-plot", "x")
    page.click("x-scale", "log")
    for plot in ("error-plot", "trace-alpha"):
        assert page.layout(plot, "xaxis.type") == "log"
    assert page.ticks("error-plot", "x") != below
    page.click("y-scale", "log")
    page.click("x-scale", "linear")
    assert (page.ticks("error-plot", "y"), page.ticks("error-plot", "x")) == (logarithmic, below)
    assert page.layout("trace-lambda", "yaxis.type") == "log"
    assert page.layout("trace-mu", "yaxis.type") == "linear"


def test_toggles_add_and_take_away_curves(page):
    assert [curve["dash"] for curve in page.curves("error-plot")] == ["solid"] * 3
    page.click("quantity", "test_error")
    page.click("quantity", "averaged_train_error")
    curves = page.curves("error-plot")
    assert [curve["dash"] for curve in curves] == ["solid", "dash", "dot"] * 3
    assert curves[1]["y"][-1] == pytest.approx(1.1 * curves[0]["y"][-1], rel=1e-3)
    assert page.layout("error-plot", "yaxis.title.text") == "error"
    assert page.click("quantity", "train_error") == "false"
    assert len(page.curves("error-plot")) == 6
    looks = {(curve["colour"], curve["symbol"]) for curve in page.curves("error-plot")}
    assert len(looks) == 3

    assert len(page.curves("trace-lambda")) == 2  # Nesterov has no λ
    assert page.click("run", "0") == "false"
    assert len(page.curves("error-plot")) == 4
    assert len(page.curves("trace-lambda")) == 1
    assert len(page.layout("time-plot", "annotations")) == 2
    assert page.click("run", "0") == "true"
    assert len(page.curves("error-plot")) == 6


def test_buttons_work_from_the_keyboard(page):
    assert page.layout("error-plot", "xaxis.title.text") == "optimizer time, seconds"
    button = page.find('button[data-control="x"][data-value="iteration"]')
    page.run("arguments[0].focus()", button)
    button.send_keys(" ")
    assert page.layout("error-plot", "xaxis.title.text") == "iterations"
    # Tab goes on to the next button.
    button.send_keys("\ue004")
    following = page.session.switch_to.active_element
    assert following.get_attribute("data-value") == "cases"
    following.send_keys("\ue007")
    assert page.layout("error-plot", "xaxis.title.text") == "training cases seen"


def test_pointing_at_a_curve_shows_its_values(page):
    from selenium.webdriver import ActionChains  # noqa: PLC0415

    plot = page.find("#error-plot .nsewdrag")
    page.run("arguments[0].scrollIntoView({block: 'center'})", plot)
    place = page.run(
        "(() => {"
        'const {xaxis, yaxis} = document.getElementById("error-plot")._fullLayout;'
        'const curve = document.getElementById("error-plot")._fullData[2];'
        "return [xaxis.d2p(curve.x[3]) - xaxis._length / 2, yaxis.d2p(curve.y[3]) - yaxis._length / 2]"
        "})()"
    )
    ActionChains(page.session).move_to_element_with_offset(
        plot, round(place[0]), round(place[1])
    ).pause(0.3).perform()
    text = page.run('document.querySelector("#error-plot .hoverlayer").textContent')
    assert HOSTILE in text
    assert "training error 21.91" in text
    assert "iteration 30 · 15,000 cases · 3 s" in text
    assert page.run("window.hacked") is None


def test_dark_mode_changes_page_and_plots(page):
    def look():
        return {
            "page": page.run("getComputedStyle(document.body).backgroundColor"),
            "text": page.layout("error-plot", "font.color"),
            "grid": page.layout("trace-gamma", "xaxis.gridcolor"),
            "curve": page.curves("error-plot")[0]["colour"],
            "bars": page.layout("time-plot", "font.color"),
        }

    def changed():
        now = look()
        return all(light[part] != now[part] for part in light)

    light = look()
    page.colours("dark")
    page.wait(changed)
    dark = look()
    assert all(light[part] != dark[part] for part in light)
    page.colours("light")
    page.wait(lambda: look() == light)
    assert look() == light


def test_a_phone_needs_no_scrolling_sideways_but_in_tables(page):
    page.width(390, touch=True)
    page.session.refresh()
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    overflow = page.run(
        '[...document.querySelectorAll(".plot, .controls, .shot img, h1, button")]'
        ".filter(e => e.getBoundingClientRect().right > window.innerWidth).length"
    )
    assert overflow == 0
    table = page.run(
        "(() => { const box = document.querySelector('.scroll');"
        "return [box.scrollWidth > box.clientWidth, box.tabIndex] })()"
    )
    assert table == [True, 0]
    # A finger on a plot scrolls the page.
    assert page.layout("error-plot", "dragmode") is False


def test_only_what_differs_hides_the_other_settings(page):
    rows = (
        '[...document.querySelectorAll("#configuration-table tbody tr")]'
        ".filter(row => row.offsetParent !== null).map(row => row.cells[0].innerText)"
    )
    everything = page.run(rows)
    assert {"problem", "seed"} <= set(everything)
    page.find("#only-differences").click()
    assert page.run(rows) == ["≠ optimizer", "≠ inverse"]
    page.find("#only-differences").click()
    assert page.run(rows) == everything
