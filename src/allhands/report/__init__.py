"""Reports on one run or several: read, judged, and written as self-contained HTML and Markdown."""

from allhands.observe.judging import Judgement, judge
from allhands.report.facts import Answers, ReportFacts, read_facts
from allhands.report.html import to_html
from allhands.report.markdown import to_markdown
from allhands.report.page import Page, make_page

__all__ = [
    "Answers",
    "Judgement",
    "Page",
    "ReportFacts",
    "judge",
    "make_page",
    "read_facts",
    "to_html",
    "to_markdown",
]
