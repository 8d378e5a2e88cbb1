"""What tests read in the text and in the page of a report."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from fp4compile.report.report import Row


def row(module="a", reason=None, product="fprop", **fields) -> Row:
    """A row of a report, quantised where there is no reason."""
    formats = ("mxfp8", "mxfp8", "reference") if reason is None else ("bfloat16", "bfloat16", None)
    return replace(Row(module, product, 2, 4, 8, *formats, reason, 100), **fields)


def flat(text: object) -> str:
    """The text of an object with one space in place of each line break and indent."""
    return " ".join(str(text).split())


def selectors(markup: str) -> list[str]:
    """The selectors of all rules in the styles of a page or a part of one."""
    styles = re.findall("<style>(.*?)</style>", markup, re.DOTALL)
    heads = (head for style in styles for head in re.findall(r"([^{};]+)\{", style))
    return [one.strip() for head in heads if not head.strip().startswith("@") for one in head.split(",")]


class Page(HTMLParser):
    """The texts of a page: of its summary, of each line of its table, and of its notes."""

    def __init__(self, page):
        super().__init__()
        self.facts, self.rows, self.notes, self.inside = [], [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes).get("class") or ""
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and "bars" not in given:
            self.rows[-1].append("")
        if tag == "script" or "bars" in given:
            self.inside = ""
        elif given == "notes" or self.inside == "notes":
            self.inside = "notes"
        elif tag != "wbr":
            self.inside = tag

    def handle_data(self, text):
        if self.inside in ("dt", "dd"):
            self.facts.append(text)
        elif self.inside in ("td", "th"):
            self.rows[-1][-1] += text
        elif self.inside == "notes" and text.strip():
            self.notes.append(text)

    def handle_endtag(self, tag):
        if tag in ("td", "th", "dt", "dd"):
            self.inside = ""
