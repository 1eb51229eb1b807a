"""A real browser for pages that the library writes: Debian's chromium, driven by playwright."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class BrowserPage:
    """A tab that remembers what it wrote in the console, dialogs, and what it asked for beyond the file itself."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path) -> Any:
        """Load a file as a reader would, by a double click, and return playwright's page."""
        address = path.resolve().as_uri()

        def dismiss(dialog: Any) -> None:
            self.errors.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        def ask(request: Any) -> None:
            if request.url.partition("#")[0] != address and not request.url.startswith(("data:", "blob:")):
                self.requests.append(request.url)

        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", dismiss)
        self.page.on("request", ask)
        self.page.goto(address, wait_until="load")
        return self.page

    def assert_clean(self) -> None:
        assert self.errors == []
        assert self.requests == []


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless chromium for the tests of one module; their event loop must not outlive them."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser_page(chromium: Any) -> Iterator[BrowserPage]:
    """A fresh tab, 1280 x 800, light unless ``page.emulate_media(color_scheme="dark")`` says otherwise."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.set_default_timeout(20_000)
    yield BrowserPage(context.new_page())
    context.close()
