"""Open every page of the built site in a browser, wide and as a phone, and look at it.

A page fails if it shows raw TeX, has a formula without size, is wider than the phone, has a white
figure in the dark, asks for anything elsewhere, or writes an error to the console. The search must
find something.
"""

import contextlib
import functools
import http.server
import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, TimeoutError, sync_playwright

SITE = Path(__file__).parent.parent / "build" / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
RAW_TEX = r"""() => {
  const article = document.querySelector("article").cloneNode(true);
  article.querySelectorAll("pre, code, annotation").forEach(part => part.remove());
  return article.textContent.match(/\$\$|\\(frac|tag|text|mathrm|quad)\b/)?.[0] ?? null;
}"""
EMPTY_FORMULAS = """() => [...document.querySelectorAll("math")]
  .filter(formula => !formula.getBoundingClientRect().width).length"""
WHITE_FIGURES = """() => [...document.querySelectorAll("article img")]
  .filter(image => image.src.match(/(svg|tokens\\.png)$/))
  .filter(image => getComputedStyle(image).filter === "none").length"""
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def faults_of(page: Page, path: Path) -> list[str]:
    """What is wrong with one page, in words."""
    faults: list[str] = []
    elsewhere: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"an error on the page: {error}"))
    page.on("request", lambda asked: elsewhere.append(asked.url))
    page.goto(path.as_uri())
    if tex := page.evaluate(RAW_TEX):
        faults.append(f"raw TeX: {tex}")
    if empty := page.evaluate(EMPTY_FORMULAS):
        faults.append(f"{empty} formulas without size")
    if (wide := page.evaluate(TOO_WIDE)) > 0:
        faults.append(f"{wide} pixels wider than the window")
    faults += [f"asks for {url}" for url in elsewhere if not url.startswith(("file:", "data:"))]
    return faults


class Silent(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        pass


def search_faults(context: BrowserContext) -> list[str]:
    """The search loads its index, which takes a server on this machine, and finds a page."""
    handler = functools.partial(Silent, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.locator("label[for=__search]").first.click()
        found = False
        for _ in range(30):  # what is written before the page's code has started is not seen
            query = page.locator("input[name=query]")
            query.fill("")
            query.press_sequentially("loss store")  # the page listens to keys
            with contextlib.suppress(TimeoutError):
                page.locator(".md-search-result__link").first.wait_for(timeout=2_000)
                found = True
                break
        page.close()
        server.shutdown()
    return [] if found else ["the search finds nothing about the loss store"]


def main() -> int:
    """Look at all pages in two widths, the narrow one in the dark; the exit code is 1 where a
    fault was found."""
    pages = sorted(path for path in SITE.rglob("*.html") if path.name != "404.html")
    found = 0
    with sync_playwright() as driver:
        executable = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (390, "dark")):
            size = {"width": width, "height": 900}
            context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
            for path in pages:
                page = context.new_page()
                faults = faults_of(page, path)
                if scheme == "dark" and (white := page.evaluate(WHITE_FIGURES)):
                    faults.append(f"{white} white figures in the dark")
                for fault in faults:
                    found += 1
                    print(f"{path.relative_to(SITE)} at {width}: {fault}", file=sys.stderr)
                page.close()
        for fault in search_faults(browser.new_context(viewport={"width": 390, "height": 900})):
            found += 1
            print(fault, file=sys.stderr)
    print(f"{len(pages)} pages in two widths, {found} faults")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
