"""Open every page of the built site in a browser, wide and as a phone, and look at it.

A page fails if it shows raw TeX, has a formula without size, is wider than the phone, asks for
anything elsewhere, or writes an error to the console.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).parent.parent / "build" / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
RAW_TEX = r"""() => {
  const article = document.querySelector("article").cloneNode(true);
  article.querySelectorAll("pre, code, annotation").forEach(part => part.remove());
  return article.textContent.match(/\$\$|\\(frac|tag|text|mathrm|quad)\b/)?.[0] ?? null;
}"""
EMPTY_FORMULAS = """() => [...document.querySelectorAll("math")]
  .filter(formula => !formula.getBoundingClientRect().width).length"""
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


def main() -> int:
    """Look at all pages in two widths; the number of faults is the exit code, at most 1."""
    pages = sorted(path for path in SITE.rglob("*.html") if path.name != "404.html")
    found = 0
    with sync_playwright() as driver:
        executable = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for width in (1280, 390):
            context = browser.new_context(viewport={"width": width, "height": 900}, offline=True)
            for path in pages:
                page = context.new_page()
                for fault in faults_of(page, path):
                    found += 1
                    print(f"{path.relative_to(SITE)} at {width}: {fault}", file=sys.stderr)
                page.close()
    print(f"{len(pages)} pages in two widths, {found} faults")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
