"""Checks the built site: every link leads to a page, a place on it or a file, and nothing is loaded from elsewhere.

Links to other sites are not followed: ``make docs-links`` does that, with a network.

Run: make docs, or python docs/check_links.py FOLDER
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href", "object": "data"}
FOLLOWED = {"a": "href"}
NOT_LOADED = {"canonical", "next", "prev", "search", "index", "author", "license"}  # rel of a link that names a page


class Page(HTMLParser):
    """The places on a page, what it links to and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places.update(found[name] for name in ("id", "name") if name in found)
        if target := found.get(FOLLOWED.get(tag, "")):
            self.links.add(target)
        if target := found.get(LOADED.get(tag, "")):
            (self.links if found.get("rel") in NOT_LOADED else self.loads).add(target)


def problems(site: Path) -> Iterator[str]:
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} should have pages; it has none"
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for target in sorted(page.links | page.loads):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loads and parts.scheme != "data":
                    yield f"{where} loads {target}, which is not on the site"
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not there.is_file():
                yield f"{where} links to {target}, which is not there"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].places:
                yield f"{where} links to {target}: that page has no such place"
    for path in sorted(site.rglob("*.css")):
        for target in re.findall(
            r"(?:url\(|@import )\s*[\"']?((?:https?:)?//[^\"')\s]+)", path.read_text(encoding="utf-8")
        ):
            yield f"{path.relative_to(site)} loads {target}, which is not on the site"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that Sphinx wrote")
    site = parser.parse_args().site
    found = list(problems(site))
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{site}: {len(list(site.rglob('*.html')))} pages, {len(found)} broken links")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
