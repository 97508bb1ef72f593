"""A headless Chromium for tests. `python -m tests.browser` installs it where it can."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium import webdriver

PACKAGES = ("chromium", "chromium-driver")
HOW_TO_INSTALL = f"as root, on Debian or Ubuntu: apt-get install {' '.join(PACKAGES)}"


def programs() -> tuple[str, str] | None:
    """Chromium (or Chrome) and its driver, if both are here."""
    browsers = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in browsers if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def why_not() -> str | None:
    """Why tests in a browser can't run here; None if they can."""
    try:
        import selenium  # noqa: F401, PLC0415
    except ImportError:
        return "needs selenium: pip install selenium"
    return None if programs() else f"needs Chromium and chromedriver; {HOW_TO_INSTALL}"


@contextmanager
def chromium(profile: Path) -> Iterator["webdriver.Chrome"]:
    """A browser with an empty profile, that talks to nobody but the test."""
    from selenium import webdriver  # noqa: PLC0415

    found = programs()
    assert found
    browser, driver = found
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",  # too small in most containers
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield session
    finally:
        session.quit()


def install() -> None:
    """Where it is missing, with the packages of the system; says so where that can't be done."""
    if programs():
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(f"No Chromium: its tests will be skipped. To have it, {HOW_TO_INSTALL}.")
        return
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        for command in (("update",), ("install", "-y", "--no-install-recommends", *PACKAGES)):
            subprocess.run(
                ["apt-get", "-qq", *command],
                env=quiet,
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=600,
            )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"Chromium could not be installed, its tests will be skipped: {error}")


if __name__ == "__main__":
    sys.exit(install())
